"""Extraction with two processes a worker, end to end on a folder store: the same set, rows equal up to rounding."""

import contextlib
import threading
from pathlib import Path

import psutil
import pytest
import torch
from helpers_store import make_run

from dflash_train import extract, regenerate
from dflash_train.store import local
from dflash_train.store.shard import fetch_shard, list_markers, read_shard, read_target_head
from dflash_train.target import tiny
from dflash_train.target.tensor_parallel import PEER_MODULE
from dflash_train.util import provenance
from dflash_train.util.errors import UserError


@pytest.fixture(autouse=True)
def answered(monkeypatch):
    monkeypatch.setattr(provenance, "code_version", lambda: "test")
    monkeypatch.setattr(regenerate, "ensure_answers", lambda run: run.answers_dir)


def hybrid_run(folder: Path, ways: int, **changes):
    run = make_run(folder, extract__gpus_per_worker=ways, target__options={"arch": "qwen3_5"},
                   data__num_processes=1, **changes)  # fmt: skip
    run.check()
    return run


def shards_of(run, cache: Path) -> dict:
    store = local.open_store(run.store, run.store_name)
    return {marker.shard_id: read_shard(fetch_shard(store, marker, cache)) for marker in list_markers(store)}


def same_rows(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Cosine 1 to 1e-8 and no element off by more than 1e-3 of its row's length."""
    got, want = got.double(), want.double()
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1)
    return bool((1 - cosine).max() < 1e-8) and bool(((got - want).abs() / want.norm(dim=-1, keepdim=True)).max() < 1e-3)


def test_two_processes_a_worker_make_the_store_that_one_makes(tmp_path):
    """ids, masks, offsets and order to the byte; hidden and last hidden rows up to rounding; the same head."""
    runs = [hybrid_run(tmp_path / str(n), n, store__last_hidden=True, store__shard_bytes=10**5) for n in (1, 2)]
    for run in runs:
        assert extract.main(run) is None
    one, two = (shards_of(run, tmp_path / "cache" / str(i)) for i, run in enumerate(runs))
    assert one.keys() == two.keys() and len(one) >= 2
    for shard_id, want in one.items():
        got = two[shard_id]
        assert got.sample_ids == want.sample_ids and torch.equal(got.offsets, want.offsets)
        assert torch.equal(got.token_ids, want.token_ids) and torch.equal(got.loss_mask, want.loss_mask)
        for layer in range(2):
            part = slice(64 * layer, 64 * (layer + 1))
            assert same_rows(got.hidden[:, part], want.hidden[:, part])
        assert same_rows(got.last_hidden, want.last_hidden)
        assert not same_rows(got.hidden[:, :64], want.hidden[:, 64:128])  # control
    heads = [read_target_head(local.open_store(run.store, run.store_name), tmp_path / "head") for run in runs]
    assert torch.equal(heads[0].embedding, heads[1].embedding) and torch.equal(heads[0].final_norm, heads[1].final_norm)


@pytest.mark.slow
def test_a_worker_whose_peer_is_killed_is_replaced_and_the_set_is_complete(tmp_path):
    """The supervisor sees one worker, whatever it consists of; nothing is left running."""
    run, killed, over = hybrid_run(tmp_path, 2, extract__num_workers=1), [], threading.Event()

    def peers() -> list[psutil.Process]:
        below = psutil.Process().children(recursive=True)
        return [child for child in below if child.cmdline()[-1:] == [PEER_MODULE]]

    def kill_the_first() -> None:
        while not over.wait(0.05) and not killed:
            with contextlib.suppress(psutil.Error):
                for peer in peers()[:1]:
                    peer.kill()
                    killed.append(peer.pid)

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    try:
        assert extract.main(run) is None
    finally:
        over.set()
        killer.join()
    seen = [sample_id for shard in shards_of(run, tmp_path / "cache").values() for sample_id in shard.sample_ids]
    assert len(killed) == 1 and len(seen) == len(set(seen)) == 10
    assert not peers()


def test_a_target_that_cannot_be_split_is_refused_before_its_weights_are_loaded(tmp_path, monkeypatch):
    """Four ways, two KV heads; and a mixture, by name."""
    monkeypatch.setattr(tiny, "load", None)
    with pytest.raises(UserError, match="num_key_value_heads=2"):
        extract.main(hybrid_run(tmp_path / "four", 4))
    mixture = make_run(tmp_path / "moe", extract__gpus_per_worker=2, target__options={"arch": "qwen3_5_moe"})
    with pytest.raises(UserError, match="qwen3_5_moe_text"):
        extract.main(mixture)


def test_gpus_are_handed_out_in_groups(tmp_path, monkeypatch):
    """Five GPUs in pairs are two workers; what does not fit is refused by the key to change."""
    monkeypatch.setattr(extract, "gpus_at_hand", lambda: [None] * 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    run = make_run(tmp_path, extract__gpus_per_worker=2)
    run.hardware.device = "auto"
    assert extract.choose_workers(run, 100) == (["3,4", "5,6"], 2)
    assert extract.choose_workers(run, 1)[1] == 1
    for key, value in (("gpus_per_worker", 8), ("num_workers", 0), ("num_workers", 3)):
        run.extract.gpus_per_worker, run.extract.num_workers = 2, None
        setattr(run.extract, key, value)
        with pytest.raises(UserError, match=key):
            extract.choose_workers(run, 100)
