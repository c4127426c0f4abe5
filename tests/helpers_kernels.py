"""The drafter's Triton kernels against their twins in plain torch, computed in float64 from the same numbers.

    python tests/helpers_kernels.py out.json     on a CPU: Triton's interpreter runs the very same kernels

A process of its own: whether kernels are interpreted is decided while they are imported.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
LOGITS = {  # name: rows, columns, dtype; kernels hold 4,096 columns at a time
    "one row of three columns": (1, 3, torch.float32),
    "odd columns, a tile and a bit": (7, 4099, torch.bfloat16),
    "three tiles in float32": (5, 9001, torch.float32),
    "whole tiles": (3, 8192, torch.bfloat16),
}
HEADS = {  # name: B, T, H, K, dtype
    "rows that fill no group": (1, 3, 3, 16, torch.float32),
    "half a head is no power of two": (2, 5, 3, 24, torch.float32),
    "the 27B's head": (2, 9, 4, 128, torch.bfloat16),
    "more groups than programs": (1, 40, 2, 32, torch.float32),
}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm; NaN where a value is."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def framed(rows: torch.Tensor) -> torch.Tensor:
    """A copy with NaN before and after it in memory: what is read or written beside it shows."""
    frame = torch.full((rows.numel() + 2 * 64,), float("nan"), dtype=rows.dtype, device=rows.device)
    inner = frame[64:-64].view(rows.shape)
    inner.copy_(rows)
    return inner


def logits_of(num_rows: int, num_columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Spread widely and on a grid, so that maxima tie, also across tiles."""
    draw = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))
    return (draw * 4).round().clamp(-8, 8).mul(1.5).to(dtype)


def compare_rows(kernels, twin, device: str) -> dict[str, float]:
    """Of every entry of LOGITS, with and without a teacher: largest relative error of terms and slope. Argmaxima must
    be torch's: anything else counts as an error of 1."""
    errors = {}
    for seed, (name, (num_rows, num_columns, dtype)) in enumerate(LOGITS.items()):
        for taught in (False, True):
            logits = framed(logits_of(num_rows, num_columns, dtype, seed).to(device))
            teacher = framed(logits_of(num_rows, num_columns, dtype, 50 + seed).to(device)) if taught else None
            labels = torch.randint(0, num_columns, (num_rows,), generator=torch.Generator().manual_seed(seed))
            weights = torch.rand(num_rows, generator=torch.Generator().manual_seed(seed)) + 0.1
            weights[-1:] = 0 if num_rows > 1 else 1  # a slot without loss
            labels, weights = labels.to(device), weights.to(device)
            exact, exact_teacher = logits.double(), teacher.double() if taught else None
            want = twin.row_terms(exact, labels, exact_teacher)
            got = kernels.row_terms(logits, labels, teacher)
            slopes = (kernels.slope_(logits, labels, weights, got, teacher),
                      twin.slope_(exact, labels, weights.double(), want, exact_teacher))  # fmt: skip
            pairs = [(got.cross_entropy, want.cross_entropy), slopes]
            pairs += [(got.divergence, want.divergence)] if taught else []
            wrong = float(not torch.equal(got.best, want.best) or not torch.equal(want.best, exact.argmax(-1)))
            case = f"{name}, {'teacher' if taught else 'labels'}, {str(dtype).split('.')[1]}"
            errors[case] = max([wrong, *(relative(*pair) for pair in pairs)])
            edges = logits._base
            assert edges[:64].isnan().all() and edges[-64:].isnan().all(), "written beside the rows"
    return errors


