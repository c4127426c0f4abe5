"""Verify, re-open and clean: what is bad is found and named, what is not ours stays, and memory does not grow."""

import io
import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from helpers_store import make_run, make_shard, publish

from dflash_train import cli, extract, regenerate
from dflash_train.config import ExtractConfig
from dflash_train.records import TargetHead
from dflash_train.store import catalog, local, verify
from dflash_train.store import shard as shards
from dflash_train.store.base import StoreUnavailable
from dflash_train.store.clean import clean_store, store_contents
from dflash_train.store.local import LocalStore
from dflash_train.store.resume import is_complete, missing_shards
from dflash_train.store.slices import ShardPlan
from dflash_train.store.target_files import HEAD, write_target_files
from dflash_train.store.verify import verify_store
from dflash_train.util.errors import UserError

DAY = 24 * 3600


class CountingStore(LocalStore):
    """Counts what is asked of it."""

    def __init__(self, folder):
        super().__init__(folder)
        self.reads, self.lists = [], []

    def get_bytes(self, key):
        self.reads.append(key)
        return super().get_bytes(key)

    def list(self, prefix=""):
        self.lists.append(prefix)
        return super().list(prefix)


def filled(folder: Path, num_shards: int = 3) -> CountingStore:
    store = CountingStore(folder / "store" / "toy")
    for i in range(num_shards):
        publish(store, folder, f"train-{i:05d}", make_shard(seed=i, prefix=f"t{i}-"))
    shards.put_manifest(store, {"layer_ids": [1, 2], "hidden_size": 4, "dtype": "bfloat16", "last_hidden": False,
                                "inputs_hash": "h", "shards": {"train": num_shards, "heldout": 0}}, ())  # fmt: skip
    embedding = torch.randn(20, 4)
    write_target_files(store, TargetHead(embedding, embedding, torch.ones(4), 0.0, 1e-6), {"config.json": b"{}"})
    return store


def flip(store: LocalStore, key: str) -> None:
    content = bytearray(store.get_bytes(key))
    content[-1] ^= 1
    store.put_bytes(key, bytes(content))


def age(store: LocalStore, key: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(store.folder / key, (then, then))


def plans(num_shards: int) -> list[ShardPlan]:
    return [ShardPlan(f"train-{i:05d}", (), ()) for i in range(num_shards)]


# ---------------------------------------------------------------- verify and re-open


def test_bad_shards_lose_their_markers_when_asked_and_the_next_run_redoes_just_those(tmp_path):
    """Trap 33: content that is wrong at the right size, an object that is cut, and one that is gone."""
    store = filled(tmp_path, 5)
    markers = shards.list_markers(store)
    flip(store, markers[1].key)
    store.put_bytes(markers[2].key, b"cut")
    store.delete(markers[4].key)
    looked = verify_store(store, tmp_path)
    assert looked.reopened == [] and len(looked.problems) == 3
    assert len(store.list("markers/")) == 5
    report = verify_store(store, tmp_path, reopen=True)
    assert report.problems == looked.problems
    assert sorted(report.reopened) == ["train-00001", "train-00002", "train-00004"]
    text = "\n".join(report.lines())
    assert "re-opened train-00001" in text and "run extract again to redo them" in text
    assert [plan.shard_id for plan in missing_shards(store, plans(5))] == sorted(report.reopened)
    for i in (1, 2, 4):
        publish(store, tmp_path, f"train-{i:05d}", make_shard(seed=i, prefix=f"t{i}-"))
    assert verify_store(store, tmp_path).problems == [] and shards.list_markers(store) == markers


def other_content(folder: Path, store: LocalStore, number: int) -> str:
    """Publish shard `number` anew with other bytes of the same size; returns its key."""
    return publish(store, folder, f"train-{number:05d}", make_shard(seed=100 + number, prefix=f"t{number}-")).key


@pytest.mark.parametrize("groups", [1, 2])
def test_a_reopened_shard_that_was_redone_is_the_one_that_counts(tmp_path, monkeypatch, groups):
    """A catalogue written before knows a marker of the same length: neither it nor the bad object comes back."""
    monkeypatch.setattr(catalog, "SMALLEST", groups)
    store = filled(tmp_path, 3)
    catalog.tally(store, update_catalog=True)
    bad = shards.list_markers(store)[1]
    flip(store, bad.key)
    report = verify_store(store, tmp_path, reopen=True)
    assert report.reopened == ["train-00001"] and store.size(bad.key) is None
    key = other_content(tmp_path, store, 1)
    assert key != bad.key
    assert [marker.key for marker in shards.list_markers(store)][1] == key
    assert verify_store(store, tmp_path).problems == []


def test_a_lost_object_that_was_redone_is_counted_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "SMALLEST", 1)
    store = filled(tmp_path, 3)
    catalog.tally(store, update_catalog=True)
    store.delete(shards.list_markers(store)[1].key)
    assert [plan.shard_id for plan in missing_shards(store, plans(3))] == ["train-00001"]
    other_content(tmp_path, store, 1)
    assert catalog.tally(store, update_catalog=True).num_shards == 3


