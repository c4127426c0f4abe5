"""The fused half of `kernels.py`, in Triton: each kernel reads what it needs once and sums in float32.

A row of logits is read by one program, tile by tile, with a running maximum; what its gradient needs of that pass is
one number, so the gradient is written in the logits' place. Offsets of logits are 64-bit: 8,649 rows of 248,320 pass
2^31. Nothing here needs shared memory beyond what reductions take, or instructions of one generation of cards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_train.drafter.kernels import Kernels, RowTerms

TILE = 4096  # columns of logits, or elements of SwiGLU, that a program holds at a time
ROWS = 16  # heads of tokens that a program of norm_rope holds at a time
PROGRAMS = 1024  # of norm_rope's backward, each with a partial sum of the weight's gradient


# ---------------------------------------------------------------- rows of logits


@triton.jit
def row_terms_kernel(logits, teacher, labels, log_sums, cross_entropies, bests, teacher_log_sums, divergences,
                     num_columns, HAS_TEACHER: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """One row: log of the sum of exponentials, cross-entropy of its label, first argmax; and with a teacher row t,
    KL = E_t[t - x] - log_sum(t) + log_sum(x)."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILE)
    logits += row * num_columns
    top, top_start, total = -float("inf"), 0, tl.zeros([TILE], tl.float32)
    t_top, t_total, gap = -float("inf"), tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    if HAS_TEACHER:
        teacher += row * num_columns
    for start in range(0, num_columns, TILE):
        inside = start + lanes < num_columns
        x = tl.load(logits + start + lanes, mask=inside, other=-float("inf")).to(tl.float32)
        tile_top = tl.max(x, 0)
        top_start = tl.where(tile_top > top, start, top_start)  # the first tile keeps a tie
        new_top = tl.maximum(top, tile_top)
        total = total * tl.exp(top - new_top) + tl.exp(x - new_top)
        top = new_top
        if HAS_TEACHER:
            t = tl.load(teacher + start + lanes, mask=inside, other=-float("inf")).to(tl.float32)
            t_new_top = tl.maximum(t_top, tl.max(t, 0))
            shrink, mass = tl.exp(t_top - t_new_top), tl.exp(t - t_new_top)
            t_total = t_total * shrink + mass
            gap = gap * shrink + tl.where(inside, mass * (t - x), 0.0)
            t_top = t_new_top
    log_sum = top + tl.log(tl.sum(total, 0))
    x = tl.load(logits + top_start + lanes, mask=top_start + lanes < num_columns, other=-float("inf")).to(tl.float32)
    tl.store(bests + row, (top_start + tl.min(tl.where(x == top, lanes, TILE), 0)).to(tl.int64))
    tl.store(log_sums + row, log_sum)
    tl.store(cross_entropies + row, log_sum - tl.load(logits + tl.load(labels + row)).to(tl.float32))
    if HAS_TEACHER:
        mass = tl.sum(t_total, 0)
        t_log_sum = t_top + tl.log(mass)
        tl.store(teacher_log_sums + row, t_log_sum)
        tl.store(divergences + row, tl.sum(gap, 0) / mass - t_log_sum + log_sum)


