"""What the drafter does between its matrix products: by Triton kernels on CUDA, and in plain torch, the twin anywhere.

A step's products leave most memory traffic to a few places: the norm and rotation of heads, SwiGLU, and above all the
chunks of logits, which the fused kernels read twice and write once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_train.util.errors import UserError
from dflash_train.util.log import say


@dataclass(frozen=True)
class RowTerms:
    """Of R rows of logits, in float32 at least: cross_entropy [R] of the labels; best i64[R], the first argmax;
    divergence [R], KL(teacher || row), or None without a teacher.
    log_sum, teacher_log_sum [R]: what fused kernels keep for the slope."""

    cross_entropy: Tensor
    best: Tensor
    divergence: Tensor | None = None
    log_sum: Tensor | None = None
    teacher_log_sum: Tensor | None = None


@dataclass(frozen=True)
class Kernels:
    """norm_rope(x [B,T,H,K], weight [K], eps, (cos, sin) [B,1,T,K]) -> RMS norm times weight, rotated, [B,H,T,K].
    swiglu(gate, up) -> SiLU(gate) * up.
    row_terms(logits [R,V], labels i64[R], teacher [R,V] | None) -> RowTerms.
    slope_(logits, labels, weights [R], terms, teacher) -> weights times the gradient of the divergence, or without a
    teacher of the cross-entropy, to the logits: [R,V] in their dtype, perhaps in their place.

    norm_rope and swiglu have a backward; the other two are for a forward that computes its own gradient."""

    name: str
    norm_rope: Callable[[Tensor, Tensor, float, tuple[Tensor, Tensor]], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    row_terms: Callable[[Tensor, Tensor, Tensor | None], RowTerms]
    slope_: Callable[[Tensor, Tensor, Tensor, RowTerms, Tensor | None], Tensor]


def rotate(x_BHTK: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate-half (NeoX) RoPE."""
    cos, sin = rope
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos + torch.cat([-second, first], dim=-1) * sin


def norm_rope(x_BTHK: Tensor, weight: Tensor, eps: float, rope: tuple[Tensor, Tensor]) -> Tensor:
    return rotate(F.rms_norm(x_BTHK, weight.shape, weight, eps).transpose(1, 2), rope)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def row_terms(logits_RV: Tensor, labels: Tensor, teacher_RV: Tensor | None) -> RowTerms:
    """Arithmetic is at least float32, whatever the head computes in."""
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    log_q = torch.log_softmax(logits_RV, dim=-1, dtype=dtype)
    cross_entropy, divergence = -log_q.gather(-1, labels[:, None])[:, 0], None
    if teacher_RV is not None:
        log_p = torch.log_softmax(teacher_RV, dim=-1, dtype=dtype)
        divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    return RowTerms(cross_entropy, logits_RV.argmax(dim=-1), divergence)


def slope_(logits_RV: Tensor, labels: Tensor, weights: Tensor, terms: RowTerms, teacher_RV: Tensor | None) -> Tensor:
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    slope = torch.softmax(logits_RV, dim=-1, dtype=dtype)
    if teacher_RV is None:
        slope.scatter_add_(-1, labels[:, None], slope.new_full((len(labels), 1), -1.0))
    else:
        slope -= torch.softmax(teacher_RV, dim=-1, dtype=dtype)
    return slope.mul_(weights[:, None]).to(logits_RV.dtype)


TORCH = Kernels("torch", norm_rope, swiglu, row_terms, slope_)


def resolve_kernels(kernels: str, device: torch.device | str) -> Kernels:
    """auto -> fused on CUDA, torch elsewhere, said in one line. Raises UserError where fused cannot be."""
    device_type = torch.device(device).type
    if kernels == "auto":
        kernels = "fused" if device_type == "cuda" else "torch"
        say(f"drafter kernels: {kernels} on {device_type}")
    if kernels == "torch":
        return TORCH
    refuse = lambda got: UserError("train.kernels", got=got, want="a GPU and Triton", fix="train.kernels=torch")
    if device_type != "cuda":
        raise refuse(f"fused on {device_type}")
    try:
        from dflash_train.drafter.kernels_triton import FUSED
    except ImportError as error:
        raise refuse(f"fused, but Triton cannot be imported ({error})") from error
    return FUSED
