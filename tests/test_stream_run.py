"""Extraction and training at the same time, as processes: what a stream gives is what a store on disk gives."""

from pathlib import Path

import pytest
import torch
from helpers_stream import extraction, start_extraction
from helpers_train import comparable, flat, one_rank, run_here

from dflash_train import extract, regenerate
from dflash_train.util import provenance

STEPS = {"store.shard_bytes": 1, "train.row_tokens": 96, "train.epochs": 2, "train.eval_every": 10, "train.lr": 1e-2}
STREAM = STEPS | {"store": "stream", "store.max_bytes": 2_000_000, "store.options.wait_s": 120}


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    with one_rank():
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory) -> Path:
    """A training from a store on disk of the same samples."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("disk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regenerate, "ensure_answers", lambda run: run.answers_dir)
        patch.setattr(provenance, "code_version", lambda: "test")
        assert extract.main(extraction(folder, kind="local")) is None
    run_here(folder, **STEPS)
    return folder


def assert_twins(folder: Path, other: Path) -> None:
    """Every loss, rate and held-out figure."""
    got, want = comparable(folder), comparable(other)
    assert len(want) > 20 and [row["step"] for row in got] == [row["step"] for row in want]
    assert flat(got) == pytest.approx(flat(want), rel=1e-6)


def ended(process, folder: Path, timeout_s: float = 90) -> str:
    """What an extraction that must end well has said."""
    assert process.wait(timeout_s) == 0, Path(folder, "extract.log").read_text()
    return Path(folder, "extract.log").read_text()


def test_a_stream_trains_like_a_store_on_disk(tmp_path, on_disk):
    process = start_extraction(tmp_path, workers=2)
    trainer = run_here(tmp_path, **STREAM)
    said = ended(process, tmp_path)
    assert_twins(tmp_path, on_disk)
    made = trainer.given.stream.uses.end + len(trainer.given.shards.heldout)
    assert f"stream: {made} shards made" in said, said