@triton.jit
def slope_kernel(logits, teacher, labels, weights, log_sums, teacher_log_sums, num_columns,
                 HAS_TEACHER: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """One tile of one row, overwritten by weight * (softmax - what it should have been)."""
    num_tiles = tl.cdiv(num_columns, TILE)
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    column = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
    inside = column < num_columns
    place = row * num_columns + column
    x = tl.load(logits + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_TEACHER:
        t = tl.load(teacher + place, mask=inside, other=0.0).to(tl.float32)
        wanted = tl.exp(t - tl.load(teacher_log_sums + row))
    else:
        wanted = tl.where(column == tl.load(labels + row), 1.0, 0.0)
    slope = tl.load(weights + row) * (tl.exp(x - tl.load(log_sums + row)) - wanted)
    tl.store(logits + place, slope.to(logits.dtype.element_ty), mask=inside)


def row_terms(logits_RV: Tensor, labels: Tensor, teacher_RV: Tensor | None) -> RowTerms:
    assert logits_RV.is_contiguous() and labels.is_contiguous()
    num_rows, num_columns = logits_RV.shape
    floats = lambda: torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    log_sum, cross_entropy, best = floats(), floats(), torch.empty_like(labels)
    has_teacher = teacher_RV is not None
    assert not has_teacher or teacher_RV.is_contiguous()
    teacher_log_sum, divergence = (floats(), floats()) if has_teacher else (None, None)
    row_terms_kernel[(num_rows,)](
        logits_RV, teacher_RV, labels, log_sum, cross_entropy, best, teacher_log_sum, divergence, num_columns,
        HAS_TEACHER=has_teacher, TILE=TILE, num_warps=8,
    )  # fmt: skip
    return RowTerms(cross_entropy, best, divergence, log_sum, teacher_log_sum)


def slope_(logits_RV: Tensor, labels: Tensor, weights: Tensor, terms: RowTerms, teacher_RV: Tensor | None) -> Tensor:
    """In place: the logits are gone afterwards."""
    num_rows, num_columns = logits_RV.shape
    slope_kernel[(num_rows * triton.cdiv(num_columns, TILE),)](
        logits_RV, teacher_RV, labels, weights.float().contiguous(), terms.log_sum, terms.teacher_log_sum, num_columns,
        HAS_TEACHER=teacher_RV is not None, TILE=TILE, num_warps=8,
    )  # fmt: skip
    return logits_RV


# ---------------------------------------------------------------- heads: norm and rotation


@triton.jit
def norm_rope_kernel(x, weight, cos, sin, out, num_rows, num_heads, eps, HEAD: tl.constexpr, HALF: tl.constexpr,
                     ROWS: tl.constexpr):  # fmt: skip
    """Rows [HEAD] of (token, head); HALF: HEAD / 2, or the next power of two. cos, sin: rows of tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    inside = (row < num_rows)[:, None] & (column < HEAD // 2)[None, :]
    place = row[:, None] * HEAD + column[None, :]
    turn = (row // num_heads)[:, None] * HEAD + column[None, :]
    a = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + place + HEAD // 2, mask=inside, other=0.0).to(tl.float32)
    wa = tl.load(weight + column, mask=column < HEAD // 2, other=0.0).to(tl.float32)
    wb = tl.load(weight + column + HEAD // 2, mask=column < HEAD // 2, other=0.0).to(tl.float32)
    c = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / HEAD + eps)[:, None]
    a, b = a * scale * wa[None, :], b * scale * wb[None, :]
    tl.store(out + place, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + HEAD // 2, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_rope_backward_kernel(slope, x, weight, cos, sin, x_slope, weight_slopes, num_rows, num_heads, eps,
                              HEAD: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Every num_programs-th group of rows; weight_slopes: one row [HEAD] a program, to be summed."""
    column = tl.arange(0, HALF)
    known = column < HEAD // 2
    wa = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)[None, :]
    wb = tl.load(weight + column + HEAD // 2, mask=known, other=0.0).to(tl.float32)[None, :]
    wa_slope, wb_slope = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    for group in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        row = tl.cast(group, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & known[None, :]
        place = row[:, None] * HEAD + column[None, :]
        turn = (row // num_heads)[:, None] * HEAD + column[None, :]
        a = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x + place + HEAD // 2, mask=inside, other=0.0).to(tl.float32)
        ga = tl.load(slope + place, mask=inside, other=0.0).to(tl.float32)
        gb = tl.load(slope + place + HEAD // 2, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / HEAD + eps)[:, None]
        a, b = a * scale, b * scale
        ga, gb = ga * c + gb * s, gb * c - ga * s  # turned back
        wa_slope += tl.sum(ga * a, 0)
        wb_slope += tl.sum(gb * b, 0)
        ga, gb = ga * wa, gb * wb
        along = (tl.sum(ga * a + gb * b, 1) / HEAD)[:, None]
        tl.store(x_slope + place, (scale * (ga - a * along)).to(x_slope.dtype.element_ty), mask=inside)
        tl.store(x_slope + place + HEAD // 2, (scale * (gb - b * along)).to(x_slope.dtype.element_ty), mask=inside)
    mine = weight_slopes + tl.program_id(0) * HEAD + column
    tl.store(mine, wa_slope, mask=known)
    tl.store(mine + HEAD // 2, wb_slope, mask=known)


class _NormRope(torch.autograd.Function):
    """x [B,T,H,K] -> [B,T,H,K]; keeps x alone, and computes the norm's scale anew in the backward."""

    @staticmethod
    def forward(ctx, x, weight, eps, cos, sin):
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps, head = eps, x.shape[-1]
        out, num_rows = torch.empty_like(x), x.numel() // head
        norm_rope_kernel[(triton.cdiv(num_rows, ROWS),)](
            x, weight, cos, sin, out, num_rows, x.shape[2], eps,
            HEAD=head, HALF=triton.next_power_of_2(head // 2), ROWS=ROWS, num_warps=4,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx, slope):
        x, weight, cos, sin = ctx.saved_tensors
        head, num_rows = x.shape[-1], x.numel() // x.shape[-1]
        programs = min(PROGRAMS, triton.cdiv(num_rows, ROWS))
        x_slope = torch.empty_like(x)
        weight_slopes = torch.empty(programs, head, dtype=torch.float32, device=x.device)
        norm_rope_backward_kernel[(programs,)](
            slope.contiguous(), x, weight, cos, sin, x_slope, weight_slopes, num_rows, x.shape[2], ctx.eps,
            HEAD=head, HALF=triton.next_power_of_2(head // 2), ROWS=ROWS, num_warps=4,
        )  # fmt: skip
        return x_slope, weight_slopes.sum(dim=0).to(weight.dtype), None, None, None


def norm_rope(x_BTHK: Tensor, weight: Tensor, eps: float, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Heads stay beside one another in memory, so that attention's output needs no copy to become rows again."""
    return _NormRope.apply(x_BTHK, weight, eps, *rope).transpose(1, 2)


# ---------------------------------------------------------------- SwiGLU


@triton.jit
def swiglu_kernel(gate, up, out, count, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(slope, gate, up, gate_slope, up_slope, count, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    d = tl.load(slope + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(g)
    g_slope = d * u * open_ * (1.0 + g * (1.0 - open_))
    tl.store(gate_slope + place, g_slope.to(gate_slope.dtype.element_ty), mask=inside)
    tl.store(up_slope + place, (d * g * open_).to(up_slope.dtype.element_ty), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        swiglu_kernel[(triton.cdiv(gate.numel(), TILE),)](gate, up, out, gate.numel(), TILE=TILE, num_warps=8)
        return out

    @staticmethod
    def backward(ctx, slope):
        gate, up = ctx.saved_tensors
        gate_slope, up_slope = torch.empty_like(gate), torch.empty_like(up)
        swiglu_backward_kernel[(triton.cdiv(gate.numel(), TILE),)](
            slope.contiguous(), gate, up, gate_slope, up_slope, gate.numel(), TILE=TILE, num_warps=8,
        )  # fmt: skip
        return gate_slope, up_slope


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _SwiGLU.apply(gate, up)


FUSED = Kernels("fused", norm_rope, swiglu, row_terms, slope_)
