"""What a Qwen3.5 layer does between its matrix products: by flash-linear-attention's Triton kernels, and naively.

The fast set runs on CUDA alone; the naive one is its twin anywhere, and what the tests compare it with. Both round
where the library rounds, except that the fast kernels keep gates and the sum before a norm in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_train.util.errors import UserError

NARROW = 512


@dataclass(frozen=True)
class Kernels:
    """add_norm(x, delta | None, gain, eps) -> (x + delta, its RMS norm times gain); gain [D] float32, 1 + w here.
    conv_silu(x [B, T, C], weight [C, W]) -> causal depthwise convolution and SiLU; x may be a slice of wider rows.
    delta_rule(q, k [B, T, Hk, K], v [B, T, Hv, V], gate, beta [B, T, Hv], A_log, dt_bias [Hv]) -> [B, T, Hv, V]; gate
    and beta as projected, q and k before their L2 norm, value head h reads key head h // (Hv // Hk).
    gated_norm(x, z [..., V], weight [V], eps) -> RMS norm of x times weight times SiLU(z).
    swiglu(gate, up) -> SiLU(gate) * up.
    """

    name: str
    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    conv_silu: Callable[[Tensor, Tensor], Tensor]
    delta_rule: Callable[..., Tensor]
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]


def fla_kernels() -> Kernels:
    """flash-linear-attention's. Raises UserError where it cannot be imported."""
    try:
        from fla.modules.activations import swiglu
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.modules.norm.layernorm import rms_norm
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise UserError("target.kernels", got=f"flash-linear-attention cannot be imported ({error})",
                        want="flash-linear-attention 0.6 and triton, for fused capture on this GPU",
                        fix="pip install flash-linear-attention==0.6.0, or target.kernels=library",
                        ) from error  # fmt: skip

    def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if delta is None:
            return x, narrow_norm(x, gain, eps) if x.shape[-1] <= NARROW else rms_norm(x, gain, None, eps=eps)
        normed, total = rms_norm(delta, gain, None, residual=x, eps=eps, prenorm=True)
        return total, normed

    def delta_rule(q, k, v, gate, beta, A_log, dt_bias):
        out, _ = chunk_gated_delta_rule(q, k, v, g=gate, beta=beta, A_log=A_log, dt_bias=dt_bias,
                                        use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                                        use_gate_in_kernel=True)  # fmt: skip
        return out

    return Kernels(
        "flash-linear-attention", add_norm,
        lambda x, weight: causal_conv1d(x, weight, activation="silu")[0], delta_rule,
        lambda x, z, weight, eps: rms_norm_gated(x, z, weight, None, activation="swish", eps=eps), swiglu,
    )  # fmt: skip


def narrow_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMS norm of short rows (the heads' queries and keys), in float32 and rounded once.

    fla's kernel for rows of up to NARROW numbers is compiled and tuned anew, in nine configurations, for every 2,048
    rows more or less: with 24 heads that is for nearly every batch.
    """
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, scale * gain, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))


def naive_kernels() -> Kernels:
    """The definitions, in plain torch; the recurrence token by token."""

    def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
        return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps) * gain

    def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + delta
        return total, norm(total, gain, eps).to(x.dtype)

    def conv_silu(x: Tensor, weight: Tensor) -> Tensor:
        width = weight.shape[1]
        padded = F.pad(x, (0, 0, width - 1, 0))  # zeros before the first token, none after the last
        return F.silu(sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(width)))

    def delta_rule(q, k, v, gate, beta, A_log, dt_bias):
        group = v.shape[2] // k.shape[2]
        unit = lambda x: x.float() * torch.rsqrt(x.float().pow(2).sum(-1, keepdim=True) + 1e-6)
        q, k = (unit(x).repeat_interleave(group, dim=2) for x in (q, k))
        decay = (-A_log.float().exp() * F.softplus(gate.float() + dt_bias.float())).exp()
        state, rows = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1], dtype=torch.float32), []
        for t in range(v.shape[1]):
            state = state * decay[:, t, :, None, None]
            missing = v[:, t].float() - (state * k[:, t, ..., None]).sum(-2)
            state = state + k[:, t, ..., None] * (beta[:, t].float().sigmoid()[..., None] * missing)[..., None, :]
            rows.append((state * q[:, t, ..., None]).sum(-2) * k.shape[-1] ** -0.5)
        return torch.stack(rows, dim=1).to(v.dtype)

    return Kernels(
        "naive", add_norm, conv_silu, delta_rule,
        lambda x, z, weight, eps: (norm(x, weight.float(), eps) * F.silu(z.float())).to(x.dtype),
        lambda gate, up: F.silu(gate) * up,
    )  # fmt: skip
