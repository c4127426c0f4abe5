"""Checkpoints are whole or absent, found again, and refused in one line where they cannot continue."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from helpers_train import one_rank
from helpers_train_ranks import CPU, Toy, numerator, toy_data, toy_settings

from dflash_train.config import ZeroConfig
from dflash_train.engine import zero
from dflash_train.engine.checkpoint import check_resumable, find_resumable, missing_part, save_checkpoint, step_folders
from dflash_train.util.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    with one_rank():
        yield


@pytest.fixture(scope="module")
def engine() -> zero.ZeroEngine:
    return zero.ZeroEngine(Toy(), toy_settings(micro_batch=8), ZeroConfig(1), 1, CPU)


def save(folder, engine, step, run_id="a", keep=2, need_bytes=1):
    def write_drafter(path, weights):
        path.mkdir()
        torch.save(weights, path / "weights.pt")

    state = {"step": step, "run_id": run_id, "world_size": 1, "zero_stage": 1, "facts": {"mask": 127}}
    return save_checkpoint(folder, engine, state, write_drafter, keep=keep, need_bytes=need_bytes)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_lists_its_files_and_the_newest_few_stay(tmp_path, engine):
    for step in (1, 2, 3):
        save(tmp_path, engine, step)
    assert names(tmp_path) == ["latest.json", "step-000002", "step-000003"]
    folder, state = find_resumable(tmp_path)
    assert folder.name == "step-000003" and state["step"] == 3
    on_disk = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"state.json"}
    assert set(state["files"]) == on_disk and "drafter/weights.pt" in on_disk
    assert not any(name.endswith(".py") for name in on_disk)


def break_file(folder):
    path = max((folder / "deepspeed").iterdir(), key=lambda p: p.stat().st_size)
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    "damage, why",
    [
        (lambda folder: (folder / "state.json").unlink(), "no readable state.json"),
        (lambda folder: (folder / "state.json").write_text('{"step": 2, "fi'), "no readable state.json"),
        (lambda folder: (folder / "drafter" / "weights.pt").unlink(), "drafter/weights.pt is not there"),
        (break_file, r"bytes, not \d+"),
    ],
)
def test_an_incomplete_newest_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, engine, capsys, damage, why):
    """Trap 40."""
    for step in (1, 2):
        save(tmp_path, engine, step)
    damage(tmp_path / "step-000002")
    folder, _ = find_resumable(tmp_path)
    assert folder.name == "step-000001"
    shown = capsys.readouterr().out
    assert "WARNING" in shown and "step-000002" in shown
    assert re.search(why, missing_part(tmp_path / "step-000002")) and re.search(why, shown)


def test_when_no_checkpoint_is_complete_training_does_not_silently_start_anew(tmp_path, engine):
    save(tmp_path, engine, 1)
    (tmp_path / "step-000001" / "state.json").unlink()
    with pytest.raises(UserError, match="none is complete"):
        find_resumable(tmp_path)


def test_a_folder_without_checkpoints_starts_anew(tmp_path):
    assert find_resumable(tmp_path) is None and find_resumable(tmp_path / "absent") is None


def test_what_a_killed_save_left_is_ignored_and_removed(tmp_path, engine):
    save(tmp_path, engine, 1)
    half = tmp_path / ".step-000002.tmp"
    half.mkdir()
    (half / "state.json").write_text("{}")
    assert find_resumable(tmp_path)[0].name == "step-000001"
    save(tmp_path, engine, 2)
    assert names(tmp_path) == ["latest.json", "step-000001", "step-000002"]


def test_checkpoints_of_an_earlier_run_are_replaced_and_never_fallen_back_to(tmp_path, engine):
    for step in (5, 6):
        save(tmp_path, engine, step, run_id="old")
    save(tmp_path, engine, 2, run_id="new")
    assert names(tmp_path) == ["latest.json", "step-000002"]
    assert find_resumable(tmp_path)[1]["run_id"] == "new"


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_half(tmp_path, engine):
    save(tmp_path, engine, 1)
    with pytest.raises(UserError, match="free at"):
        save(tmp_path, engine, 2, need_bytes=1 << 60)
    assert names(tmp_path) == ["latest.json", "step-000001"]


def cut_short(write):
    """A write that leaves half a file and then fails as torch does."""

    def fail(state, path, *args, **kwargs):
        write(state, path, *args, **kwargs)
        os.truncate(path, Path(path).stat().st_size // 2)
        raise RuntimeError("PytorchStreamWriter failed")

    return fail


@pytest.mark.parametrize("part", ["deepspeed/mp_rank_00_model_states.pt", "drafter"])
def test_a_failing_write_names_rank_and_file_and_leaves_the_old_checkpoint_and_nothing_half(
    tmp_path, engine, monkeypatch, part
):
    """Trap 40: the weights' own folder, or a file that DeepSpeed writes."""
    save(tmp_path, engine, 1)
    if part == "drafter":
        real = engine.gathered_state_dict()
        monkeypatch.setattr(engine, "gathered_state_dict", lambda: monkeypatch.setattr(torch, "save", cut) or real)
        cut, part = cut_short(torch.save), ".step-000002.tmp"
    else:
        monkeypatch.setattr(torch, "save", cut_short(torch.save))
    with pytest.raises(UserError, match=f"{re.escape(part)}\n.*rank 0 could not write it: PytorchStreamWriter"):
        save(tmp_path, engine, 2)
    assert names(tmp_path) == ["latest.json", "step-000001"] and missing_part(tmp_path / "step-000001") is None
    monkeypatch.undo()
    save(tmp_path, engine, 2)
    assert find_resumable(tmp_path)[0].name == "step-000002"


