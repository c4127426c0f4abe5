"""The training stage on a small synthetic store: it learns, resumes exactly, starts from a drafter, refuses in time."""

import json
import os
import signal
from pathlib import Path

import helpers_train
import pytest
import torch
from helpers_train import MASK, build_run, comparable, flat, make_store, metrics, one_rank, run_here
from safetensors import safe_open

from dflash_train import train as stage
from dflash_train.drafter.files import find_checkpoint, load_drafter, parameter_shapes, save_drafter
from dflash_train.drafter.loss import Objective
from dflash_train.drafter.walk import evaluate_samples, sample_batch
from dflash_train.engine.checkpoint import step_folders
from dflash_train.store.shard import list_markers, read_shard
from dflash_train.store.target_files import read_target_head
from dflash_train.util import log
from dflash_train.util.errors import UserError

TRAIN, HELDOUT = [[20, 30, 12], [40, 16, 25, 9], [48, 7]], [[22, 30, 18, 11]]


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    with one_rank():
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small lose more to waiting threads than they gain."""
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path) -> Path:
    make_store(tmp_path / "store", TRAIN, HELDOUT)
    return tmp_path


LEARN = {"train.epochs": 6, "train.lr": 1e-2, "train.global_batch": 2, "train.num_anchors": 16}
MANY = [[20 + (7 * i + j) % 25 for j in range(16)] for i in range(3)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A drafter that has learned the synthetic rule; nobody changes this folder."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trained")
    make_store(folder / "store", MANY, HELDOUT)
    run_here(folder, **LEARN, **{"train.eval_every": 20, "train.eval_samples": 3})
    return folder


def test_training_learns_and_leaves_best_last_and_metrics(trained):
    losses = [row["loss"] for row in metrics(trained)]
    assert losses[-1] < 0.3 * losses[0]
    heldout = metrics(trained, "heldout_acceptance")
    assert heldout[-1]["heldout_acceptance"] > 1.5 and len(heldout[0]["heldout_accuracy"]) == 3
    best = json.loads((trained / "out" / "best" / "provenance.json").read_text())
    assert best["heldout"]["heldout_acceptance"] == max(row["heldout_acceptance"] for row in heldout)
    assert best["target"]["fingerprint"] == "f" * 16 and best["config"]["train"]["lr"] == 1e-2
    row = metrics(trained)[-1]
    assert {"lr", "grad_norm", "tokens_per_s", "samples_per_s", "blocks_per_s", "accuracy", "elapsed_s"} <= row.keys()


def test_the_saved_drafter_has_exactly_the_drafters_keys(trained):
    """Trap 41."""
    _, config = load_drafter(trained / "out" / "last")
    for path in (trained / "out" / "last", trained / "out" / "best", find_checkpoint(trained / "out", "")):
        with safe_open(path / "model.safetensors", framework="pt") as file:
            assert set(file.keys()) == set(parameter_shapes(config))
    assert config.mask_token_id == MASK and config.target_layer_ids == [1, 3]


def test_the_reported_heldout_figures_are_the_saved_drafters_own(trained):
    model, config = load_drafter(trained / "out" / "last", dtype=torch.float32)
    values = metrics(trained, "heldout_loss")[-1]
    stats = evaluate(trained, model, config, num_samples=3)
    assert stats.loss == pytest.approx(values["heldout_loss"], rel=1e-5)
    assert stats.pooled == pytest.approx(values["heldout_acceptance"])
    assert stats.slot_accuracy == pytest.approx(values["heldout_accuracy"])


def test_heldout_answers_end_at_the_manifests_stop_ids_which_are_more_than_the_configs_eos(tmp_path, monkeypatch):
    """A chat model's config may name only the end of a text, while its answers end with the end of a turn."""
    target = {"name": "tiny", "fingerprint": "f" * 16, "config": helpers_train.TARGET_CONFIG | {"eos_token_id": 126}}
    make_store(
        tmp_path / "store", TRAIN, HELDOUT, manifest={"target": target | {"stop_ids": [helpers_train.STOP, 126]}}
    )
    told, inner = [], stage.evaluate_heldout
    monkeypatch.setattr(
        stage, "evaluate_heldout", lambda *args, **kw: told.append(kw["stop_ids"]) or inner(*args, **kw)
    )
    run_here(tmp_path, **{"train.max_steps": 1})
    assert told == [[helpers_train.STOP, 126]]


