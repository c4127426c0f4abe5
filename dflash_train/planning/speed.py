"""FLOPs and bytes of a pass, and the times that follow from a machine's two rates. Bounds: nothing can be faster."""

from dataclasses import dataclass

from dflash_train.config import DrafterConfig
from dflash_train.planning.memory import draft_cache_bytes, kv_bytes, recurrent_bytes
from dflash_train.planning.shapes import (
    TargetSizes,
    drafter_parameters,
    full_attention_parameters,
    linear_attention_parameters,
    mlp_parameters,
    read_parameters,
    table_parameters,
)


@dataclass(frozen=True)
class Rates:
    """bandwidth: bytes/s of one GPU's memory; flops: FLOP/s of its dense bfloat16 products. None = unknown."""

    bandwidth: float | None
    flops: float | None


def layer_flops(sizes: TargetSizes, num_layers: int | None = None) -> float:
    """FLOPs of one token through the first `num_layers` decoder layers (null = all): two per weight; attention's
    own products are left out. 48.7 GFLOP for Qwen3.6-27B, 47.2 up to its layer 61."""
    shape, count = sizes.shape, sizes.num_layers if num_layers is None else num_layers
    linear = round(count * shape.num_linear_layers / sizes.num_layers)
    mixers = linear * linear_attention_parameters(sizes) if linear else 0
    mixers += (count - linear) * full_attention_parameters(sizes)
    return 2.0 * (mixers + count * mlp_parameters(sizes, shape.experts_per_token if shape.num_experts else None))


def token_flops(sizes: TargetSizes) -> float:
    """FLOPs of one token through the layers and the head."""
    return layer_flops(sizes) + 2.0 * table_parameters(sizes)


def pass_s(num_bytes: float, flops: float, rates: Rates, ways: int = 1) -> float | None:
    """Seconds of a pass that reads `num_bytes` once and computes `flops`, on `ways` GPUs at the same time: the
    slower of the two. None when a rate is unknown."""
    if rates.bandwidth is None or rates.flops is None:
        return None
    return max(num_bytes / rates.bandwidth, flops / rates.flops) / ways


def verify_s(sizes: TargetSizes, num_nodes: int, context: int, item: int, rates: Rates, ways: int = 1) -> float | None:
    """Bound of one verify pass: every weight once, the context's keys and values, the GDN states; or the matrix
    products of all nodes. ways=1 is also the time of layers spread over GPUs, which work one after the other."""
    num_bytes = read_parameters(sizes, num_nodes) * item + kv_bytes(sizes, context, item) + recurrent_bytes(sizes)
    return pass_s(num_bytes, num_nodes * token_flops(sizes), rates, ways)


def draft_s(drafter: DrafterConfig, context: int, item: int, rates: Rates) -> float | None:
    """Bound of drafting one block on one GPU: the drafter's weights, the head and the context's cache once."""
    weights = sum(drafter_parameters(drafter).values()) + drafter.vocab_size * drafter.target_hidden_size
    num_bytes = weights * item + draft_cache_bytes(drafter, context, item)
    return pass_s(num_bytes, 2.0 * drafter.block_size * weights, rates)


def speedup(acceptance: float, autoregressive_s: float, round_s: float) -> float:
    """Tokens a second of rounds that commit `acceptance` tokens each, over one token a pass on the same runtime."""
    return acceptance * autoregressive_s / round_s


# ---------------------------------------------------------------- training


def block_flops(drafter: DrafterConfig) -> float:
    """Useful FLOPs of training on one block: the layers forward and backward (3x) on all slots, the frozen head forward
    and the gradient to its input (2x) on the supervised ones. 230 GFLOP for Qwen3.6-27B at 16 slots, 112 at 8."""
    body = 2.0 * drafter_parameters(drafter)["layers"] * drafter.block_size
    head = 2.0 * drafter.vocab_size * drafter.target_hidden_size * (drafter.block_size - 1)
    return 3 * body + 2 * head


def context_flops(drafter: DrafterConfig) -> float:
    """FLOPs of training that one context token costs, however many blocks read it: fc, and every layer's k and v."""
    keys = 2 * drafter.hidden_size * drafter.num_kv_heads * drafter.head_dim
    return 3 * 2.0 * (drafter_parameters(drafter)["fc"] + drafter.num_layers * keys)


def row_flops(drafter: DrafterConfig, row_tokens: int, num_anchors: int) -> float:
    """FLOPs of one packed row."""
    return num_anchors * block_flops(drafter) + row_tokens * context_flops(drafter)


def zero_traffic_bytes(parameters: int, stage: int, world: int, accumulation: int) -> float:
    """Bytes each GPU sends in one optimizer step by ring: the gradients once a step (stage 1, float32) or once a pass
    (bfloat16), the weights once a step, and at stage 3 twice a pass."""
    if world == 1:
        return 0.0
    share = (world - 1) / world * parameters
    gradients = 2 * 4 * share if stage == 1 else 2 * share * accumulation
    return gradients + 2 * share * (2 * accumulation if stage == 3 else 1)
