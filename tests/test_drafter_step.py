"""`benchmarks/drafter_step.py` runs whole at tiny shapes, and counts the work of a block as its docstring says."""

import json
import math
import re
import subprocess
import sys
import time

import pytest
import torch

from dflash_train import cli

sys.path.insert(0, str(cli.ROOT / "benchmarks"))
import drafter_step
import drafter_step_ours
import drafter_step_peers
import drafter_step_profile
import drafter_step_table
import peers_code
from drafter_step_ours import Pace, build_run
from run_parts import Run

CPU = torch.device("cpu")
needs_peers = [
    pytest.mark.peers,
    pytest.mark.skipif(not peers_code.PEERS.is_dir(), reason="the peers' code is not here: `make peers`"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
OURS = "rate,torch,optimizer,profile"


def command(out, *more: str) -> subprocess.CompletedProcess:
    """A process of its own: DeepSpeed leaves variables of a launcher behind."""
    given = ["--tiny", "--steps", "3", "--warmup", "1", "--out", str(out), *more]
    return subprocess.run([sys.executable, drafter_step.__file__, *given], capture_output=True, text=True, check=False)


def test_our_parts_run_without_the_peers_code(tmp_path):
    done = command(tmp_path, "--parts", OURS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    made = json.loads((tmp_path / "drafter_step.json").read_text())["figures"]
    table = (tmp_path / "drafter_step.md").read_text()
    assert table in done.stdout and "WRONG" not in table
    for name in ("step B=16 ours, kernels=torch", "optimizer B=16 ours, ZeRO-2"):
        part = made[name]
        assert part["least_ms"] <= part["ms"] <= part["most_ms"] and part["blocks"] == 12 and part["new_graphs"] == 0
        assert part["loss"] == pytest.approx(math.log(128), rel=0.1)
        row = next(line for line in table.splitlines() if line.startswith(f"| {name} "))
        shown = float(row.split("|")[3].replace(",", ""))
        assert shown == pytest.approx(12 / part["ms"] * 1000, abs=0.51)
    profile = made["profile B=16 ours"]
    assert profile["by_kind_ms"]["matrix products"] > 0 and profile["by_kind_ms"]["attention"] > 0
    assert profile["sum_ms"] == pytest.approx(sum(profile["by_kind_ms"].values()))


@pytest.mark.parametrize("block_size, row_tokens, gflop", [(16, 3072, 230), (8, 4096, 112)])
def test_the_true_shapes_are_the_published_drafters_and_its_useful_work(block_size, row_tokens, gflop):
    run = build_run(block_size, row_tokens, tiny=False)
    assert drafter_step.inputs.num_parameters(run.drafter) == 1_730_213_120
    assert run.drafter.block_size == block_size and run.train.num_anchors == 512 and run.train.dtype == "bfloat16"
    assert drafter_step_ours.block_flops(run.drafter) / 1e9 == pytest.approx(gflop, abs=0.5)
    assert drafter_step.products(run, 8192)["head"] == (256 * (block_size - 1), 5120, 248_320)


def test_each_step_draws_other_anchors_in_the_same_row():
    run = build_run(8, 128, tiny=True)
    shard = drafter_step_ours.random_shard(run.drafter, 128, torch.float32)
    batches = drafter_step_ours.read_rows(shard, 128, pin=False)
    (first, one), (second, two) = next(batches), next(batches)
    assert one is two and [first[0].epoch, second[0].epoch] == [0, 1]
    assert one.document_ids.unique().tolist() == [0, 1, 2] and one.loss_mask.sum() == 128 - 10 - 10 - 11


def test_without_a_gpu_the_true_shapes_are_refused(monkeypatch):
    monkeypatch.setattr("dflash_train.util.device.cuda_problem", lambda: "no GPU found")
    with pytest.raises(drafter_step.UserError, match="no GPU found"):
        drafter_step.main([])


@pytest.mark.parametrize("name, kind", [
    ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", "matrix products"), ("slope_kernel", "head logits"),
    ("triton_tem_fused_flex_attention_backward_2", "attention"), ("swiglu_kernel", "norm, rotation, SwiGLU"),
    ("Memcpy HtoD (Pinned -> Device)", "copies"), ("void at::native::vectorized_elementwise_kernel<4>", "rest"),
])  # fmt: skip
def test_a_kernel_is_counted_under_its_kind(name, kind):
    assert drafter_step_profile.kind_of(name) == kind


def step(ms: float, **changes) -> dict:
    return {"ms": ms, "least_ms": ms, "most_ms": ms, "blocks": 512.0, "block_flops": 230e9, "peak_bytes": 0,
            "steps": 3, "warmup_s": 1.0, "new_graphs": 0} | changes  # fmt: skip


def test_the_table_sets_a_step_against_the_rate_and_the_peer_and_says_what_is_missed():
    rate = {"best_tflops": 800.0, "tflops": {"8192^3": 800.0}, "device": "a card", "torch": "2", "code": "x",
            "void": False}  # fmt: skip
    figures = {"rate": rate, "step B=16 ours": step(200.0), "step B=16 specforge": step(280.0)}
    assert drafter_step_table.fraction(figures["step B=16 ours"], figures) == pytest.approx(512 * 230e9 / 0.2 / 800e12)
    text = drafter_step_table.markdown(figures, {})
    assert re.search(r"\| step B=16 ours \| 200.0 .*\| 2,560 \| 0.736 \|.*\| 1.40 \|", text), text
    assert text.count("aim reached") == 2 and "MISSED" not in text and "VOID" not in text
    figures["step B=16 ours"] = step(250.0, new_graphs=2)
    rate["void"] = True
    text = drafter_step_table.markdown(figures, {"head B=16 ours": "OutOfMemoryError: much"})
    assert text.count("aim MISSED") == 2 and "WRONG step B=16 ours: 2 graphs" in text and "VOID" in text
    assert "FAILED head B=16 ours: OutOfMemoryError: much" in text


def test_another_amount_of_work_is_not_compared_with_the_peer():
    figures = {"step B=16 specforge": step(280.0), "step B=16 ours, three layers": step(150.0, block_flops=160e9)}
    name = "step B=16 ours, three layers"
    assert drafter_step_table.times_specforge(name, figures[name], figures) is None


def test_a_time_limit_ends_what_takes_longer_and_spares_what_comes_after():
    with pytest.raises(TimeoutError, match="not done in 0 s"), drafter_step_peers.time_limit(0.05):
        time.sleep(5)
    with drafter_step_peers.time_limit(0.05):
        pass
    time.sleep(0.1)


def test_a_part_that_fails_is_named_and_on_file_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(drafter_step, "matrix_rates", lambda *_: 1 / 0)
    assert drafter_step.main(["--tiny", "--parts", "rate", "--out", str(tmp_path)]) == 1
    failed = json.loads((tmp_path / "drafter_step.json").read_text())["failed"]
    assert failed == {"rate": "ZeroDivisionError: division by zero"}
    assert "FAILED rate" in (tmp_path / "drafter_step.md").read_text()


class TestPeers:
    pytestmark = needs_peers

    def test_every_peer_does_the_same_work_at_tiny_shapes(self, tmp_path):
        bench = drafter_step.Bench(True, CPU, Pace(1, 2), drafter_step.random_head(
            build_run(16, 96, True).drafter, CPU, torch.float32), time.monotonic() + 60)  # fmt: skip
        run = Run(tmp_path / "run.json")
        for part in ("step", "head", "speculators"):
            for name, work in drafter_step.works(part, bench):
                run.keep(name, work)
        assert run.failed == {}
        everyone = ("ours", "specforge", "speculators")
        assert {f"{kind} B=16 {who}" for kind in ("step", "head") for who in everyone} <= run.figures.keys()
        for name, part in run.figures.items():
            ours = run.figures[" ".join([*name.split()[:2], "ours"])]
            assert (part["blocks"], part["block_flops"]) == (ours["blocks"], ours["block_flops"]) and part["ms"] > 0
        for name in ("step B=16 ours", "step B=16 specforge", "step B=8 specforge"):  # the other divides otherwise
            assert run.figures[name]["loss"] == pytest.approx(math.log(128), rel=0.15), name
        assert 0 < run.figures["step B=16 speculators"]["loss"] < 2 * math.log(128)

    def test_specforge_has_every_parameter_that_ours_has(self):
        run = build_run(16, 96, tiny=True)
        theirs = drafter_step_peers.specforge_drafter(run, CPU, "sdpa", liger=False)
        shapes = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}
        ours = drafter_step.inputs.parameter_shapes(run.drafter)
        assert shapes == {name: tuple(shape) for name, shape in ours.items()}