def evaluate(folder: Path, model, config, num_samples: int):
    store = helpers_train.LocalStore(folder / "store" / helpers_train.NAME)
    shard = read_shard(store.folder / list_markers(store, "heldout")[0].key)
    samples = [sample_batch(shard, j) for j in range(num_samples)]
    return evaluate_samples(model, config, read_target_head(store), samples, objective=Objective("ce_decay", 2.0),
                            stop_ids=[helpers_train.STOP], attention="sdpa")  # fmt: skip


# ---------------------------------------------------------------- resume

LONG = {"train.epochs": 3, "train.global_batch": 2, "train.micro_batch": 1, "train.eval_every": 4}


def weights(path: Path) -> dict:
    return load_drafter(path)[0].state_dict()


def interrupt_after(monkeypatch, step: int) -> None:
    """SIGTERM to ourselves in the middle of that step, once."""
    inner, count = stage.train_window, [0]

    def train_window(engine, *args):
        count[0] += 1
        if count[0] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(engine, *args)

    monkeypatch.setattr(stage, "train_window", train_window)


@pytest.mark.parametrize("zero, dtype", [("zero1", "float32"), ("zero1", "bfloat16"), ("zero3", "float32")])
def test_a_run_stopped_in_epoch_2_and_resumed_equals_an_unbroken_one(folder, monkeypatch, capsys, zero, dtype):
    """Traps 40, 41: losses, learning rate, order and weights; SIGTERM saves at the window's end."""
    settings = LONG | {"zero": zero, "train.dtype": dtype}
    unbroken = folder / "unbroken"
    make_store(unbroken / "store", TRAIN, HELDOUT)
    run_here(unbroken, **settings)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 4)
        run_here(folder, **settings)
    assert "stopped by a signal after step 4" in capsys.readouterr().out
    state = json.loads((folder / "out" / "step-000004" / "state.json").read_text())
    assert state["step"] == 4 and state["epoch"] == 1 and not (folder / "out" / "last").exists()
    run_here(folder, **settings)
    assert f"resume from {folder}" in capsys.readouterr().out
    got, want = comparable(folder), comparable(unbroken)
    assert len(want) > 9 and [row["step"] for row in got] == [row["step"] for row in want]
    assert flat(got) == pytest.approx(flat(want), rel=1e-6)
    for name, weight in weights(unbroken / "out" / "last").items():
        torch.testing.assert_close(weights(folder / "out" / "last")[name], weight, rtol=1e-6, atol=1e-7)


def test_checkpoints_are_at_window_ends_and_the_newest_stay(folder):
    """Trap 40: two micro-batches a window; step numbers count windows."""
    trainer = run_here(folder, **LONG, **{"train.save_every": 3, "train.keep_checkpoints": 2})
    assert trainer.given.accumulation == 2 and trainer.engine.engine.global_steps == trainer.step
    kept = [path.name for path in step_folders(folder / "out")]
    last = trainer.given.total_steps
    assert kept == [f"step-{last:06d}", f"step-{(last - 1) // 3 * 3:06d}"]


def test_a_finished_run_says_so_and_more_epochs_continue_it(folder, capsys):
    first = run_here(folder, **LONG).step
    assert stage.main(build_run(folder, **LONG)) == 0
    assert "training is complete" in capsys.readouterr().out
    assert run_here(folder, **(LONG | {"train.epochs": 4})).step > first
    assert "changed since: train.epochs 3.0 -> 4.0; not what an unbroken run would give" in capsys.readouterr().out


def test_a_run_with_a_limit_keeps_its_own_folder_and_samples(folder):
    (folder / "store" / f"{helpers_train.NAME}-limit4").symlink_to(folder / "store" / helpers_train.NAME)
    trainer = run_here(folder, **{"limit": 4, "train.epochs": 1})
    assert trainer.output_dir == folder / "out-limit4" and (trainer.output_dir / "last").exists()
    order = trainer.given.order
    seen = [sample for index in range(order.total_rows) for sample in order.row(index).samples]
    assert sorted(seen) == [(0, 0), (0, 1), (0, 2), (1, 0)]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"drafter.block_size": 3}, "drafter.block_size=3"),
        ({"train.global_batch": 4}, "train.global_batch=4"),
        ({"train.seed": 1}, "train.seed=1"),
    ],
)
def test_a_checkpoint_of_another_set_up_is_refused_by_name_before_anything_loads(folder, monkeypatch, change, says):
    """Traps 20, 38."""
    run_here(folder, **LONG, **{"train.max_steps": 1})
    monkeypatch.setattr(stage, "Trainer", None)
    with pytest.raises(UserError, match=says):
        stage.main(build_run(folder, **(LONG | change)))


