"""The drafter's Triton kernels equal their twins in plain torch: by Triton's interpreter here, and on a GPU."""

import json
import subprocess
import sys
from importlib.util import find_spec

import helpers_kernels
import pytest
import torch
from helpers_kernels import HEADS, LOGITS, ROOT

from dflash_train.drafter import kernels
from dflash_train.drafter.kernels import TORCH, resolve_kernels
from dflash_train.util.errors import UserError

needs_triton = pytest.mark.skipif(
    not (ROOT / ".triton").is_dir() and find_spec("triton") is None,
    reason="triton is not here: `make triton` fetches it",
)
LIMITS = {"float32": 1e-5, "bfloat16": 6e-3}  # relative; a rounding to bfloat16 is 2^-9 at the most


def check(errors: dict[str, dict[str, float]]) -> None:
    """Every case that was asked for is there, and near its twin; a NaN is not."""
    assert len(errors["rows"]) == 2 * len(LOGITS) and len(errors["layers"]) == len(HEADS) + 2
    assert len(errors["loss"]) == 6 and len(errors["drafter"]) == 1
    for cases in errors.values():
        for case, error in cases.items():
            half = "bfloat16" in case or "27B" in case
            assert error < LIMITS["bfloat16" if half else "float32"], f"{case}: {error}"


@needs_triton
def test_interpreted_kernels_equal_their_twins_in_values_and_gradients(tmp_path):
    """Odd vocabularies, ties, rows without weight, teachers, heads of odd sizes; losses against the loop twin."""
    script = ROOT / "tests" / "helpers_kernels.py"
    run = subprocess.run([sys.executable, script, tmp_path / "out.json"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    check(json.loads((tmp_path / "out.json").read_text()))


@pytest.mark.gpu
def test_kernels_on_a_gpu_equal_their_twins_in_values_and_gradients(monkeypatch):
    from dflash_train.drafter import kernels_triton

    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(kernels_triton, "PROGRAMS", kernels_triton.PROGRAMS)  # compare_all changes it
    check(helpers_kernels.compare_all("cuda"))


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_are_reached():
    """8,700 rows of 248,320 in bfloat16: 4.3 GB, whose last row is computed and written like the first."""
    from dflash_train.drafter.kernels_triton import FUSED

    draw = torch.randn(248_320, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    logits = draw.expand(8_700, -1).contiguous()
    labels, weights = torch.full((8_700,), 77, device="cuda"), torch.ones(8_700, device="cuda")
    terms = FUSED.row_terms(logits, labels, None)
    slope = FUSED.slope_(logits, labels, weights, terms, None)
    assert terms.cross_entropy.unique().numel() == 1 and terms.best.unique().tolist() == [int(draw.argmax())]
    assert torch.equal(slope[-1], slope[0]) and float(slope[-1, 77]) < -0.9


def test_the_twin_takes_the_first_of_tied_maxima():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0]])
    assert TORCH.row_terms(logits, torch.tensor([0, 0]), None).best.tolist() == [1, 0]


def test_auto_is_torch_on_a_cpu_and_says_so(capsys):
    assert resolve_kernels("auto", "cpu") is TORCH and "drafter kernels: torch on cpu" in capsys.readouterr().out
    assert resolve_kernels("torch", "cuda") is TORCH


def test_fused_kernels_are_refused_where_they_cannot_be(monkeypatch):
    with pytest.raises(UserError, match=r"train.kernels\n  got:  fused on cpu(.|\n)*train.kernels=torch"):
        resolve_kernels("fused", "cpu")
    monkeypatch.setitem(sys.modules, "dflash_train.drafter.kernels_triton", None)
    for kernels_value in ("fused", "auto"):
        with pytest.raises(UserError, match="fused, but Triton cannot be imported"):
            kernels.resolve_kernels(kernels_value, "cuda")