STATE = {"world_size": 2, "zero_stage": 3, "facts": {"train.loss": "ce_decay", "drafter.mask_token_id": 127}}


@pytest.mark.parametrize(
    "change, says",
    [
        ({"world_size": 1}, r"saved with 2 rank\(s\), now 1: use 2, or train.init_from="),
        ({"zero_stage": 1}, r"saved with 3 as ZeRO stage, now 1: use 3"),
    ],
)
def test_another_number_of_ranks_or_another_stage_is_refused_in_one_line(tmp_path, change, says):
    """Trap 38."""
    with pytest.raises(UserError, match=says) as error:
        check_resumable(STATE, STATE | change, tmp_path)
    assert "\n" not in str(error.value)


def test_another_mask_token_on_resume_is_refused_by_name(tmp_path):
    """Trap 20."""
    now = STATE | {"facts": STATE["facts"] | {"drafter.mask_token_id": 126}}
    with pytest.raises(UserError, match=r"drafter.mask_token_id=126\n.*drafter.mask_token_id=127"):
        check_resumable(STATE, now, tmp_path)
    check_resumable(STATE, STATE, tmp_path)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_engine_goes_on_as_if_it_had_never_stopped(tmp_path, stage, dtype):
    """Trap 40: stage 1 in bf16 with fp32 accumulation has its own optimizer class and file."""
    build = lambda: zero.ZeroEngine(Toy(), toy_settings(dtype=dtype, micro_batch=4), ZeroConfig(stage), 2, CPU)
    inputs, targets, weights = toy_data()

    def step(engine, number):
        total = 0.0
        for half in (slice(0, 4), slice(4, 8)):
            loss = numerator(engine(inputs[number, half]), targets[number, half], weights[number, half])
            engine.backward(loss, float(weights[number].sum()))
            total += loss.item()
        return total, engine.gradient_norm()

    first = build()
    before = [step(first, number) for number in (0, 1)]
    first.save(str(tmp_path), "deepspeed")
    unbroken = [step(first, number) for number in (2, 3)]
    second = build()
    second.load(str(tmp_path), "deepspeed")
    resumed = [step(second, number) for number in (2, 3)]
    assert before[0] != before[1]
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(unbroken), rtol=1e-6, atol=0)
    for name, weight in first.gathered_state_dict().items():
        assert torch.equal(second.gathered_state_dict()[name], weight)


def test_step_folders_are_sorted_by_number_not_by_name(tmp_path):
    for name in ("step-000900", "step-1000000", "step-001000", "step-x", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in step_folders(tmp_path)] == ["step-1000000", "step-001000", "step-000900"]


def test_latest_names_the_checkpoint_that_eval_and_export_take(tmp_path, engine):
    save(tmp_path, engine, 7)
    assert json.loads((tmp_path / "latest.json").read_text()) == {"checkpoint": "step-000007"}
