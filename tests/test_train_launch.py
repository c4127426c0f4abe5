"""Training as people and launchers start it: one process, DeepSpeed's launcher, two gloo ranks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers_train import comparable, flat, free_port, make_store, one_rank, overrides, run_alone, run_here
from helpers_train_ranks import DRILL, KILLS, assert_equal, at_step, interrupt, run_plain

from dflash_train import train as stage
from dflash_train.drafter.files import load_drafter
from dflash_train.engine.checkpoint import find_resumable

TRAIN, HELDOUT = [[20, 30, 12], [40, 16, 25, 9], [48, 7]], [[22, 30, 18, 11]]


def errors(folder: Path, name: str) -> list[str]:
    """What each of the two ranks ended with."""
    return [(folder / f"{name}-error-{rank}.txt").read_text() for rank in (0, 1)]


def launcher(num_ranks: int) -> list:
    return ["deepspeed", "--num_gpus", num_ranks, "--master_port", free_port()]


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """The same training by one rank, without a stop; beside it one that was stopped after three steps."""
    folder = tmp_path_factory.mktemp("one")
    make_store(folder / "store", TRAIN, HELDOUT)
    torch.set_num_threads(1)
    with one_rank():
        run_here(folder, **DRILL)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage, "train_window", at_step(3, 0, interrupt))
            run_here(folder, zero="zero1", **DRILL, **{"train.output_dir": folder / "to_two" / "out"})
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, one) -> Path:
    """Everything that needs two ranks, from one start of the launcher."""
    folder = tmp_path_factory.mktemp("ranks")
    make_store(folder / "store", TRAIN, HELDOUT)
    shutil.copytree(one / "to_two", folder / "to_two")
    result = run_alone([*launcher(2), "tests/helpers_train_ranks.py", folder])
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_two_ranks_equal_a_plain_loop_at_every_stage_and_accumulation(two_ranks):
    """Traps 37, 39: one rank's second micro-batch has no weight at all."""
    scenarios = json.loads((two_ranks / "results.json").read_text())["toys"]
    assert len(scenarios) == 6
    for got in scenarios.values():
        assert_equal(got, run_plain())


def assert_trained_alike(folder: Path, one: Path, rel: float) -> None:
    """Losses, rates, norms, acceptance and weights."""
    got, want = comparable(folder), comparable(one)
    assert [row["step"] for row in got] == [row["step"] for row in want] and len(want) > 4
    assert flat(got) == pytest.approx(flat(want), rel=rel)
    weights = load_drafter(folder / "out" / "last")[0].state_dict()
    expected = load_drafter(one / "out" / "last")[0].state_dict()
    assert set(weights) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=rel, atol=rel / 10)


def test_two_ranks_train_like_one(two_ranks, one):
    """Traps 39, 41: 9 samples on 2 ranks at stages 1 and 3 give the losses, acceptance and keys of one rank."""
    assert json.loads((two_ranks / "results.json").read_text())["trainings"] == {"stage1": None, "stage3": None}
    for name in ("stage1", "stage3"):
        assert_trained_alike(two_ranks / name, one, rel=2e-5)


def test_two_ranks_continue_what_one_began_and_one_what_two_began(two_ranks, one, capsys):
    """Trap 38: 1 rank at ZeRO-1 -> 2 at ZeRO-2, and 2 at ZeRO-3 -> 1 at ZeRO-1, equal one rank that never stopped."""
    assert json.loads((two_ranks / "results.json").read_text())["moved"] == {"to_one": None, "to_two": None}
    assert find_resumable(two_ranks / "to_one" / "out")[0].name == "step-000003"
    with one_rank():
        run_here(two_ranks, **DRILL, **{"train.output_dir": two_ranks / "to_one" / "out"})
    said = " ".join(capsys.readouterr().out.split())
    assert "saved by 2 rank(s) at ZeRO-3, continued by 1 at ZeRO-1" in said
    for name in ("to_one", "to_two"):
        assert_trained_alike(two_ranks / name, one, rel=1e-4)


@pytest.mark.parametrize("name", KILLS)
def test_when_a_rank_is_killed_all_end_and_the_run_goes_on_from_the_last_whole_checkpoint(tmp_path, one, name):
    """Trap 40: in the backward pass of step 4, and half way through writing its checkpoint."""
    make_store(tmp_path / "store", TRAIN, HELDOUT)
    result = run_alone([*launcher(2), "tests/helpers_train_ranks.py", name, tmp_path])
    assert result.returncode != 0
    out = tmp_path / name / "out"
    assert (out / ".step-000004.tmp").exists() == (name == "killed_while_writing")
    assert find_resumable(out)[0].name == "step-000002" and not (out / "last").exists()
    with one_rank():
        run_here(tmp_path, **DRILL, **{"train.output_dir": out})
    assert not (out / ".step-000004.tmp").exists()
    assert_trained_alike(tmp_path / name, one, rel=1e-4)


def test_a_shard_that_one_rank_cannot_read_ends_both_with_its_name(two_ranks):
    """Trap 39."""
    first, second = errors(two_ranks, "unreadable")
    assert "unreadable on this machine" in first and "unreadable on this machine" in second
    assert "rank 1 failed: shards/train-00001" in first


@pytest.mark.parametrize("number", [1, 3])
def test_when_a_checkpoint_cannot_be_written_both_ranks_end_with_the_file(two_ranks, number):
    """Trap 40: nobody waits for the collective's timeout, and the half-written checkpoint is not there."""
    name = f"full{number}"
    for error in errors(two_ranks, name):
        assert "rank 0 could not write it: [Errno 28] No space left on device" in error
        assert ".step-000002.tmp/training/part-00001.safetensors\n" in error
    assert sorted(path.name for path in (two_ranks / name).iterdir()) == ["latest.json", "metrics.jsonl", "step-000001"]
    found, state = find_resumable(two_ranks / name)
    assert found.name == "step-000001" and state["world_size"] == 2


def test_when_rank_0_cannot_write_the_best_weights_both_ranks_end_with_the_folder(two_ranks):
    for error in errors(two_ranks, "full_best"):
        assert "full_best/best\n" in error and "rank 0 could not write it" in error
    assert not (two_ranks / "full_best" / "best").exists()


@pytest.mark.slow
def test_the_launcher_starts_two_ranks_with_overrides(tmp_path):
    """Trap 36."""
    make_store(tmp_path / "store", TRAIN, HELDOUT)
    words = overrides(tmp_path, **{"train.micro_batch": 1, "train.max_steps": 2})
    result = run_alone([*launcher(2), "launch/train.py", *words])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 rows = 2 rank(s)" in result.stdout and (tmp_path / "out" / "last" / "config.json").exists()


def test_without_a_store_the_launchers_defaults_compose_and_end_in_the_table(tmp_path):
    """Trap 36: `deepspeed launch/train.py`, nothing else; only the store's place is set, by its variable."""
    result = run_alone(["deepspeed", "--master_port", free_port(), "launch/train.py"], DFLASH_STORE=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "train: what it needs" in result.stdout and "dflash_train.extract" in result.stdout


def test_the_stage_runs_without_a_launcher_and_ends_cleanly(tmp_path):
    make_store(tmp_path / "store", TRAIN, HELDOUT)
    result = run_alone(["python", "-m", "dflash_train.train", *overrides(tmp_path, **{"train.max_steps": 1})])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "next: python -m dflash_train.eval" in result.stdout and result.stderr.strip() == ""
