"""Checkpoints are whole or absent, checked byte by byte, found again, and continued at any ZeRO stage."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers_train import one_rank
from helpers_train_ranks import CPU, Toy, numerator, toy_data, toy_settings
from safetensors.torch import load_file, save_file

from dflash_train.config import ZeroConfig
from dflash_train.engine import checkpoint, state_files, zero
from dflash_train.engine.checkpoint import (
    check_resumable,
    find_resumable,
    layout_change,
    missing_part,
    save_checkpoint,
    step_folders,
)
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
    assert {Path(name).suffix for name in on_disk} == {".safetensors", ".pt"}  # .pt is this test's own drafter file
    assert {Path(name).suffix for name in on_disk if name.startswith("training/")} == {".safetensors"}


def largest(folder) -> Path:
    return max((folder / "training").iterdir(), key=lambda path: path.stat().st_size)


def cut_file(folder):
    os.truncate(largest(folder), largest(folder).stat().st_size - 1)


def flip_bit(folder):
    """Same size, same length of every tensor: nothing but the checksum can see it."""
    data = bytearray(largest(folder).read_bytes())
    data[-3] ^= 1
    largest(folder).write_bytes(data)


@pytest.mark.parametrize(
    "damage, why",
    [
        (lambda folder: (folder / "state.json").unlink(), "no readable state.json"),
        (lambda folder: (folder / "state.json").write_text('{"step": 2, "fi'), "no readable state.json"),
        (lambda folder: (folder / "drafter" / "weights.pt").unlink(), "drafter/weights.pt is not there"),
        (cut_file, r"bytes, not \d+"),
        (flip_bit, r"training/part-00001.safetensors has changed: sha256 \w+, not \w+"),
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


def test_when_what_latest_json_names_is_gone_the_one_before_is_taken(tmp_path, engine, capsys):
    """Trap 40."""
    for step in (1, 2):
        save(tmp_path, engine, step)
    shutil.rmtree(tmp_path / "step-000002")
    assert find_resumable(tmp_path)[0].name == "step-000001"
    assert "step-000002 is not usable (no readable state.json)" in " ".join(capsys.readouterr().out.split())


def test_a_long_check_says_how_far_it_is(tmp_path, engine, capsys, monkeypatch):
    save(tmp_path, engine, 1)
    monkeypatch.setattr(checkpoint, "_LONG_BYTES", 1)
    assert find_resumable(tmp_path) and "checksums" in capsys.readouterr().out


def test_a_checkpoint_of_an_earlier_version_is_named_as_such(tmp_path, engine):
    save(tmp_path, engine, 1)
    path = tmp_path / "step-000001" / "state.json"
    state = json.loads(path.read_text())
    del state["num_steps"]
    path.write_text(json.dumps(state))
    assert "an earlier version wrote it; train.init_from=" in missing_part(path.parent)


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


@pytest.mark.parametrize("part", ["training/part-00001.safetensors", "drafter"])
def test_a_failing_write_names_rank_and_file_and_leaves_the_old_checkpoint_and_nothing_half(
    tmp_path, engine, monkeypatch, part
):
    """Trap 40: the weights' own folder, or masters and moments."""
    save(tmp_path, engine, 1)
    if part == "drafter":
        monkeypatch.setattr(torch, "save", cut_short(torch.save))
        part = ".step-000002.tmp"
    else:
        monkeypatch.setattr(state_files, "save_file", cut_short(state_files.save_file))
    with pytest.raises(UserError, match=f"{re.escape(part)}\n.*rank 0 could not write it: PytorchStreamWriter"):
        save(tmp_path, engine, 2)
    assert names(tmp_path) == ["latest.json", "step-000001"] and missing_part(tmp_path / "step-000001") is None
    monkeypatch.undo()
    save(tmp_path, engine, 2)
    assert find_resumable(tmp_path)[0].name == "step-000002"


def test_another_number_of_ranks_or_another_stage_is_said_in_one_line():
    """Trap 38."""
    state = {"world_size": 2, "zero_stage": 3}
    assert layout_change(state, 2, 3) is None
    for world, stage in ((1, 3), (2, 1)):
        said = layout_change(state, world, stage)
        assert f"saved by 2 rank(s) at ZeRO-3, continued by {world} at ZeRO-{stage}" in said and "\n" not in said


FACTS = {"train.loss": "ce_decay", "drafter.mask_token_id": 127}


def test_another_mask_token_on_resume_is_refused_by_name(tmp_path):
    """Trap 20."""
    with pytest.raises(UserError, match=r"drafter.mask_token_id=126\n.*drafter.mask_token_id=127"):
        check_resumable({"facts": FACTS}, FACTS | {"drafter.mask_token_id": 126}, tmp_path)
    check_resumable({"facts": FACTS}, FACTS, tmp_path)