def test_a_run_goes_on_at_another_stage_and_says_so(folder, monkeypatch, capsys):
    """Trap 38: 1 -> 3, 3 -> 2; losses, acceptance and weights equal an unbroken run's to 1e-4 in fp32."""
    unbroken = folder / "unbroken"
    make_store(unbroken / "store", TRAIN, HELDOUT)
    run_here(unbroken, **LONG)
    for step, number in ((3, 1), (3, 3)):  # three steps each time
        with monkeypatch.context() as patch:
            interrupt_after(patch, step)
            run_here(folder, **LONG, zero=f"zero{number}")
    run_here(folder, **LONG, zero="zero2")
    shown = " ".join(capsys.readouterr().out.split())
    assert "saved by 1 rank(s) at ZeRO-1, continued by 1 at ZeRO-3: the same training up to rounding" in shown
    assert "saved by 1 rank(s) at ZeRO-3, continued by 1 at ZeRO-2" in shown
    got, want = comparable(folder), comparable(unbroken)
    assert len(want) > 9 and [row["step"] for row in got] == [row["step"] for row in want]
    assert flat(got) == pytest.approx(flat(want), rel=1e-4)
    for name, weight in weights(unbroken / "out" / "last").items():
        torch.testing.assert_close(weights(folder / "out" / "last")[name], weight, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- init_from


def test_step_0_of_a_continued_drafter_is_that_drafters_evaluated_loss(trained, folder):
    source = trained / "out" / "best"
    model, config = load_drafter(source)
    stats = evaluate(folder, model, config, num_samples=4)
    for init_from in (source, source / "model.safetensors", trained / "out"):
        run_here(folder, **LONG, **{"train.init_from": init_from, "train.max_steps": 1, "train.resume": "never"})
        step_0 = metrics(folder, "heldout_loss")[0]
        assert step_0["step"] == 0
        if init_from != trained / "out":  # the newest weights, not the best
            assert step_0["heldout_loss"] == pytest.approx(stats.loss, rel=1e-5)
            assert step_0["heldout_acceptance"] == pytest.approx(stats.pooled)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"block_size": 3}, "block_size=3; want block_size=4"),
        ({"mask_token_id": 126}, "mask_token_id=126; want mask_token_id=127"),
        ({"target_layer_ids": [0, 3]}, "target_layer_ids=[0, 3]; want target_layer_ids=[1, 3]"),
        ({"is_causal": True}, "('full_attention', None, True)"),
        ({"rope_theta": 1e6}, "rope_theta=1000000.0; want rope_theta=10000.0"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_name(trained, folder, capsys, change, says):
    """Trap 20: the mask token among others."""
    model, config = load_drafter(trained / "out" / "last")
    save_drafter(folder / "other", model, config.__class__(**(vars(config) | change)), {})
    assert says in refused(folder, capsys, **{"train.init_from": folder / "other"})


def test_a_drafter_with_another_number_of_layers_or_no_such_drafter_is_refused_by_name(trained, folder, capsys):
    lone = folder / "lone.safetensors"
    lone.write_bytes((trained / "out" / "last" / "model.safetensors").read_bytes())
    assert "num_layers=2; want" in refused(folder, capsys, **{"train.init_from": lone, "drafter.num_layers": 1})
    assert "no such file or folder" in refused(folder, capsys, **{"train.init_from": folder / "absent"})


# ---------------------------------------------------------------- rows without anchors, dtypes, time


def test_samples_without_an_anchor_and_empty_rows_train_with_a_zero_loss(tmp_path):
    """Trap 39: prompts fill the samples, so no window has an anchor; weights stay where they were."""
    make_store(tmp_path / "store", [[20, 30], [9]], prompt=100)
    trainer = run_here(tmp_path, **{"train.epochs": 1, "train.weight_decay": 0.0})
    assert [row["loss"] for row in metrics(tmp_path)] == [0.0] * trainer.given.total_steps
    fresh = stage.inputs.initial_drafter(trainer.run, trainer.config).state_dict()
    assert all(torch.equal(weights(tmp_path / "out" / "last")[name], weight) for name, weight in fresh.items())


@pytest.mark.parametrize("loss", ["ce_decay", "dpace"])
def test_bfloat16_trains_on_bfloat16_rows_and_is_evaluated_in_both_dtypes(folder, loss):
    """Trap 42."""
    settings = {**LEARN, "train.epochs": 6, "train.dtype": "bfloat16", "train.loss": loss, "zero": "zero2"}
    run_here(folder, **settings)
    losses = [row["loss"] for row in metrics(folder)]
    assert losses[-1] < 0.8 * losses[0]
    reported = metrics(folder, "heldout_loss")[-1]["heldout_loss"]
    assert load_drafter(folder / "out" / "last")[0].dtype == torch.bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        model, config = load_drafter(folder / "out" / "last", dtype=dtype)
        stats = evaluate(folder, model, config, num_samples=4)
        if loss == "ce_decay":
            assert stats.loss == pytest.approx(reported, rel=3e-2)


def test_the_time_limit_ends_training_and_anneals_the_rate(folder, capsys):
    trainer = run_here(folder, **(LONG | {"train.epochs": 10_000, "train.max_minutes": 0.02}))
    lrs = [row["lr"] for row in metrics(folder)]
    assert 0 < trainer.step < trainer.given.total_steps and lrs[-1] < 0.7 * max(lrs)
    assert (folder / "out" / "last").exists()


def test_wandb_runs_offline_here_and_metrics_are_there_anyway(folder, capsys, monkeypatch):
    """Trap 43."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run_here(folder, **LONG, **{"train.max_steps": 2, "train.wandb.mode": "auto"})
    shown = capsys.readouterr().out
    assert "wandb: offline" in shown or "wandb is off" in shown
    assert [row["step"] for row in metrics(folder)] == [1, 2]


# ---------------------------------------------------------------- refused before it starts


def refused(folder, capsys, **values) -> str:
    log.console.width = 400  # no cell is wrapped
    with pytest.raises(SystemExit) as error:
        stage.check(build_run(folder, **values))
    assert error.value.code == 2
    return " ".join(capsys.readouterr().out.split())


def test_batch_numbers_are_refused_before_the_model_loads(folder, capsys):
    """Trap 37."""
    shown = refused(folder, capsys, **{"train.global_batch": 7})
    assert "7 rows with micro_batch=2 on 1" in shown and "train.global_batch=8" in shown


def test_missing_shards_a_missing_store_and_missing_target_files_are_named(folder, tmp_path, capsys):
    store = folder / "store" / helpers_train.NAME
    assert "manifest.json" in refused(folder, capsys, **{"store.root": tmp_path / "nowhere"})
    (store / "markers" / "train-00001.json").unlink()
    assert "2 of 3 train" in refused(folder, capsys)
    (store / "target" / "target_head.safetensors").unlink()
    assert "target" in refused(folder, capsys)
    manifest = json.loads((store / "manifest.json").read_text())
    del manifest["target"]["stop_ids"]
    (store / "manifest.json").write_text(json.dumps(manifest))
    assert "no target.stop_ids" in refused(folder, capsys)


def test_a_truncated_shard_is_refused_by_its_marker(folder, capsys):
    store = helpers_train.LocalStore(folder / "store" / helpers_train.NAME)
    path = store.folder / list_markers(store, "train")[0].key
    os.truncate(path, path.stat().st_size - 7)
    assert "train-00000" in refused(folder, capsys)


def test_a_long_sample_a_foreign_mask_token_and_a_wish_for_kl_are_refused(folder, capsys):
    """Trap 20."""
    assert "up to 48 tokens" in refused(folder, capsys, **{"train.row_tokens": 32})
    assert "target.mask_token_id: 126" in refused(folder, capsys, **{"target.mask_token_id": 126})
    assert "last hidden" in refused(folder, capsys, **{"train.loss": "kl"})


def test_a_dry_run_stops_after_the_table(folder, capsys):
    with pytest.raises(SystemExit) as error:
        stage.check(build_run(folder, dry_run="true"))
    assert error.value.code == 0 and "nothing was done" in capsys.readouterr().out
    assert not (folder / "out").exists()
