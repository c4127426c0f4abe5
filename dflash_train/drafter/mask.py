"""Who sees whom, written once: the dense mask, the flex mask and the cached drafting step all ask `block_rule`.

Queries are the N*S block slots; keys are the T context rows followed by the same N*S slots. A slot sees context rows of
its own document before its anchor, and its own block; nothing else, so neighbouring blocks cannot leak the future.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_train.config import DrafterConfig
from dflash_train.records import Blocks

FULL, SLIDING = "full_attention", "sliding_attention"
TILE = 128  # of flex_attention's block sparsity


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


def _visible_per_tile(blocks: Blocks, context_documents: Tensor, kind: MaskKind) -> Tensor:
    """i64[B, Q/TILE, (T+Q)/TILE]: visible (query, key) pairs in each tile, from intervals instead of the dense grid.

    What a slot sees is two runs of keys: context from its document's (or its window's) start up to the anchor, and a
    stretch of its own block. Documents lie in one piece in a row."""
    num_blocks, S, T = blocks.anchors.shape[1], blocks.block_size, context_documents.shape[1]
    device, num_keys = context_documents.device, T + num_blocks * S
    index = lambda n: torch.arange(n, device=device)
    begins = torch.ones_like(context_documents, dtype=torch.bool)
    begins[:, 1:] = context_documents[:, 1:] != context_documents[:, :-1]
    document_start = torch.where(begins, index(T), 0).cummax(dim=1).values.gather(1, blocks.anchors)
    slot, anchor = index(S), blocks.anchors[..., None]
    window = num_keys if kind.window is None else kind.window  # none: wider than everything
    first = torch.maximum(document_start[..., None], anchor + slot - window + 1)
    end = torch.where(blocks.valid[..., None], anchor, 0).expand_as(first)
    own = T + index(num_blocks)[:, None] * S
    own_first = (own + (slot - window + 1).clamp(min=0)).expand_as(first)
    own_end = (own + (slot + 1 if kind.causal else (slot + window).clamp(max=S))).expand_as(first)

    tile = index(-(-num_keys // TILE)) * TILE
    inside = lambda lo, hi: torch.minimum(hi[..., None], tile + TILE) - torch.maximum(lo[..., None], tile)
    visible = (inside(first, end).clamp(min=0) + inside(own_first, own_end).clamp(min=0)).flatten(1, 2)
    visible = torch.nn.functional.pad(visible, (0, 0, 0, -visible.shape[1] % TILE))
    return visible.unflatten(1, (-1, TILE)).sum(dim=2)


def flex_mask(blocks: Blocks, context_documents: Tensor, kind: MaskKind) -> BlockMask:
    """The same rule as a BlockMask for flex_attention, which asks it inside partly visible tiles only.

    create_block_mask would evaluate all Q*(T+Q) pairs, or compile anew for every length."""
    rule = block_rule(blocks.anchors, blocks.valid, blocks.document_ids, context_documents, blocks.block_size, kind)
    visible = _visible_per_tile(blocks, context_documents, kind)[:, None]
    full = visible == TILE * TILE
    listed = lambda tiles: (tiles.sum(-1, dtype=torch.int32),
                            tiles.int().argsort(dim=-1, descending=True, stable=True).int())  # fmt: skip
    num_queries = blocks.anchors.shape[1] * blocks.block_size
    return BlockMask.from_kv_blocks(
        *listed((visible > 0) & ~full), *listed(full), BLOCK_SIZE=TILE, mask_mod=lambda b, h, q, k: rule(b, q, k),
        seq_lengths=(num_queries, context_documents.shape[1] + num_queries),
    )  # fmt: skip


def build_masks(
    config: DrafterConfig, blocks: Blocks, context_documents: Tensor, attention: str
) -> dict[str, Tensor | BlockMask]:
    """One mask per layer type of the drafter, built once per step. attention: "sdpa" (dense) | "flex"."""
    build = flex_mask if attention == "flex" else dense_mask
    kinds = sorted(set(layer_types(config)))
    return {kind: build(blocks, context_documents, mask_kind(config, kind)) for kind in kinds}
