"""Terabytes, hours and money of regeneration, extraction and training."""

from dataclasses import dataclass

from dflash_train.config import DrafterConfig
from dflash_train.planning.memory import kv_bytes, recurrent_bytes
from dflash_train.planning.shapes import TargetSizes, read_parameters
from dflash_train.planning.speed import Rates, layer_flops, pass_s, row_flops, token_flops, zero_traffic_bytes


@dataclass(frozen=True)
class Work:
    """One stage's bill. rate: units a second on the whole machine. bound_by: what keeps it from being faster. None =
    unknown."""

    units: float
    unit: str
    rate: float | None
    bound_by: str

    @property
    def hours(self) -> float | None:
        return None if not self.rate else self.units / self.rate / 3600

    def usd(self, num_gpus: int, usd_per_gpu_hour: float | None) -> float | None:
        if self.hours is None or usd_per_gpu_hour is None:
            return None
        return self.hours * num_gpus * usd_per_gpu_hour


def regeneration(sizes: TargetSizes, num_tokens: float, batch: int, mean_context: float, item: int, rates: Rates,
                 copies: int, launch_s: float) -> Work:  # fmt: skip
    """Answering: `copies` of the target, each a batch of sequences at their mean context, one token per pass and
    sequence. A pass reads the weights, all keys and values, and reads and writes all GDN states."""
    per_sequence = kv_bytes(sizes, int(mean_context), item) + 2 * recurrent_bytes(sizes)
    num_bytes = read_parameters(sizes, batch) * item + batch * per_sequence
    seconds = pass_s(num_bytes, batch * token_flops(sizes), rates)
    if seconds is None:
        return Work(num_tokens, "tokens", None, "hardware.bandwidth and hardware.bf16_flops would tell")
    why = "kernel launches" if launch_s > seconds else "memory bandwidth and matrix rate"
    return Work(num_tokens, "tokens", copies * batch / max(seconds, launch_s), why)


def extraction(sizes: TargetSizes, num_tokens: float, last_layer: int, rates: Rates, copies: int, mfu: float,
               token_bytes: int, upload_bytes_per_s: float | None) -> Work:  # fmt: skip
    """Capture up to decoder layer `last_layer`, at `mfu` of the matrix rate, or as fast as the store takes the rows."""
    if rates.flops is None:
        return Work(num_tokens, "tokens", None, "hardware.bf16_flops would tell")
    rate = copies * mfu * rates.flops / layer_flops(sizes, last_layer + 1)
    if upload_bytes_per_s is not None and upload_bytes_per_s / token_bytes < rate:
        return Work(num_tokens, "tokens", upload_bytes_per_s / token_bytes, "upload")
    return Work(num_tokens, "tokens", rate, "matrix rate")


def training(drafter: DrafterConfig, num_tokens: float, *, epochs: float, row_tokens: int, num_anchors: int, mfu: float,
             rates: Rates, world: int, parameters: int, stage: int, accumulation: int,
             interconnect_bytes_per_s: float | None) -> Work:  # fmt: skip
    """All rows of all epochs, full and with every anchor valid: blocks at `mfu` of the matrix rate, and the traffic of
    ZeRO beside them."""
    rows = epochs * num_tokens / row_tokens
    if rates.flops is None or (world > 1 and interconnect_bytes_per_s is None):
        key = "hardware.bf16_flops" if rates.flops is None else "hardware.interconnect_bytes_per_s"
        return Work(rows * num_anchors, "blocks", None, f"{key} would tell")
    compute = accumulation * row_flops(drafter, row_tokens, num_anchors) / (mfu * rates.flops)
    traffic = zero_traffic_bytes(parameters, stage, world, accumulation) / (interconnect_bytes_per_s or 1.0)
    rate = world * accumulation * num_anchors / (compute + traffic)
    return Work(rows * num_anchors, "blocks", rate, "interconnect" if traffic > compute else "matrix rate")


def storage_usd(num_bytes: float, usd_per_gb_month: float, months: float) -> float:
    """Of keeping the shards; GB = 1e9 bytes."""
    return num_bytes / 1e9 * usd_per_gb_month * months
