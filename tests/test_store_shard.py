"""Shard files and the marker protocol, on a folder store."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from helpers_store import FlakyStore, make_shard, publish
from safetensors import safe_open

from dflash_train.records import TargetHead
from dflash_train.store import shard as shards
from dflash_train.store import target_files
from dflash_train.store.base import StoreUnavailable
from dflash_train.store.local import LocalStore
from dflash_train.store.resume import missing_shards
from dflash_train.store.slices import ShardPlan
from dflash_train.store.verify import verify_store
from dflash_train.util.errors import UserError


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "store")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("last_hidden", [None, 4])
def test_a_shard_reads_back_as_it_was_written(tmp_path, dtype, last_hidden):
    shard = make_shard(dtype=dtype, last_hidden=last_hidden)
    shards.write_shard(tmp_path / "a.safetensors", shard)
    back = shards.read_shard(tmp_path / "a.safetensors")
    assert back.sample_ids == shard.sample_ids and back.provenance == shard.provenance
    for name in ("token_ids", "loss_mask", "offsets", "hidden"):
        assert torch.equal(getattr(back, name), getattr(shard, name)), name
    assert (back.last_hidden is None) == (last_hidden is None)
    assert last_hidden is None or torch.equal(back.last_hidden, shard.last_hidden)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as f:
        dtypes = {name: f.get_slice(name).get_dtype() for name in ("token_ids", "loss_mask", "offsets")}
    assert dtypes == {"token_ids": "I32", "loss_mask": "U8", "offsets": "I64"}


def test_equal_shards_give_equal_bytes_in_every_process(tmp_path):
    code = (
        "import sys; sys.path.insert(0, 'tests'); from helpers_store import make_shard;"
        "from dflash_train.store.shard import write_shard; write_shard(sys.argv[1], make_shard(last_hidden=4))"
    )
    contents = set()
    for i in range(2):
        path = tmp_path / f"{i}.safetensors"
        subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=Path(__file__).parents[1],
                       env={**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"})  # fmt: skip
        contents.add(path.read_bytes())
    assert len(contents) == 1


BROKEN = {
    "offsets that do not rise": lambda s: replace(s, offsets=torch.tensor([0, 5, 3, 10])),
    "offsets that end early": lambda s: replace(s, offsets=torch.tensor([0, 3, 8, 9])),
    "a missing offset": lambda s: replace(s, offsets=torch.tensor([0, 3, 10])),
    "too few mask rows": lambda s: replace(s, loss_mask=s.loss_mask[:-1]),
    "too many hidden rows": lambda s: replace(s, hidden=torch.cat([s.hidden, s.hidden])),
    "one-dimensional rows": lambda s: replace(s, hidden=s.hidden[:, 0]),
    "half-precision rows": lambda s: replace(s, hidden=s.hidden.half()),
    "a sample twice": lambda s: replace(s, sample_ids=["s0", "s1", "s0"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_inconsistent_shard_is_neither_written_nor_read(tmp_path, name, monkeypatch):
    broken = BROKEN[name](make_shard())
    path = tmp_path / "a.safetensors"
    with pytest.raises(UserError, match=r"a\.safetensors"):
        shards.write_shard(path, broken)
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(shards, "check_shard", lambda shard, name: None)
        shards.write_shard(path, broken)
    with pytest.raises(UserError, match="shards/key"):
        shards.read_shard(path, "shards/key")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["hidden", "last_hidden"])
def test_a_row_that_is_not_finite_never_reaches_disk_and_its_sample_is_named(tmp_path, bad, field):
    shard = make_shard(last_hidden=4)
    getattr(shard, field)[4, 1] = bad  # row 4 belongs to s1 (rows 3..7)
    with pytest.raises(UserError, match=rf"1 rows of {field} with NaN or Inf, samples \['s1'\]"):
        shards.write_shard(tmp_path / "a.safetensors", shard)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_finite_and_non_finite_bits_are_told_apart_as_isfinite_does(dtype):
    if dtype == torch.bfloat16:
        values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)  # every bit pattern
    else:
        edge = [0, 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF]
        values = torch.tensor([*edge, *[bits - (1 << 31) for bits in edge]], dtype=torch.int32).view(dtype)
    for value in values[:: 1 if dtype == torch.float32 else 7]:
        assert (shards.non_finite_rows(value.view(1, 1)) == []) == bool(torch.isfinite(value)), value
    rows = torch.zeros(5, 8, dtype=dtype)
    rows[3, 2], rows[1, 7] = float("-inf"), float("nan")
    assert shards.non_finite_rows(rows) == [1, 3] and shards.non_finite_rows(rows[:, :2]) == []


@pytest.mark.parametrize("size", [0, 50, -1])
def test_a_truncated_file_is_named_not_read(tmp_path, size):
    """Trap 33: objects cut to 0, 50 and size-1 bytes."""
    path = tmp_path / "a.safetensors"
    shards.write_shard(path, make_shard())
    content = path.read_bytes()
    path.write_bytes(content[:size])
    with pytest.raises(UserError, match="shards/train-00000-x"):
        shards.read_shard(path, "shards/train-00000-x")


@pytest.mark.parametrize("size", [0, 50, -1, None])
def test_a_marker_whose_object_is_cut_or_gone_is_redone(tmp_path, store, size):
    """Trap 33: a marker without good data names its object, and the shard is done again."""
    good = publish(store, tmp_path, "train-00000", make_shard())
    bad = publish(store, tmp_path, "train-00001", make_shard(seed=1, prefix="t"))
    path = store.folder / bad.key
    content = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(content[:size])
    with pytest.raises(UserError, match=r"markers/train-00001\.json"):
        shards.list_markers(store)
    plans = [ShardPlan(m.shard_id, tuple(m.sample_ids), tuple(m.lengths)) for m in (good, bad)]
    assert missing_shards(store, plans) == plans[1:]
    again = publish(store, tmp_path, "train-00001", make_shard(seed=1, prefix="t"))
    assert again == bad and shards.list_markers(store) == [good, bad]
    assert missing_shards(store, plans) == []


def test_an_object_of_the_right_size_and_wrong_content_is_refused_on_fetch_and_found_by_verify(tmp_path, store):
    marker = publish(store, tmp_path, "train-00000", make_shard())
    path = store.folder / marker.key
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert shards.list_markers(store) == [marker]  # the listing reads no content
    with pytest.raises(UserError, match=marker.key):
        shards.fetch_shard(store, marker, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_fetch_downloads_once_and_again_when_the_cached_file_was_cut(tmp_path, store):
    marker = publish(store, tmp_path, "train-00000", make_shard())
    path = shards.fetch_shard(store, marker, tmp_path / "cache")
    assert path.name == Path(marker.key).name
    inode = path.stat().st_ino
    assert shards.fetch_shard(store, marker, tmp_path / "cache").stat().st_ino == inode
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:100])
    assert shards.fetch_shard(store, marker, tmp_path / "cache").read_bytes() == content


def test_the_first_of_two_workers_wins_and_the_other_leaves_no_object(tmp_path, store):
    """Trap 35: two workers make the same shard; the set has it once."""
    first = publish(store, tmp_path, "train-00000", make_shard(seed=0))
    second = publish(store, tmp_path, "train-00000", make_shard(seed=1))
    same = publish(store, tmp_path, "train-00000", make_shard(seed=0))
    assert first == second == same
    assert [key for key, _ in store.list("shards/")] == [first.key]


def test_of_many_threads_putting_the_same_marker_exactly_one_wins(store):
    barrier, wins = threading.Barrier(8), []

    def put(i):
        barrier.wait()
        if store.put_bytes("markers/x.json", b"%d" % i * 1000, if_absent=True):
            wins.append(i)

    threads = [threading.Thread(target=put, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(wins) == 1 and store.get_bytes("markers/x.json") == b"%d" % wins[0] * 1000
    assert store.list() == [("markers/x.json", 1000)]


def test_a_failing_put_leaves_neither_object_nor_marker(tmp_path):
    """Trap 33: failing PUT."""
    store = FlakyStore(tmp_path / "store", failures=1)
    with pytest.raises(StoreUnavailable):
        publish(store, tmp_path, "train-00000", make_shard())
    assert store.list() == []
    assert publish(store, tmp_path, "train-00000", make_shard()) == shards.list_markers(store)[0]


def test_a_kill_between_write_and_rename_leaves_no_object(tmp_path, store, monkeypatch):
    """Trap 33: what was written before the kill is no object, and is swept once it is old."""

    class Killed(BaseException):
        pass

    def kill(*args):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # a killed process cleans nothing up
        shards_folder = store.folder / "shards"
        source = tmp_path / "a"
        source.write_bytes(b"x" * 100)
        with pytest.raises(Killed):
            store.put_file("shards/train-00000-abc", source)
    assert len(list(shards_folder.iterdir())) == 1
    assert store.list() == [] and store.size("shards/train-00000-abc") is None
    assert store.drop_unfinished(3600) == 0 and store.drop_unfinished(0) == 1
    assert list(shards_folder.iterdir()) == []


@pytest.mark.parametrize("change", [
    {"shard_id": "train-00001"}, {"key": "../../etc/passwd"}, {"key": "shards/../x-0123456789ab.safetensors"},
    {"num_tokens": 3}, {"lengths": [1]}, {"sha256": None},
])  # fmt: skip
def test_a_marker_that_lies_is_not_believed(tmp_path, store, change):
    marker = publish(store, tmp_path, "train-00000", make_shard())
    row = asdict(marker) | change
    row = {key: value for key, value in row.items() if value is not None}
    store.put_bytes("markers/train-00000.json", json.dumps(row).encode())
    valid, invalid = shards.scan_markers(store)
    assert valid == [] and [m.key for m in invalid] == ["markers/train-00000.json"]


def test_markers_come_sorted_and_by_split(tmp_path, store):
    for i in (2, 0, 1):
        publish(store, tmp_path, f"train-{i:05d}", make_shard(seed=i, prefix=f"t{i}-"))
    publish(store, tmp_path, "heldout-00000", make_shard(prefix="h"))
    assert [m.shard_id for m in shards.list_markers(store, "train")] == ["train-00000", "train-00001", "train-00002"]
    assert [m.shard_id for m in shards.list_markers(store, "heldout")] == ["heldout-00000"]
    assert len(shards.list_markers(store)) == 4
    facts = shards.list_markers(store, "heldout")[0]
    assert (facts.lengths, facts.num_tokens, facts.num_supervised) == ([3, 5, 2], 10, 2 + 3 + 1)


def test_a_second_run_must_agree_with_the_manifest(store):
    manifest = {"target": {"fingerprint": "aaa", "config": {}}, "layer_ids": [1, 2], "dtype": "bfloat16"}
    agree = ("target.fingerprint", "layer_ids", "dtype")
    assert shards.put_manifest(store, manifest, agree) == manifest
    assert shards.put_manifest(store, manifest | {"note": "newer code"}, agree) == manifest
    with pytest.raises(UserError, match=r"manifest.json: target.fingerprint(.|\n)*bbb(.|\n)*aaa"):
        shards.put_manifest(store, manifest | {"target": {"fingerprint": "bbb"}}, agree)
    with pytest.raises(UserError, match="layer_ids"):
        shards.put_manifest(store, manifest | {"layer_ids": [1, 3]}, agree)


def test_an_empty_store_is_named(store):
    with pytest.raises(UserError, match=r"manifest\.json"):
        shards.read_manifest(store)
    with pytest.raises(UserError, match=r"files\.json"):
        shards.read_target_head(store)


# ---------------------------------------------------------------- target files


def make_head(tied: bool) -> TargetHead:
    embedding = torch.randn(20, 8).bfloat16()
    return TargetHead(embedding, embedding if tied else torch.randn(20, 8).bfloat16(), torch.rand(8) + 0.5, 1.0, 1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_the_targets_head_comes_back_bit_equal_and_tied_where_it_was(tmp_path, store, tied, cached):
    head = make_head(tied)
    assert not target_files.has_target_files(store)
    shards.write_target_files(store, head, {"config.json": b'{"model_type": "qwen3"}'}, tmp_path)
    assert target_files.has_target_files(store)
    back = shards.read_target_head(store, tmp_path / "cache" if cached else None)
    for name in ("embedding", "head", "final_norm"):
        assert torch.equal(getattr(back, name), getattr(head, name)), name
    assert (back.head is back.embedding) == tied
    assert (back.final_norm_offset, back.final_norm_eps) == (1.0, 1e-5)
    assert target_files.read_target_config(store) == {"model_type": "qwen3"}
    folder = target_files.fetch_target_files(store, tmp_path / "small")
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_changed_head_is_refused(tmp_path, store):
    shards.write_target_files(store, make_head(True), {}, tmp_path)
    path = store.folder / "target" / target_files.HEAD
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="target_head"):
        shards.read_target_head(store)
    path.write_bytes(content[:-1])
    assert not target_files.has_target_files(store)


# ---------------------------------------------------------------- verify


def filled(tmp_path, store):
    markers = [publish(store, tmp_path, f"train-{i:05d}", make_shard(seed=i, prefix=f"t{i}-")) for i in range(3)]
    shards.put_manifest(store, {"layer_ids": [1, 2], "hidden_size": 4, "dtype": "bfloat16", "last_hidden": False,
                                "shards": {"train": 3, "heldout": 0}}, ())  # fmt: skip
    shards.write_target_files(store, make_head(True), {"config.json": b"{}"}, tmp_path)
    return markers


def test_verify_finds_nothing_in_a_good_store_and_sweeps_orphans(tmp_path, store):
    markers = filled(tmp_path, store)
    (tmp_path / "orphan").write_bytes(b"x")
    store.put_file("shards/train-00000-0123456789ab.safetensors", tmp_path / "orphan")
    report = verify_store(store, tmp_path)
    assert report.problems == [] and report.orphans == ["shards/train-00000-0123456789ab.safetensors"]
    assert (report.num_shards, report.num_samples, report.num_tokens) == (3, 9, 30)
    assert sorted(key for key, _ in store.list("shards/")) == sorted(m.key for m in markers)


def test_verify_names_every_bad_shard(tmp_path, store):
    markers = filled(tmp_path, store)
    changed = bytearray((store.folder / markers[0].key).read_bytes())
    changed[-1] ^= 1
    (store.folder / markers[0].key).write_bytes(changed)
    (store.folder / markers[1].key).write_bytes(b"short")
    store.delete("markers/train-00002.json")
    zeros = make_shard(seed=2, prefix="t2-")
    zeros.hidden[3] = 0
    zero = publish(store, tmp_path, "train-00002", zeros)
    text = "\n".join(verify_store(store, tmp_path).problems)
    assert f"{markers[0].key}: " in text and "sha256" in text
    assert f"{markers[1].key} is 5 bytes" in text
    assert f"{zero.key}: 1 rows of hidden are all zero" in text


def test_verify_compares_content_with_marker_and_manifest(tmp_path, store):
    (marker, *_) = filled(tmp_path, store)
    row = asdict(marker) | {"num_supervised": 99}
    store.put_bytes("markers/train-00000.json", json.dumps(row).encode())
    manifest = shards.read_manifest(store) | {"hidden_size": 8, "shards": {"train": 5, "heldout": 0}}
    store.put_bytes("manifest.json", json.dumps(manifest).encode())
    text = "\n".join(verify_store(store, tmp_path).problems)
    assert "num_supervised differ" in text and "(8, 'bfloat16', False), the manifest says (16," in text
    assert "2 of 5 shards have no marker: train-00003, train-00004" in text


def test_a_sample_in_two_shards_is_reported(tmp_path, store):
    filled(tmp_path, store)
    store.delete("markers/train-00002.json")
    publish(store, tmp_path, "train-00002", make_shard(seed=5, prefix="t0-"))
    assert "sample t0-0: in 2 shards" in verify_store(store, tmp_path).problems
