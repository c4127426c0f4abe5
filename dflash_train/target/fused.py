"""Capture on dense Qwen3.5 / Qwen3.6 models with as few passes over memory as the kernels allow.

The library's modules and weights stay as they are; only the order of work between them is ours: the residual sum is
part of the next norm, the convolution reads its slices of one product in place, gates are made inside the recurrence's
kernels, and value heads share their key head instead of a copy of it. Nothing is cached and the head is never called.
Answering and decoding go other ways (hf.py, qwen3_5.py).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_train.records import Features
from dflash_train.target.fused_kernels import Kernels, fla_kernels
from dflash_train.util.errors import UserError

FAMILY = "qwen3_5_text"


def choose(kernels: str, model: nn.Module, device: torch.device) -> "FusedCapture | None":
    """target.kernels: "auto" = fused where it can be, "fused" = that or UserError, "library" = None."""
    reason = why_not(model, device)
    if kernels == "fused" and reason:
        raise UserError("target.kernels", got=f"fused, with {reason}", want="a dense Qwen3.5/3.6 model on one GPU",
                        fix="target.kernels=library, or auto")  # fmt: skip
    return None if kernels == "library" or reason else FusedCapture(model.get_decoder(), fla_kernels())


def why_not(model: nn.Module, device: torch.device) -> str | None:
    """What keeps this model from the fused path, in words; None when nothing does."""
    text = model.config.get_text_config()
    if text.model_type != FAMILY:
        return f"model type {text.model_type}"
    if text.hidden_act != "silu":
        return f"activation {text.hidden_act}"
    if device.type != "cuda":
        return f"device {device.type}"
    if {parameter.device for parameter in model.parameters()} != {device}:
        return "layers on several devices"
    return None


class FusedCapture:
    """Forward of a Qwen3.5 text decoder that returns the residual stream after chosen layers."""

    def __init__(self, decoder: nn.Module, kernels: Kernels):
        self.decoder, self.layers, self.kernels = decoder, decoder.layers, kernels
        norms = [decoder.norm]
        for layer in self.layers:
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
            norms += [layer.self_attn.q_norm, layer.self_attn.k_norm] if "self_attn" in layer._modules else []
        # x * (1 + w) in float32, as the library computes it at every call.
        self.gains = {norm: 1.0 + norm.weight.float() for norm in norms}

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor, layer_ids: tuple[int, ...], last_hidden: bool = False) -> Features:
        """Right-padded ids i64[B, T] -> hidden [B, T, L*H] in the order of layer_ids, last_hidden [B, T, H] on request.

        The pass ends after the last layer that is needed.
        """
        stream, delta, taps = self.decoder.embed_tokens(token_ids), None, {}
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).view(1, 1, -1).expand(3, 1, -1)
        cos, sin = self.decoder.rotary_emb(stream, positions)
        count = len(self.layers) if last_hidden else max(layer_ids) + 1
        for i, layer in enumerate(self.layers[:count]):
            stream, hidden = self._add_norm(stream, delta, layer.input_layernorm)
            if i - 1 in layer_ids:
                taps[i - 1] = stream
            if "linear_attn" in layer._modules:
                delta = self._delta_net(layer.linear_attn, hidden)
            else:
                delta = self._attention(layer.self_attn, hidden, cos, sin)
            stream, hidden = self._add_norm(stream, delta, layer.post_attention_layernorm)
            mlp = layer.mlp
            delta = mlp.down_proj(self.kernels.swiglu(mlp.gate_proj(hidden), mlp.up_proj(hidden)))
        taps[count - 1], normed = self._add_norm(stream, delta, self.decoder.norm)
        hidden = torch.cat([taps[i] for i in layer_ids], dim=-1) if layer_ids else None
        return Features(hidden, normed if last_hidden else None)

    def _add_norm(self, stream: Tensor, delta: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        return self.kernels.add_norm(stream, delta, self.gains[norm], norm.eps)

    def _delta_net(self, m: nn.Module, hidden: Tensor) -> Tensor:
        """Gated DeltaNet: hidden [B, T, D] -> [B, T, D]."""
        mixed = m.in_proj_qkv(hidden)
        weight, sizes = m.conv1d.weight.squeeze(1), [m.key_dim, m.key_dim, m.value_dim]
        convolved = [self.kernels.conv_silu(x, w) for x, w in zip(mixed.split(sizes, -1), weight.split(sizes))]
        heads = [(-1, m.head_k_dim), (-1, m.head_k_dim), (-1, m.head_v_dim)]
        q, k, v = (x.unflatten(-1, shape) for x, shape in zip(convolved, heads))
        out = self.kernels.delta_rule(q, k, v, m.in_proj_a(hidden), m.in_proj_b(hidden), m.A_log, m.dt_bias)
        z = m.in_proj_z(hidden).unflatten(-1, (-1, m.head_v_dim))
        return m.out_proj(self.kernels.gated_norm(out, z, m.norm.weight, m.norm.variance_epsilon).flatten(-2))

    def _attention(self, m: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Gated full attention: hidden [B, T, D] -> [B, T, D]; q_proj makes each head's query and gate together."""
        query, gate = m.q_proj(hidden).unflatten(-1, (-1, 2 * m.head_dim)).chunk(2, dim=-1)
        key, value = (proj(hidden).unflatten(-1, (-1, m.head_dim)) for proj in (m.k_proj, m.v_proj))
        query, key = (self._add_norm(x, None, norm)[1] for x, norm in ((query, m.q_norm), (key, m.k_norm)))
        rotate_(query, cos, sin)
        rotate_(key, cos, sin)
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
                                             is_causal=True, scale=m.scaling, enable_gqa=True)  # fmt: skip
        return m.o_proj((out.transpose(1, 2) * gate.sigmoid()).flatten(-2))


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """RoPE on the first columns of x [B, T, H, K], in place; cos, sin [1, T, R], R <= K, halves not interleaved."""
    part = x[..., : cos.shape[-1]]
    first, second = part.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    part.copy_(part * cos[..., None, :] + turned * sin[..., None, :])