def test_an_object_whose_marker_comes_during_the_sweep_stays(tmp_path, monkeypatch):
    store = filled(tmp_path, 3)
    late = shards.list_markers(store)[2]
    content = store.get_bytes("markers/train-00002.json")
    store.delete("markers/train-00002.json")
    mark = lambda store: [] if store.put_bytes("markers/train-00002.json", content) else None
    monkeypatch.setattr(verify, "check_target_files", mark)
    report = verify_store(store, tmp_path)
    assert report.living == [] and report.orphans == [] and store.size(late.key) == late.bytes


def test_a_store_that_stays_away_condemns_no_shard(tmp_path, monkeypatch):
    store = filled(tmp_path, 2)

    def away(key, path):
        raise StoreUnavailable("store", got="ConnectTimeoutError", want="an answer")

    monkeypatch.setattr(store, "get_file", away)
    with pytest.raises(StoreUnavailable):
        verify_store(store, tmp_path, reopen=True)
    assert len(shards.list_markers(store)) == 2


def test_a_marker_that_was_repaired_meanwhile_is_not_removed(tmp_path, monkeypatch):
    store = filled(tmp_path, 1)
    (marker,) = shards.list_markers(store)
    flip(store, marker.key)
    better = asdict(marker) | {"sha256": "0" * 64}

    def repair(*arguments):
        store.put_bytes("markers/train-00000.json", json.dumps(better).encode())
        return ["bad when it was read"]

    monkeypatch.setattr(verify, "shard_problems", repair)
    assert verify_store(store, tmp_path, reopen=True).reopened == []
    assert len(store.list("markers/")) == 1


def test_a_shard_of_other_layers_or_with_a_layer_of_zeros_is_found(tmp_path):
    store = filled(tmp_path, 2)
    for i, change in enumerate((
        lambda s: replace(s, provenance={"layer_ids": [1, 3]}),
        lambda s: (s.hidden[2:5, 4:].zero_(), s)[1],
    )):  # fmt: skip
        store.delete(f"markers/train-0000{i}.json")
        publish(store, tmp_path, f"train-0000{i}", change(make_shard(seed=i, prefix=f"t{i}-")))
    text = "\n".join(verify_store(store, tmp_path).problems)
    assert "layer ids are [1, 3], the manifest says [1, 2]" in text
    assert "3 rows of hidden are all zero in captured layer(s) [1]" in text


def test_progress_is_said_with_rate_and_time_left(tmp_path, monkeypatch, capsys):
    store = filled(tmp_path, 4)
    progress = verify.Progress
    monkeypatch.setattr(verify, "Progress", lambda *arguments: progress(*arguments, every_s=0))
    verify_store(store, tmp_path)
    out = capsys.readouterr().out
    assert "verify 2/4 shards" in out and "shards/s" in out and "ETA" in out


def test_leftovers_older_than_a_day_are_swept_and_younger_ones_stay(tmp_path):
    store = filled(tmp_path)
    keys = ["claims/train-00000-1.json", "claims/train-00001-1.json", "hosts/a-1.json", "hosts/b-2.json"]
    for key in keys:
        store.put_bytes(key, b"{}")
        age(store, key, 2 * DAY if key in (keys[0], keys[2]) else 3600)
    (store.folder / "shards" / ".x.tmp").write_bytes(b"half")
    age(store, "shards/.x.tmp", 2 * DAY)
    report = verify_store(store, tmp_path)
    assert report.stale == [keys[0], keys[2]] and report.unfinished == 1 and report.living == []
    assert [key for prefix in ("claims/", "hosts/") for key, _ in store.list(prefix)] == [keys[1], keys[3]]


def test_while_a_host_extracts_nothing_is_swept_and_that_is_said(tmp_path):
    store = filled(tmp_path)
    (tmp_path / "young").write_bytes(b"x")
    key = "shards/train-00009-0123456789ab.safetensors"
    store.put_file(key, tmp_path / "young")
    store.put_bytes("hosts/alive.json", b"{}")
    report = verify_store(store, tmp_path)
    assert report.living == ["hosts/alive.json"] and report.orphans == [] and store.size(key) == 1
    assert any("somebody extracts" in line for line in report.lines())
    age(store, "hosts/alive.json", 3600)
    assert verify_store(store, tmp_path).orphans == [key] and store.size(key) is None