def with_gradients(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Value and gradients to all inputs, under one fixed weighting of the value."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*inputs)
    weighting = torch.randn(value.shape, generator=torch.Generator().manual_seed(3)).to(value)
    return [value, *torch.autograd.grad((value * weighting).sum(), inputs)]


def compare_layers(kernels, twin, device: str) -> dict[str, float]:
    """Norm with rotation, and SwiGLU: values and gradients."""
    errors = {}
    for seed, (name, (B, T, H, K, dtype)) in enumerate(HEADS.items()):
        generator = torch.Generator().manual_seed(seed)
        x = framed(3 * torch.randn(B, T, H, K, generator=generator).to(device, dtype))
        weight = (torch.rand(K, generator=generator) + 0.5).to(device, dtype)
        angle = 6.3 * torch.rand(B, 1, T, K // 2, generator=generator).repeat(1, 1, 1, 2).to(device)
        rope = angle.cos().to(dtype), angle.sin().to(dtype)
        wide = [part.double() for part in rope]
        got = with_gradients(lambda x, w, rope=rope: kernels.norm_rope(x, w, 1e-6, rope), x, weight)
        want = with_gradients(lambda x, w, wide=wide: twin.norm_rope(x, w, 1e-6, wide), x.double(), weight.double())
        assert got[0].shape == (B, H, T, K) and [g.dtype for g in got] == [dtype] * 3
        errors[f"norm and rotation, {name}"] = max(map(relative, got, want))
    for dtype in (torch.float32, torch.bfloat16):
        gate, up = (framed(2 * torch.randn(3, 1501, generator=torch.Generator().manual_seed(i)).to(device, dtype))
                    for i in (8, 9))  # fmt: skip
        got, want = with_gradients(kernels.swiglu, gate, up), with_gradients(twin.swiglu, gate.double(), up.double())
        errors[f"SwiGLU, {str(dtype).split('.')[1]}"] = max(map(relative, got, want))
    return errors


def compare_loss(kernels, device: str) -> dict[str, float]:
    """`draft_loss` with these kernels in float32, in chunks of one size and another, against the loop twin in float64:
    numerator, gradient, accepted slots. An odd vocabulary of more than one tile."""
    from helpers_drafter import HIDDEN, MASK_ID, packed_batch

    from dflash_train.drafter.anchors import draw_anchors
    from dflash_train.drafter.loss import KINDS, Objective, draft_loss
    from dflash_train.drafter.naive import naive_loss
    from dflash_train.records import TargetHead

    batch = packed_batch([[(11, 3, 11), (9, 2, 6)], [(16, 4, 14)]], 22)
    blocks = draw_anchors(batch, num_anchors=12, block_size=5, mask_token_id=MASK_ID, seed=0, epoch=0)
    generator = torch.Generator().manual_seed(7)
    table = 0.3 * torch.randn(4133, HIDDEN, generator=generator)
    head = TargetHead(table, table, torch.ones(HIDDEN), 0.0, 1e-6)
    hidden = torch.randn(2, 12, 5, HIDDEN, generator=generator)
    errors = {}
    for kind in KINDS:
        slow = hidden.double().requires_grad_()
        want, _ = naive_loss(slow, blocks.labels, blocks.loss_mask, blocks.anchors, head.to("cpu", torch.float64), kind,
                             3.0, 0.4, batch.last_hidden.double())  # fmt: skip
        want_slope = torch.autograd.grad(want, slow)[0]
        for chunk_blocks in (3, 100):
            fast = hidden.to(device).requires_grad_()
            moved = replace(blocks, **{name: value.to(device) for name, value in vars(blocks).items()})
            objective = Objective(kind, 3.0, 0.4, chunk_blocks, kernels)
            terms = draft_loss(fast, moved, head.to(device), objective, batch.to(device))
            slope = torch.autograd.grad(terms.numerator, fast)[0].cpu()
            twin = draft_loss(hidden, blocks, head, Objective(kind, 3.0, 0.4, 7), batch)
            same = torch.equal(terms.accepted.cpu(), twin.accepted) and torch.equal(terms.correct.cpu(), twin.correct)
            errors[f"{kind}, chunks of {chunk_blocks}"] = max(
                float(not same), relative(terms.numerator.detach().cpu(), want.detach()), relative(slope, want_slope)
            )
    return errors


def compare_drafter(kernels, device: str) -> dict[str, float]:
    """A whole forward and backward in float32, against the same model in plain torch and float64."""
    from helpers_drafter import FULL, MASK_ID, SLIDING, packed_batch, tiny_config, tiny_drafter, tiny_head

    from dflash_train.drafter.anchors import draw_anchors
    from dflash_train.drafter.dflash import block_hidden

    config = tiny_config((SLIDING, FULL), window=5, attention_bias=True)
    batch = packed_batch([[(9, 3, 9), (12, 3, 12)], [(20, 4, 20)]], 23)
    blocks = draw_anchors(batch, num_anchors=5, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=0)
    results = {}
    for name, dtype, where in (("fused", torch.float32, device), ("twin", torch.float64, "cpu")):
        model, head = tiny_drafter(config, dtype=dtype).to(where), tiny_head(dtype=dtype).to(where)
        if name == "fused":
            assert model.use(kernels) is model
        moved = replace(blocks, **{key: value.to(where) for key, value in vars(blocks).items()})
        hidden = block_hidden(model, config, head, batch.to(where), moved, "sdpa")
        weighting = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).to(where, dtype)
        (hidden * weighting).sum().backward()
        results[name] = [hidden.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())]
    return {"drafter": max(map(relative, results["fused"], results["twin"]))}


def compare_all(device: str) -> dict[str, dict[str, float]]:
    """kernel -> case -> relative error."""
    from dflash_train.drafter import kernels_triton
    from dflash_train.drafter.kernels import TORCH

    fused = kernels_triton.FUSED
    kernels_triton.PROGRAMS = 3  # so that one of HEADS has more groups than programs
    return {
        "rows": compare_rows(fused, TORCH, device), "layers": compare_layers(fused, TORCH, device),
        "loss": compare_loss(fused, device), "drafter": compare_drafter(fused, device),
    }  # fmt: skip


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:0] = [str(ROOT)]
    sys.path.append(str(ROOT / ".triton"))
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(compare_all("cpu")))
