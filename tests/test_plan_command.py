"""`plan` as a command: what fits, which key would help, and everything it must say."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_plan import build_plan, run_27b
from helpers_train import run_alone

from dflash_train import plan
from dflash_train.engine import inputs
from dflash_train.planning import fit, memory
from dflash_train.planning.fit import Problem, with_key
from dflash_train.target.tiny import Options, save_tiny
from dflash_train.util.errors import UserError

STAGES = ("regenerate", "extract", "eval", "train")


def shown(capsys, *words: str) -> str:
    plan.main(build_plan("dry_run=true", *words))
    return capsys.readouterr().out


# ---------------------------------------------------------------- what fits


def test_two_a6000_hold_the_27b_and_every_stage():
    run, sizes = run_27b()
    problem = Problem(run, sizes)
    assert problem.gpus_per_copy == 2 and problem.copies == 1
    by_name = {row.name: row for row in fit.all_fits(run, sizes)}
    assert set(by_name) == {"regenerate", "extract", "eval",
                            *(f"train zero{n}{o}" for n in (1, 2, 3) for o in ("", " offload"))}  # fmt: skip
    assert all(row.fits for row in by_name.values())
    weights = by_name["extract"].parts["weights"]
    assert weights == pytest.approx(53.79e9 / 2, rel=1e-3)  # half of the layers and one of the two tables
    assert by_name["eval"].parts["stash"] * 2 == memory.pending_bytes(sizes, 65, 2)
    assert by_name["train zero1"].parts["optimizer"] == 6 * 1_730_213_120  # twelve bytes a parameter on two GPUs
    assert by_name["train zero1 offload"].parts["optimizer"] == 0


@pytest.mark.parametrize("machine", ["rtx_3090", "rtx_5090", "rtx_pro_6000", "a6000x2"])
def test_a_key_that_is_named_does_make_the_stage_fit(machine):
    run, sizes = run_27b(machine)
    run = replace(run, data=with_key(run.data, "answers.batch_size", 256))  # so that the large ones have a NO as well
    refused = 0
    for stage in STAGES:
        problem = Problem(run, sizes)
        for named in fit.fit(stage, problem).fixes:
            refused += 1
            changed = run
            for word in named.split():
                key, _, value = word.partition("=")
                key, value = ("zero.stage", value[-1]) if key == "zero" else (key.removeprefix("eval."), value)
                changed = with_key(changed, key, int(value))
            assert fit.fit(stage, replace(problem, run=changed)).fits, (stage, named)
    assert refused


def test_one_rtx_3090_holds_nothing_of_the_27b_and_says_what_would():
    run, sizes = run_27b("rtx_3090")
    rows = {row.name: row for row in fit.all_fits(run, sizes)}
    assert not any(rows[name].fits for name in ("regenerate", "extract", "eval", "train zero1"))
    assert rows["extract"].fixes == ("hardware.num_gpus=4",)
    assert "train zero1 fits with" in "\n".join(plan.tables.fix_lines(list(rows.values())))


def test_a_machine_of_unknown_memory_has_no_verdict():
    run, sizes = run_27b()
    run = replace(run, hardware=replace(run.hardware, memory_bytes=None))
    assert {row.fits for row in fit.all_fits(run, sizes)} == {None}


def test_training_checks_its_memory_with_the_formula_that_plan_shows():
    run, sizes = run_27b()
    manifest = {"target": {"config": {"tie_word_embeddings": False}}}
    run = replace(run, hardware=replace(run.hardware, device="cpu", num_gpus=0))
    assert inputs.device_bytes(run, run.drafter, manifest, 1) == sum(fit.train_parts(Problem(run, sizes)).values())


# ---------------------------------------------------------------- what is said


def test_the_default_plan_for_two_a6000_names_everything_in_fifty_lines(capsys):
    """Trap 44: the storage is said before anything is loaded."""
    text = shown(capsys, "hardware=a6000x2", "target=qwen3_6_27b")
    for words in (
        "26,895,998,464 parameters", "1,730,213,120 parameters", "2x 51.0 GB", "SM 8.6", "no fp8", "FlashAttention 2",
        "over 2 GPUs", "train zero3 offload", "chain 15", "tree 64", "TP 2", "51.20 KB a token", "84.2 TB in all",
        "122 ms", "regenerate", "extract", "eval", "does not fit", "USD a GB-month",
    ):  # fmt: skip
        assert words in text, words
    lines = text.splitlines()
    assert len(lines) <= 50
    tables = [line for line in lines if line[:1] in "┏┃┡│└"]
    assert len(tables) > 25 and max(map(len, tables)) <= 120
    assert "unknown" not in text


def test_a_tree_in_the_table_costs_its_bound_and_breaks_even_where_its_round_does(capsys):
    text = shown(capsys, "hardware=a6000x2", "context=1")
    row = re.search(r"tree 256 *│ *([\d.]+) *│ *([\d.]+) *│ *([\d.]+) *│ *([\d.]+) *│ *([\d.]+)", text)
    spread, parallel, draft, even, at_two = map(float, row.groups())
    assert spread == pytest.approx(2 * parallel, abs=0.1) and parallel == pytest.approx(42.5, abs=0.1)
    assert even == pytest.approx((parallel + draft) / 33.4, abs=0.01) and at_two == pytest.approx(2 / even, abs=0.01)


def test_without_rates_times_are_unknown_and_the_keys_that_tell_are_named(capsys):
    text = shown(capsys, "hardware=cpu", "target=smollm2_135m", "drafter=small", "data=demo")
    assert "134,515,008 parameters" in text and "bandwidth unknown" in text
    assert "hardware.bandwidth" in text and "hardware.bf16_flops" in text
    assert "│ unknown" in text


def test_a_target_with_neither_numbers_nor_files_says_which_keys_would_tell(capsys):
    text = shown(capsys, "hardware=cpu", "target=tiny", "drafter=tiny", "data=demo", "target.hidden_size=4096")
    assert "target.num_layers" in text and "target.shape.num_kv_heads" in text
    assert "hidden 4096 x 5 layers" in text  # what is known is said
    assert "target.hidden_size" not in text


def test_a_folders_own_config_tells_the_sizes(tmp_path, capsys):
    folder = save_tiny(tmp_path / "model", Options(arch="qwen3_5"))
    text = shown(capsys, "hardware=h200", "target=hf", f"target.path={folder}", "drafter=tiny", "data=demo",
                 "extract.layer_ids=[0,2]")  # fmt: skip
    assert "4 layers (3 Gated DeltaNet, 1 full)" in text


def test_a_drafter_of_another_target_and_a_wrong_count_are_refused():
    with pytest.raises(UserError, match="drafter made for this target"):
        plan.main(build_plan("target=smollm2_135m", "dry_run=true"))
    with pytest.raises(UserError, match=r"target\.num_parameters(.|\n)*26,895,998,464"):
        plan.main(build_plan("target.num_parameters=5", "hardware=a6000x2", "dry_run=true"))


def test_prices_are_configuration(capsys):
    text = shown(capsys, "hardware=a6000x2", "assume.usd_per_gb_month=1", "hardware.usd_per_gpu_hour=100")
    dear = [
        int(n.replace(",", "")) for n in re.findall(r"│ *extract *│.*?│ *[\d,]+/s *│ *[\d,]+ *│ *([\d,]+) *│", text)
    ]
    cheap = shown(capsys, "hardware=a6000x2", "hardware.usd_per_gpu_hour=1")
    hours = [int(n.replace(",", "")) for n in re.findall(r"│ *extract *│.*?│ *[\d,]+/s *│ *([\d,]+) *│", cheap)]
    assert dear[0] == pytest.approx(2 * 100 * hours[0], rel=0.01)  # two GPUs
    assert "84,215 USD" in text


def test_an_upload_that_is_too_slow_bounds_extraction(capsys):
    text = shown(capsys, "hardware=h200", "hardware.upload_bytes_per_s=1e8")
    assert re.search(r"extract.*│ *1,953/s.*100.0 MB/s.*│ *upload", text)


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))


def test_the_benchmark_finds_the_sessions_tensors_where_plan_says(benchmarks):
    import plan_check

    figures = {f.name: f for f in plan_check.check_target(plan_check.TINY, torch.float32, torch.device("cpu"), 256)}
    assert figures["session"].ratio == 1.0
    assert 0.8 < figures["verify"].ratio < 1.2  # the CPU's delta rule is the GPU's, tensor for tensor; norms are not
    assert 0.5 < figures["capture"].ratio < 2


@pytest.mark.slow
def test_the_benchmark_of_planned_and_measured_peaks_runs_at_tiny_shapes(tmp_path):
    run = run_alone([sys.executable, "benchmarks/plan_check.py", "--tiny", "--out", tmp_path / "peaks.json"])
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"session.*│ 1\.000", run.stdout) and "train zero1" in run.stdout
    assert (tmp_path / "peaks.json").exists()


def test_live_bytes_counts_what_lives_and_forgets_what_does_not(benchmarks):
    from live_bytes import LiveBytes

    with LiveBytes() as count:
        a = torch.empty(1000)
        b = torch.empty(500) + a[:500]
        assert count.peak == 4 * 2000 and count.now == 4 * 1500  # the empty one is gone
        del b
        count.reset()
        assert count.peak == count.now == 4 * 1000
        a.view(10, 100).t()  # a view is no new memory
        assert count.peak == 4 * 1000


def test_the_readme_quotes_what_plan_says_of_two_a6000(capsys):
    text = shown(capsys, "hardware=a6000x2")
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    quoted = re.search(r"### What a machine can do\n(.*?)\n### ", readme, re.S)[1].replace(",", "")
    row = lambda name: [cell.strip() for cell in re.search(rf"│ {name} .*", text)[0].replace(",", "").split("│")[1:-1]]
    for stage in ("regenerate", "extract", "eval", "train zero1", "train zero2", "train zero3"):
        assert row(stage)[9] in quoted, stage
        assert row(stage)[10].startswith("yes")
    hours = re.findall(r"│ (?:regenerate|extract|train) *│ [^│]*(?:tokens|blocks) │ ([\d,]+)/s *│ ([\d,]+) ", text)
    for figure in (hours[0][1], hours[1][1], hours[2][1], hours[1][0], "84.2 TB", "49.5", *row("tree 128")[4:8:3]):
        assert str(figure).replace(",", "") in quoted, figure
    for figure in (*row("tree 128")[1:3], *row("tree 256")[1:3], row("tree 128")[9], "122 ms"):
        assert figure in quoted, figure