def test_many_small_shards_are_read_in_parallel_and_few_large_ones_four_at_a_time():
    assert verify._threads([("a", 1000)] * 10) == verify.MAX_THREADS
    assert verify._threads([("a", 1 << 30)] * 10) == 4 and verify._threads([("a", 40 << 30)]) == 4
    assert verify._threads([]) == verify.MAX_THREADS


# ---------------------------------------------------------------- catalogues


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(catalog, "GROUP", 4)
    monkeypatch.setattr(catalog, "SMALLEST", 2)


def marker_reads(store: CountingStore) -> int:
    return sum(key.startswith("markers/") for key in store.reads)


def test_after_an_extraction_nobody_asks_for_markers_one_by_one(tmp_path, small_groups):
    store = filled(tmp_path, 11)
    want = shards.list_markers(store)
    total = catalog.tally(store, update_catalog=True)
    assert (total.num_shards, total.num_samples, total.num_tokens) == (11, 33, 110)
    assert total.bytes == sum(marker.bytes for marker in want)
    assert [key for key, _ in store.list("catalog/")] == [f"catalog/train-0000{i}.jsonl" for i in range(3)]
    store.reads.clear()
    assert shards.list_markers(store) == want and is_complete(store, "h")
    assert missing_shards(store, plans(11)) == []
    assert marker_reads(store) == 0
    assert not is_complete(store, "other")


def test_a_catalogue_does_not_hide_what_happened_after_it_was_written(tmp_path, small_groups):
    """Trap 33, with catalogues: objects cut or gone, markers removed or rewritten."""
    store = filled(tmp_path, 8)
    catalog.tally(store, update_catalog=True)
    markers = shards.list_markers(store)
    store.put_bytes(markers[0].key, b"cut")
    store.delete(markers[1].key)
    store.delete("markers/train-00002.json")
    store.delete("markers/train-00003.json")
    store.delete(markers[3].key)
    publish(store, tmp_path, "train-00003", make_shard(seed=77, prefix="new-", lengths=(4, 4)))
    assert [plan.shard_id for plan in missing_shards(store, plans(8))] == [f"train-0000{i}" for i in range(3)]
    valid, invalid = shards.scan_markers(store)
    assert invalid == [] and valid[0].sample_ids == ["new-0", "new-1"]
    assert not is_complete(store, "h")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"not a marker\n", b'{"shard_id":"train-00000"}\n', b"\xff\xfe\n"])
def test_a_damaged_or_lying_catalogue_changes_nothing(tmp_path, small_groups, content):
    store = filled(tmp_path, 5)
    want = shards.list_markers(store)
    store.put_bytes("catalog/train-00000.jsonl", content)
    assert shards.list_markers(store) == want and verify_store(store, tmp_path).problems == []
    store.reads.clear()
    assert shards.list_markers(store) == want and marker_reads(store) == 1  # verify has written it anew; one is alone


def test_verify_asks_the_store_for_every_marker(tmp_path, small_groups):
    store = filled(tmp_path, 5)
    catalog.tally(store, update_catalog=True)
    store.reads.clear()
    verify_store(store, tmp_path)
    assert marker_reads(store) == 5


def test_a_split_is_listed_alone(tmp_path):
    store = filled(tmp_path, 2)
    publish(store, tmp_path, "heldout-00000", make_shard(prefix="h"))
    store.lists.clear()
    assert len(shards.list_markers(store, "heldout")) == 1
    assert store.lists == ["markers/heldout-", "catalog/heldout-", "shards/heldout-"]


def test_a_folder_is_listed_by_its_prefix_alone(tmp_path):
    store = filled(tmp_path, 2)
    (store.folder / "shards").chmod(0o000)  # would raise if it were read; root reads it all the same
    try:
        assert [key for key, _ in store.list("markers/train-00001")] == ["markers/train-00001.json"]
    finally:
        (store.folder / "shards").chmod(0o755)
    everything = {p.relative_to(store.folder).as_posix() for p in store.folder.rglob("*") if p.is_file()}
    assert {key for key, _ in store.list()} == everything and store.list("nowhere/") == store.list("markers/x") == []


# ---------------------------------------------------------------- clean

FOREIGN = ["notes.txt", "shards/other.bin", "shards/train-00099-0123456789ab.safetensors", "markers/train-00003.json"]