def build(stage: int, dtype: str = "float32") -> zero.ZeroEngine:
    return zero.ZeroEngine(Toy(), toy_settings(dtype=dtype, micro_batch=4), ZeroConfig(stage), 2, CPU)


def take_steps(engine: zero.ZeroEngine, numbers: tuple[int, ...]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the toy's steps with these numbers, two micro-batches each."""
    inputs, targets, weights = toy_data()
    out = []
    for number in numbers:
        total = 0.0
        for half in (slice(0, 4), slice(4, 8)):
            loss = numerator(engine(inputs[number, half]), targets[number, half], weights[number, half])
            engine.backward(loss, float(weights[number].sum()))
            total += loss.item()
        out.append((total, engine.gradient_norm()))
    return out


def assert_same_weights(one: zero.ZeroEngine, other: zero.ZeroEngine, **tolerance: float) -> None:
    for name, weight in one.gathered_state_dict().items():
        torch.testing.assert_close(other.gathered_state_dict()[name], weight, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_engine_goes_on_as_if_it_had_never_stopped(tmp_path, stage, dtype):
    """Trap 40: to the bit. Stage 1 in bf16 with fp32 accumulation has its own optimizer class."""
    first = build(stage, dtype)
    before = take_steps(first, (0, 1))
    num_steps = first.save(tmp_path / "training")
    unbroken = take_steps(first, (2, 3))
    second = build(stage, dtype)
    second.load(tmp_path / "training", num_steps)
    assert num_steps == 2 and before[0] != before[1]
    assert take_steps(second, (2, 3)) == unbroken
    assert_same_weights(first, second)


@pytest.mark.parametrize("saved, loaded", [(1, 3), (3, 2), (2, 1), (3, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_one_stage_is_continued_at_another(tmp_path, saved, loaded, dtype):
    """Trap 38: masters and moments arrive to the bit, and in fp32 what follows agrees to rounding."""
    first = build(saved, dtype)
    take_steps(first, (0, 1))
    num_steps = first.save(tmp_path / "training")
    second = build(loaded, dtype)
    second.load(tmp_path / "training", num_steps)
    assert_same_weights(first, second)
    for kind, flats in first._kinds().items():
        for name in first.masters.shapes:
            read = second.masters.gathered(name, second._kinds()[kind])
            assert torch.equal(read, first.masters.gathered(name, flats))
    if dtype == "float32":
        torch.testing.assert_close(
            torch.tensor(take_steps(second, (2, 3))), torch.tensor(take_steps(first, (2, 3))), rtol=1e-6, atol=0
        )
        assert_same_weights(first, second, rtol=1e-6, atol=1e-7)


def test_state_is_written_in_bounded_parts_and_read_from_all_of_them(tmp_path, monkeypatch):
    first = build(1)
    take_steps(first, (0,))
    monkeypatch.setattr(state_files, "PART_BYTES", 1000)
    first.save(tmp_path / "training")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "training").iterdir())]
    assert len(sizes) > 2 and max(sizes) < 2000  # 1000 and the header
    second = build(3)
    second.load(tmp_path / "training", 1)
    assert_same_weights(first, second)


def test_a_missing_tensor_and_one_of_another_shape_are_named(tmp_path):
    engine = build(2)
    engine.save(tmp_path / "training")
    path = tmp_path / "training" / "part-00001.safetensors"
    whole = load_file(path)
    save_file({key: value for key, value in whole.items() if key != "gain.exp_avg"}, path)
    with pytest.raises(UserError, match=r"1 tensor.s. are not there, among them gain\.exp_avg"):
        engine.load(tmp_path / "training", 0)
    save_file(whole | {"gain.master": torch.zeros(3)}, path)
    with pytest.raises(UserError, match=r"gain.master\n.*shape \(3,\)\n.*\(16,\)"):
        engine.load(tmp_path / "training", 0)


def test_step_folders_are_sorted_by_number_not_by_name(tmp_path):
    for name in ("step-000900", "step-1000000", "step-001000", "step-x", "other"):
        (tmp_path / name).mkdir()
    assert [path.name for path in step_folders(tmp_path)] == ["step-1000000", "step-001000", "step-000900"]


def test_latest_names_the_checkpoint_that_eval_and_export_take(tmp_path, engine):
    save(tmp_path, engine, 7)
    assert json.loads((tmp_path / "latest.json").read_text()) == {"checkpoint": "step-000007"}
