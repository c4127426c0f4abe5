"""The DFlash drafter: one forward over many packed blocks for training, and a cached one for decoding.

Parameter names and arithmetic are z-lab's. The target's captured rows become one context tensor that every layer
projects to keys and values with the same weights as its own block; only the block's rows go through the layers. The
target's embedding and head stay outside the module (`TargetHead`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from dflash_train.config import DrafterConfig
from dflash_train.drafter.kernels import TORCH, Kernels
from dflash_train.drafter.mask import block_rule, build_masks, layer_types, mask_kind
from dflash_train.drafter.resolve import resolve_drafter
from dflash_train.records import Blocks, DraftBatch, TargetHead
from dflash_train.util.errors import UserError
from dflash_train.util.log import say

__all__ = [
    "DFlashDrafter", "DraftCache", "Drafter", "Options", "block_hidden", "draft", "extend", "init_weights",
    "inverse_frequencies", "resolve_attention", "resolve_drafter",
]  # fmt: skip


@dataclass
class Options:
    """`drafter.options` of this kind: none."""


def inverse_frequencies(head_dim: int, theta: float, device: torch.device | str = "cpu") -> Tensor:
    """float32 [head_dim/2], over the full head. Computed, never stored: a buffer would be rounded by `.to(bfloat16)`,
    which at theta 1e7 is 2.4 rad wrong at a distance of 2,048."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / theta**exponent


