"""Who sees whom, written once: the dense mask, the flex mask and the cached drafting step all ask `block_rule`.

Queries are the N*S block slots; keys are the T context rows followed by the same N*S slots. A slot sees context rows of
its own document before its anchor, and its own block; nothing else, so neighbouring blocks cannot leak the future.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dflash_train.config import DrafterConfig
from dflash_train.records import Blocks

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class MaskKind:
    """What a layer type adds: keys at distance q - k < window only, and no later slot of the block when causal."""

    window: int | None
    causal: bool


def layer_types(config: DrafterConfig) -> list[str]:
    """The type of each layer; null means all full."""
    return config.layer_types or [FULL] * config.num_layers


def mask_kind(config: DrafterConfig, layer_type: str) -> MaskKind:
    """Full layers see their block in both directions and sliding ones are causal, unless `is_causal` overrides both."""
    sliding = layer_type == SLIDING
    causal = sliding if config.is_causal is None else config.is_causal
    return MaskKind(window=config.sliding_window if sliding else None, causal=causal)


def block_rule(
    anchors: Tensor, valid: Tensor, block_documents: Tensor, context_documents: Tensor, block_size: int, kind: MaskKind
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """rule(b, q, k) -> bool, for index tensors that broadcast: may query slot q of row b see key k?

    anchors, valid, block_documents [B,N]; context_documents [B,T]. An invalid block sees its own block only: a row that
    sees nothing is NaN in a dense softmax. Distances count rows, which inside a document is the same as positions."""
    # Tensors, not ints, so that a compiled rule does not recompile for another length.
    last_context = torch.tensor(context_documents.shape[1] - 1, device=anchors.device)
    last_block = torch.tensor(anchors.shape[1] - 1, device=anchors.device)

    def rule(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = torch.minimum(q // block_size, last_block)  # flex pads queries to whole tiles
        slot = q % block_size
        anchor = anchors[b, block]
        is_context = k <= last_context
        row = torch.minimum(k, last_context)
        other = k - last_context - 1
        in_context = is_context & valid[b, block] & (row < anchor)
        in_context = in_context & (context_documents[b, row] == block_documents[b, block])
        in_block = ~is_context & (other // block_size == block)
        distance = torch.where(is_context, anchor + slot - row, slot - other % block_size)
        seen = in_context | in_block
        if kind.causal:
            seen = seen & (distance >= 0)
        if kind.window is not None:
            seen = seen & (distance < kind.window) & (-distance < kind.window)
        return seen

    return rule


def dense_mask(blocks: Blocks, context_documents: Tensor, kind: MaskKind) -> Tensor:
    """bool[B, Q, T+Q], True = visible. context_documents i64[B,T] (-1 at padding)."""
    rule = block_rule(blocks.anchors, blocks.valid, blocks.document_ids, context_documents, blocks.block_size, kind)
    num_rows, num_blocks = blocks.anchors.shape
    num_queries = num_blocks * blocks.block_size
    index = lambda n: torch.arange(n, device=context_documents.device)
    rows, queries, keys = index(num_rows), index(num_queries), index(context_documents.shape[1] + num_queries)
    return rule(rows[:, None, None], queries[None, :, None], keys[None, None, :])


@cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    # Uncompiled, it materialises the dense [Q, T+Q] grid it is meant to avoid.
    return torch.compile(create_block_mask)


def flex_mask(blocks: Blocks, context_documents: Tensor, kind: MaskKind) -> BlockMask:
    """The same rule as a BlockMask for flex_attention."""
    rule = block_rule(blocks.anchors, blocks.valid, blocks.document_ids, context_documents, blocks.block_size, kind)
    num_rows, num_blocks = blocks.anchors.shape
    num_queries = num_blocks * blocks.block_size
    device = context_documents.device
    build = _compiled_create_block_mask() if device.type == "cuda" else create_block_mask
    return build(
        lambda b, h, q, k: rule(b, q, k), B=num_rows, H=None, Q_LEN=num_queries,
        KV_LEN=context_documents.shape[1] + num_queries, device=str(device),
    )  # fmt: skip


def build_masks(
    config: DrafterConfig, blocks: Blocks, context_documents: Tensor, attention: str
) -> dict[str, Tensor | BlockMask]:
    """One mask per layer type of the drafter, built once per step. attention: "sdpa" (dense) | "flex"."""
    build = flex_mask if attention == "flex" else dense_mask
    kinds = sorted(set(layer_types(config)))
    return {kind: build(blocks, context_documents, mask_kind(config, kind)) for kind in kinds}
