"""Every Triton kernel of the GPU path, compiled ahead of time for cards that are not here: SM86, SM90 and SM120.

What Triton does not compile has other ways there: attention is torch's SDPA (`train.attention=sdpa` in training, where
`flex` lets torch generate kernels for the card at hand), and fp8 rows are read by plain torch (store/fp8.py).

`make triton` puts Triton into .triton/ (a GPU machine has it with torch); helpers_triton.py does the compiling.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers_triton import CARDS, ROOT, TRITON

from dflash_train.store import fp8

pytestmark = pytest.mark.skipif(
    not TRITON.is_dir() and find_spec("triton") is None, reason="triton is not here: `make triton` fetches it"
)
SMALL_CARDS = (86, 120)
BLOCK_BYTES = 99 * 1024
"""Shared memory of a block there; SM90 has 227 KiB."""
HOPPER_ONLY = {"wgmma", "cp.async.bulk"}
DATA_CENTER_BLACKWELL_ONLY = {"tcgen05"}
FUSED = {  # what target/fused.py does -> its kernels
    "norms and residual sum": {"layer_norm_fwd_kernel_row"},
    "convolution": {"causal_conv1d_fwd_kernel"},
    "gates": {"fused_beta_sigmoid_fwd_kernel", "gdn_gate_chunk_cumsum_scalar_kernel"},
    "L2 norm": {"l2norm_fwd_kernel"},
    "delta rule": {"chunk_gated_delta_rule_fwd_kkt_solve_kernel", "recompute_w_u_fwd_kernel",
                   "chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "chunk_fwd_kernel_o"},
    "gated norm": {"layer_norm_gated_fwd_kernel"},
    "SwiGLU": {"swiglu_fwd_kernel"},
}  # fmt: skip

DRAFTER = {"row_terms_kernel", "slope_kernel", "norm_rope_kernel", "norm_rope_backward_kernel", "swiglu_kernel",
           "swiglu_backward_kernel"}  # fmt: skip
"""Of drafter/kernels_triton.py: training's step."""


def start(capability: int, how: str, out: Path, cache: Path | None = None) -> subprocess.Popen:
    cache = cache or (TRITON / "cache" if TRITON.is_dir() else out.parent / "cache")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(ROOT / "tests" / "helpers_triton.py"), str(capability), how, str(out)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def compile_all(folder: Path, how: str) -> dict[int, dict]:
    outs = {capability: folder / f"sm{capability}.json" for capability in CARDS}
    processes = [start(capability, how, out) for capability, out in outs.items()]
    for process in processes:
        text, _ = process.communicate()
        assert process.returncode == 0, text
    return {capability: json.loads(out.read_text()) for capability, out in outs.items()}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[int, dict]:
    """capability -> of every kernel, the tuner's configurations up to the first that fits the card."""
    return compile_all(tmp_path_factory.mktemp("first"), "first")


@pytest.mark.parametrize("capability", CARDS)
def test_every_kernel_of_the_path_compiles(compiled, capability):
    rows = compiled[capability]["rows"]
    assert {row["kernel"] for row in rows if "fused" in row["paths"]} >= set().union(*FUSED.values())
    assert any("library" in row["paths"] for row in rows)
    assert {row["kernel"] for row in rows if "drafter" in row["paths"]} == DRAFTER
    assert all(row["cubin_bytes"] > 0 for row in rows)
    assert {row["target"].rstrip("a") for row in rows} == {f"sm_{capability}"}


@pytest.mark.parametrize("capability", CARDS)
def test_every_kernel_has_a_configuration_that_fits(compiled, capability):
    """The last one compiled of a kernel, or of a tuner's list, is the first that fits."""
    limit = CARDS[capability][1]
    assert limit == BLOCK_BYTES or capability == 90
    rows = compiled[capability]["rows"]
    for kernel in {row["kernel"] for row in rows}:
        assert min(row["shared"] for row in rows if row["kernel"] == kernel) <= limit, kernel
    for row in rows:
        assert row["shared"] <= limit or row["tuned"] > 1, row


@pytest.mark.parametrize("capability", CARDS)
def test_a_configuration_that_does_not_fit_is_left_out_by_triton(compiled, capability):
    """Its tuner takes OutOfResources for an infinite time."""
    assert compiled[capability]["picked"] == "small"


@pytest.mark.parametrize("capability", SMALL_CARDS)
def test_small_cards_get_no_instruction_that_they_lack(compiled, capability):
    used = {name for row in compiled[capability]["rows"] for name in row["instructions"]}
    assert "mma.sync" in used and not used & (HOPPER_ONLY | DATA_CENTER_BLACKWELL_ONLY)


def test_the_same_kernels_use_such_instructions_where_they_exist(compiled):
    """Negative control: wgmma is there for SM90, so it would have been seen."""
    used = {name for row in compiled[90]["rows"] for name in row["instructions"]}
    assert "wgmma" in used and "tcgen05" not in used


def test_kernels_of_our_own_are_among_them(compiled):
    """Whoever writes a kernel into the package brings it onto the compiled path, or this fails."""
    ours = {}
    for path in sorted((ROOT / "dflash_train").rglob("*.py")):
        for name in re.findall(r"@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+)", path.read_text("utf-8")):
            ours[name] = path
    seen = {row["kernel"] for row in compiled[86]["rows"]}
    assert not ours.keys() - seen, ours


def test_a_second_process_tunes_nothing_again(tmp_path):
    """Workers of a host, and later runs, share TRITON_CACHE_DIR: what one has timed, the next one reads."""
    timed = []
    for name in ("first.json", "second.json"):
        process = start(86, "tune", tmp_path / name, cache=tmp_path / "cache")
        text, _ = process.communicate()
        assert process.returncode == 0, text
        timed.append(json.loads((tmp_path / name).read_text())["num_timed"])
    assert timed[0] > 50 and timed[1] == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_configurations_of_all_tuners_fit_every_card(tmp_path):
    """So no choice of a tuner can fail there, nor need an instruction that is not there."""
    for capability, result in compile_all(tmp_path, "all").items():
        assert len(result["rows"]) > 100
        assert all(row["shared"] <= CARDS[capability][1] for row in result["rows"])
        used = {name for row in result["rows"] for name in row["instructions"]}
        assert capability not in SMALL_CARDS or not used & (HOPPER_ONLY | DATA_CENTER_BLACKWELL_ONLY)


def test_fp8_rows_are_decoded_without_triton_and_without_fp8_units():
    """By moving bits and multiplying: any card, and none."""
    source = Path(fp8.__file__).read_text("utf-8")
    assert not re.search(r"^\s*(?:import|from) (?!torch)", source, re.M)
    rows = torch.randn(5, 2 * 8)
    assert torch.allclose(fp8.dequantize(*fp8.quantize(rows, 2), torch.float32), rows, rtol=1 / 16, atol=0.01)
