"""The third party: a Qwen3.5 model's own weights in float64, over plain texts, a token and a layer at a time.

Both Hugging Face's forward and a tree pass round; measured against this, each error is its own. Only angles and the
norms inside attention are float32 here. Slow, and 64 layers of a 27B model fit beside it since one is converted at a
time.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dflash_train.target.hf import HFTarget
from dflash_train.target.tree_delta_rule import recurrent_delta_rule


def exact_delta(module: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """A Gated DeltaNet layer: rows [L, N, D] of L texts -> (out [L, N, D], their last states [L, Hv, K, V])."""
    m, rows = copy.deepcopy(module).double(), rows.double()
    num_texts, length, _ = rows.shape
    weight = m.conv1d.weight[:, 0]
    padded = F.pad(m.in_proj_qkv(rows), (0, 0, weight.shape[1] - 1, 0))
    mixed = F.silu(sum(padded[:, i : i + length] * weight[:, i] for i in range(weight.shape[1])))
    # The recurrence takes one text: the L texts become L times the heads of one.
    fold = lambda t, *dims: t.reshape(num_texts, length, -1, *dims).transpose(0, 1).reshape(length, -1, *dims)
    q, k, v = mixed.split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
    gates = -m.A_log.exp() * F.softplus(m.in_proj_a(rows) + m.dt_bias)
    state = rows.new_zeros(num_texts * m.num_v_heads, m.head_k_dim, m.head_v_dim)
    out, state = recurrent_delta_rule(fold(q, m.head_k_dim), fold(k, m.head_k_dim), fold(v, m.head_v_dim),
                                      fold(m.in_proj_b(rows).sigmoid()), fold(gates), state)  # fmt: skip
    out = out.reshape(length, num_texts, -1, m.head_v_dim).transpose(0, 1)
    normed = rms_norm(out, m.norm.weight, m.norm.variance_epsilon)
    gated = normed * F.silu(m.in_proj_z(rows).reshape(out.shape))
    return m.out_proj(gated.flatten(2)), state.unflatten(0, (num_texts, -1))


def rope(target: HFTarget, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) at positions i64[N], in the dtype and on the device of `like`; the three axes of text are one."""
    return target.decoder.rotary_emb(like, positions.to(like.device).expand(3, 1, -1))


def plain_attention(target: HFTarget, module: nn.Module, rows: Tensor) -> Tensor:
    """Hugging Face's attention over texts from their first token on: rows [L, N, D] -> [L, N, D]."""
    angles = rope(target, torch.arange(rows.shape[1]), rows)
    return module(hidden_states=rows, position_embeddings=angles, attention_mask=None)[0]


def exact_attention(target: HFTarget, module: nn.Module, rows: Tensor) -> Tensor:
    """The same of float64 weights, by the textbook's formula."""
    with sdpa_kernel(SDPBackend.MATH):
        return plain_attention(target, copy.deepcopy(module).double(), rows.double())


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


@torch.inference_mode()
def exact_model(target: HFTarget, texts: Tensor, layer_ids: tuple[int, ...]) -> tuple[dict[int, Tensor], Tensor]:
    """texts i64[L, N] -> ({layer id: rows after it [L, N, D]}, rows after the final norm [L, N, D])."""
    normed = lambda norm, x: rms_norm(x, 1.0 + norm.weight.double(), norm.eps)
    hidden, kept = target.model.get_input_embeddings()(texts.to(target.device)).double(), {}
    for i, layer in enumerate(target.layers):
        rows = normed(layer.input_layernorm, hidden)
        if i in target.delta_layers:
            hidden = hidden + exact_delta(layer.linear_attn, rows)[0]
        else:
            hidden = hidden + exact_attention(target, layer.self_attn, rows)
        hidden = hidden + copy.deepcopy(layer.mlp).double()(normed(layer.post_attention_layernorm, hidden))
        if i in layer_ids:
            kept[i] = hidden
    return kept, normed(target.decoder.norm, hidden)
