"""`train.loss=kl` from a real store: a tiny target's last hidden states are extracted, and training follows them."""

import pytest
import torch
from helpers_store import make_run
from helpers_train import build_run, metrics, one_rank, run_here

from dflash_train import extract, regenerate
from dflash_train import train as stage
from dflash_train.util import log


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    torch.set_num_threads(1)
    with one_rank():
        yield


def extract_tiny(folder, monkeypatch, last_hidden: bool) -> None:
    """The tiny target's store at folder/store, where `helpers_train` looks for it."""
    monkeypatch.setattr(regenerate, "ensure_answers", lambda run: run.answers_dir)
    assert not extract.main(make_run(folder, data__name="demo", store__last_hidden=last_hidden))


SETTINGS = {"train.loss": "kl", "train.row_tokens": 128, "train.num_anchors": 16, "train.epochs": 5, "train.lr": 1e-2,
            "train.global_batch": 2, "train.eval_samples": 2}  # fmt: skip


def test_kl_trains_on_extracted_last_hidden_states_and_its_loss_falls(tmp_path, monkeypatch):
    extract_tiny(tmp_path, monkeypatch, last_hidden=True)
    trainer = run_here(tmp_path, **SETTINGS)
    assert trainer.objective.kind == "kl"
    losses = [row["loss"] for row in metrics(tmp_path)]
    assert len(losses) == 10 and losses[-1] < 0.7 * losses[0] and min(losses) > 0
    assert 0 < metrics(tmp_path, "heldout_loss")[-1]["heldout_loss"] < 0.7 * losses[0]


def test_a_store_without_last_hidden_states_is_refused_for_kl_before_training(tmp_path, monkeypatch, capsys):
    extract_tiny(tmp_path, monkeypatch, last_hidden=False)
    monkeypatch.setattr(stage, "Trainer", None)
    log.console.width = 400  # no cell is wrapped
    with pytest.raises(SystemExit) as error:
        stage.main(build_run(tmp_path, **SETTINGS))
    assert error.value.code == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "train.loss: kl, but the store has no last hidden states" in shown and "store.last_hidden=true" in shown