def littered(tmp_path) -> CountingStore:
    store = filled(tmp_path)
    for key in ["claims/train-00001-1.json", "hosts/a.json", "catalog/train-00000.jsonl", *FOREIGN]:
        store.put_bytes(key, b"something")
    store.put_bytes("shards/train-00001-0123456789ab.safetensors", b"another attempt")
    age(store, "hosts/a.json", 3600)
    return store


def test_clean_deletes_what_the_manifest_names_and_leaves_and_names_the_rest(tmp_path, capsys):
    store = littered(tmp_path)
    before = {key: store.get_bytes(key) for key in FOREIGN}
    total = sum(size for key, size in store.list() if key not in FOREIGN)
    asked = []
    assert clean_store(store, ask=lambda text: asked.append(text) or "toy") == 0
    assert {key: store.get_bytes(key) for key, _ in store.list()} == before
    out = capsys.readouterr().out
    assert "type toy to delete" in asked[0] and all(f"stays: {key}" in out for key in FOREIGN)
    assert f"{total / 1000:.1f} KB" in out
    with pytest.raises(UserError, match=r"manifest\.json"):
        clean_store(store, yes=True)


def test_another_answer_deletes_nothing(tmp_path):
    store = littered(tmp_path)
    before = store.list()
    assert clean_store(store, ask=lambda text: "yes") == 1 and store.list() == before


def test_without_a_terminal_it_must_be_said_in_the_command(tmp_path, monkeypatch):
    store = littered(tmp_path)
    before = store.list()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UserError, match=r"extract\.yes=true"):
        clean_store(store)
    assert store.list() == before
    assert clean_store(store, yes=True) == 0 and [key for key, _ in store.list()] == sorted(FOREIGN)


def test_a_store_that_somebody_fills_is_not_cleaned(tmp_path):
    store = littered(tmp_path)
    store.put_bytes("hosts/alive.json", b"{}")
    with pytest.raises(UserError, match="somebody extracts"):
        clean_store(store, yes=True)
    assert len(store_contents(store).own["shards"]) == 4


def test_a_clean_that_was_cut_short_is_typed_again(tmp_path, monkeypatch):
    store = littered(tmp_path)
    with monkeypatch.context() as patch:
        inner = LocalStore.delete

        def fail(self, key):
            if key.startswith("shards/"):
                raise KeyboardInterrupt
            inner(self, key)

        patch.setattr(LocalStore, "delete", fail)
        with pytest.raises(KeyboardInterrupt):
            clean_store(store, yes=True)
    assert [key for key, _ in store.list("markers/")] == ["markers/train-00003.json"]  # no shard looks done any more
    assert store.size("manifest.json") and clean_store(store, yes=True) == 0
    assert [key for key, _ in store.list()] == sorted(FOREIGN)


# ---------------------------------------------------------------- the commands


def test_the_short_spellings_are_those_of_the_extract_stage_alone():
    words = ["verify=true", "reopen=true", "clean=true", "yes=true", "data=demo"]
    full = ["extract.verify=true", "extract.reopen=true", "extract.clean=true", "extract.yes=true", "data=demo"]
    assert cli.rewrite_argv(words, "extract") == full == cli.rewrite_argv(full, "extract")
    assert cli.rewrite_argv(words, "train") == words == cli.rewrite_argv(words)


def test_a_run_is_verified_reopened_redone_and_cleaned_by_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(regenerate, "ensure_answers", lambda run: run.answers_dir)
    run = make_run(tmp_path)
    assert extract.main(run) is None
    store = local.open_store(run.store, run.store_name)
    before = {key: store.get_bytes(key) for key, _ in store.list()}
    key = shards.list_markers(store, "train")[2].key
    flip(store, key)
    verifying = make_run(tmp_path, extract__verify=True, extract__reopen=True)
    assert extract.main(verifying) == 1 and f"BAD {key}" in capsys.readouterr().out
    assert extract.main(make_run(tmp_path)) is None
    assert {key: store.get_bytes(key) for key, _ in store.list()} == before
    (store.folder / "mine.txt").write_text("x")
    assert extract.main(make_run(tmp_path, extract__clean=True, extract__yes=True)) == 0
    assert [key for key, _ in store.list()] == ["mine.txt"] and f"target/{HEAD}" in before


def test_reopen_needs_verify_and_clean_goes_alone():
    with pytest.raises(UserError, match=r"extract\.reopen"):
        ExtractConfig(reopen=True).check()
    with pytest.raises(UserError, match=r"extract\.clean"):
        ExtractConfig(verify=True, clean=True).check()
    ExtractConfig(verify=True, reopen=True).check()