def rope_tables(position_ids: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """position_ids [B,T] -> cos, sin [B,1,T,K] in `dtype`; the phases are float32."""
    phase = position_ids[..., None].float() * inverse_frequencies(head_dim, theta, position_ids.device)
    phase = torch.cat([phase, phase], dim=-1)[:, None]
    return phase.cos().to(dtype), phase.sin().to(dtype)


@cache
def compiled_flex() -> Callable[..., Tensor]:
    """flex_attention compiled per shape. Uncompiled it materialises all scores, so a shape too many is an error
    (fullgraph) and not a quiet fallback: callers keep lengths few (fixed rows, `walk.pad_row`)."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def attend(q_BHQK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Grouped-query attention, scale K^-0.5. mask: bool [B,Q,T] (sdpa), a BlockMask (flex) or None (all visible)."""
    if isinstance(mask, BlockMask):
        flex = compiled_flex() if q_BHQK.device.type == "cuda" else flex_attention
        return flex(q_BHQK, k_BHTK, v_BHTK, block_mask=mask, enable_gqa=True)
    mask = None if mask is None else mask[:, None]
    return F.scaled_dot_product_attention(q_BHQK, k_BHTK, v_BHTK, attn_mask=mask, enable_gqa=True)


class HeadNorm(nn.RMSNorm):
    """Of each head's query or key, then RoPE. A module's forward, so that ZeRO-3 gathers its weight."""

    def forward(self, x_BTHK: Tensor, rope: tuple[Tensor, Tensor], kernels: Kernels) -> Tensor:
        return kernels.norm_rope(x_BTHK, self.weight, self.eps, rope)


class DFlashAttention(nn.Module):
    kernels = TORCH

    def __init__(self, config: DrafterConfig):
        super().__init__()
        linear = lambda n_in, n_out: nn.Linear(n_in, n_out, bias=config.attention_bias)
        self.head_dim = config.head_dim
        self.q_proj = linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = linear(config.num_heads * config.head_dim, config.hidden_size)
        self.q_norm = HeadNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = HeadNorm(config.head_dim, eps=config.rms_norm_eps)

    def heads(self, x_BTX: Tensor) -> Tensor:
        return x_BTX.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, rows_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Context rows or block rows -> normed and rotated keys, and values, [B,Hkv,T,K] each."""
        keys = self.k_norm(self.heads(self.k_proj(rows_BTD)), rope, self.kernels)
        return keys, self.heads(self.v_proj(rows_BTD)).transpose(1, 2)

    def forward(self, x_BQD: Tensor, context_kv: tuple[Tensor, Tensor], rope: tuple[Tensor, Tensor], mask) -> Tensor:
        queries = self.q_norm(self.heads(self.q_proj(x_BQD)), rope, self.kernels)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context_kv, self.keys_values(x_BQD, rope)))
        return self.o_proj(attend(queries, keys, values, mask).transpose(1, 2).flatten(2))


class DFlashMLP(nn.Module):
    kernels = TORCH

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.kernels.swiglu(self.gate_proj(x), self.up_proj(x)))


class DFlashLayer(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = DFlashMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_BQD: Tensor, context_kv: tuple[Tensor, Tensor], rope: tuple[Tensor, Tensor], mask) -> Tensor:
        x_BQD = x_BQD + self.self_attn(self.input_layernorm(x_BQD), context_kv, rope, mask)
        return x_BQD + self.mlp(self.post_attention_layernorm(x_BQD))


class DFlashDrafter(nn.Module):
    """config: a resolved DrafterConfig (no size is null). All norms are plain x*w with float32 internals."""

    checkpointing = False

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def use(self, kernels: Kernels, checkpointing: bool = False) -> "DFlashDrafter":
        """Compute with these kernels from now on; a new model has plain torch. checkpointing: keep of each layer its
        input alone, and compute the rest again in the backward. Returns the model."""
        self.checkpointing = checkpointing
        for layer in self.layers:
            layer.self_attn.kernels = layer.mlp.kernels = kernels
        return self

    def rope(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(position_ids, self.config.head_dim, self.config.rope_theta, self.dtype)

    def read_context(self, context_BTL: Tensor) -> Tensor:
        """Captured rows [B, T, L*H], taps side by side -> what every layer reads, [B,T,D]."""
        return self.hidden_norm(self.fc(context_BTL.to(self.dtype)))

    def forward(
        self, noise_BQD: Tensor, context_BTL: Tensor, context_positions: Tensor, block_positions: Tensor,
        masks: dict[str, Tensor | BlockMask],
    ) -> Tensor:  # fmt: skip
        """Slot embeddings [B,Q,D] and captured rows [B, T, L*H] at positions [B,Q] and [B,T] -> hidden [B,Q,D] after
        the final norm, ready for the target's head. masks: `mask.build_masks`; they also choose sdpa or flex."""
        context_BTD = self.read_context(context_BTL)
        context_rope, block_rope = self.rope(context_positions), self.rope(block_positions)
        x_BQD = noise_BQD.to(self.dtype)
        for layer, layer_type in zip(self.layers, layer_types(self.config)):
            context_kv = layer.self_attn.keys_values(context_BTD, context_rope)
            inputs = x_BQD, context_kv, block_rope, masks[layer_type]
            if self.checkpointing and torch.is_grad_enabled():  # nothing here is random
                x_BQD = checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BQD = layer(*inputs)
        return self.norm(x_BQD)


Drafter = DFlashDrafter


def init_weights(model: DFlashDrafter, seed: int) -> DFlashDrafter:
    """Matrices N(0, initializer_range), biases 0, norms 1: the same numbers on every device. Returns the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                values = torch.empty(parameter.shape).normal_(0, model.config.initializer_range, generator=generator)
                parameter.copy_(values)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def resolve_attention(attention: str, device: torch.device | str, *, training: bool) -> str:
    """auto -> flex on CUDA, sdpa elsewhere, said in one line. Raises UserError for training with flex on a CPU."""
    device_type = torch.device(device).type
    if attention == "auto":
        attention = "flex" if device_type == "cuda" else "sdpa"
        reason = "" if attention == "flex" else " (flex_attention has no backward outside CUDA)"
        say(f"drafter attention: {attention} on {device_type}{reason}")
    if attention == "flex" and training and device_type != "cuda":
        raise UserError("train.attention", got=f"flex on {device_type}", want="sdpa (flex has no backward there)",
                        fix="train.attention=sdpa")  # fmt: skip
    return attention


def block_hidden(model: nn.Module, config: DrafterConfig, head: TargetHead, batch: DraftBatch, blocks: Blocks,
                 attention: str) -> Tensor:  # fmt: skip
    """The drafter's normed hidden state of every slot, [B,N,S,D]. model: a DFlashDrafter or an engine around one."""
    masks = build_masks(config, blocks, batch.document_ids, attention)
    noise_BQD = head.embed(blocks.token_ids.flatten(1))
    hidden_BQD = model(noise_BQD, batch.hidden, batch.position_ids, blocks.position_ids.flatten(1), masks)
    return hidden_BQD.unflatten(1, (*blocks.anchors.shape[1:], blocks.block_size))


# ---------------------------------------------------------------- decoding, one sequence


class DraftCache:
    """Context keys and values of every layer for one sequence; `length` target rows so far. It only ever holds context:
    block rows are recomputed each round. Sliding layers keep all rows and read the last window - 1."""

    def __init__(self, model: DFlashDrafter, capacity: int = 1024):
        config, weight = model.config, model.fc.weight
        shape = (1, config.num_kv_heads, capacity, config.head_dim)
        self.length = 0
        self.keys = [torch.empty(shape, dtype=weight.dtype, device=weight.device) for _ in range(config.num_layers)]
        self.values = [torch.empty_like(keys) for keys in self.keys]

    def reserve(self, length: int) -> None:
        """Room for `length` rows; at least doubles, so that appending stays linear."""
        capacity = self.keys[0].shape[2]
        if length > capacity:
            grow = max(length, 2 * capacity) - capacity
            self.keys = [F.pad(keys, (0, 0, 0, grow)) for keys in self.keys]
            self.values = [F.pad(values, (0, 0, 0, grow)) for values in self.values]

    def read(self, layer: int, start: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer][:, :, start : self.length], self.values[layer][:, :, start : self.length]


@torch.no_grad()
def extend(model: DFlashDrafter, cache: DraftCache, rows_nL: Tensor, positions: Tensor) -> None:
    """Append n captured rows [n, L*H] of committed tokens at `positions` i64[n], which continue the cache."""
    start, count = cache.length, rows_nL.shape[0]
    assert positions.tolist() == list(range(start, start + count)), "rows must continue the cache"
    cache.reserve(start + count)
    context_BTD = model.read_context(rows_nL[None])
    rope = model.rope(positions[None].to(context_BTD.device))
    for index, layer in enumerate(model.layers):
        keys, values = layer.self_attn.keys_values(context_BTD, rope)
        cache.keys[index][:, :, start : start + count] = keys
        cache.values[index][:, :, start : start + count] = values
    cache.length = start + count


def _draft_mask(
    config: DrafterConfig, layer_type: str, length: int, block_size: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """(first context row this layer type reads, mask over those rows and the block, or None when all is visible)."""
    kind = mask_kind(config, layer_type)
    start = 0 if kind.window is None else max(0, length - kind.window + 1)
    if kind.window is None and not kind.causal:
        return start, None
    num_rows = length - start
    anchor = torch.full((1, 1), num_rows, device=device)
    zeros = lambda n: torch.zeros(1, n, dtype=torch.long, device=device)
    # One padding row keeps the rule's indexing legal when a window of 1 leaves no context; it is cut off again.
    rule = block_rule(anchor, zeros(1) == 0, zeros(1), zeros(num_rows + 1), block_size, kind)
    index = lambda n: torch.arange(n, device=device)
    seen = rule(torch.zeros(1, 1, 1, dtype=torch.long, device=device), index(block_size)[None, :, None],
                index(num_rows + 1 + block_size)[None, None, :])  # fmt: skip
    return start, torch.cat([seen[..., :num_rows], seen[..., num_rows + 1 :]], dim=-1)


@torch.no_grad()
def draft(
    model: DFlashDrafter, head: TargetHead, cache: DraftCache, root_token: int, position: int, block_size: int
) -> Tensor:
    """Logits float32 [S-1, V] for the tokens after `root_token`, which sits at `position` and has no target row yet.

    block_size may be smaller than the trained one, never larger. The cache is unchanged."""
    config, device = model.config, model.fc.weight.device
    if not 2 <= block_size <= config.block_size:
        raise UserError("eval.block_size", got=block_size, want=f"2..{config.block_size}, as this drafter was trained")
    assert position == cache.length, f"the root sits at {position}, but {cache.length} rows are cached"
    token_ids = torch.full((1, block_size), config.mask_token_id, device=device)
    token_ids[0, 0] = root_token
    x_BQD = head.embed(token_ids).to(model.dtype)
    rope = model.rope(torch.arange(position, position + block_size, device=device)[None])
    kinds = layer_types(config)
    masks = {kind: _draft_mask(config, kind, cache.length, block_size, device) for kind in set(kinds)}
    for index, (layer, kind) in enumerate(zip(model.layers, kinds)):
        start, mask = masks[kind]
        x_BQD = layer(x_BQD, cache.read(index, start), rope, mask)
    return head.logits(model.norm(x_BQD)[0, 1:]).float()
