"""Group hardware: the device a stage computes on, and the machine that `plan` reckons with."""

from dataclasses import dataclass

from dflash_train.config.checks import require, require_choice

SPREAD_ABOVE = 0.9
"""Share of a GPU's memory above which `target=hf` spreads the weights over all visible GPUs, and `plan` reckons so."""


@dataclass
class HardwareConfig:
    """device, num_threads: what a stage computes on. The rest is a profile: facts of one kind of machine.

    Bytes and rates are of one GPU. null = unknown: `plan` then says so, and which key would tell, instead of guessing.
    """

    device: str = "auto"  # auto | cpu | cuda
    num_threads: int | None = None  # CPU threads; null = all
    name: str = "auto"  # auto: the machine at hand
    gpu: str | None = None  # regular expression of the whole name that CUDA gives such a GPU
    num_gpus: int | None = None
    compute_capability: str | None = None  # "8.6"
    memory_bytes: int | None = None  # as CUDA reports it: less than on the box
    reserve_bytes: int = 1_500_000_000  # of it: CUDA context, library workspaces, fragmentation
    bandwidth: float | None = None  # bytes/s of the GPU's own memory
    bf16_flops: float | None = None  # dense bfloat16 matrix products with float32 sums, FLOP/s
    rates: str | None = None  # measured | data sheet: where the two figures above come from
    interconnect: str | None = None
    interconnect_bytes_per_s: float | None = None  # from GPU to GPU, one direction
    flash_attention: int | None = None  # newest FlashAttention the GPU runs
    fp8: bool | None = None  # has fp8 matrix units
    upload_bytes_per_s: float | None = None  # to the store; the machine's, not a GPU's
    usd_per_gpu_hour: float | None = None

    def check(self) -> None:
        require_choice(self.device, ("auto", "cpu", "cuda"), "hardware.device")
        for key in ("memory_bytes", "bandwidth", "bf16_flops", "interconnect_bytes_per_s", "upload_bytes_per_s"):
            value = getattr(self, key)
            require(value is None or value > 0, f"hardware.{key}", got=value, want="> 0, or null for unknown")
        require(self.num_gpus is None or self.num_gpus >= 0, "hardware.num_gpus", got=self.num_gpus, want=">= 0")
        require(self.usd_per_gpu_hour is None or self.usd_per_gpu_hour >= 0, "hardware.usd_per_gpu_hour",
                got=self.usd_per_gpu_hour, want=">= 0, or null")  # fmt: skip
        require(self.reserve_bytes >= 0, "hardware.reserve_bytes", got=self.reserve_bytes, want=">= 0")
