"""Read order and loader: pure order, exact rows, a cache that checks, a prefetch thread that cannot hang."""

import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers_train import make_store
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.store.loader import Prefetcher, RowReader, ShardCache
from dflash_train.store.order import Row, RowOrder, check_lengths, epoch_plan, limit_markers, rank_share
from dflash_train.store.shard import list_markers, read_shard
from dflash_train.util.errors import UserError
from dflash_train.util.provenance import stable_hash

IDS = lambda lengths: [f"train-{i:05d}" for i in range(len(lengths))]
TRAIN = [[20, 30, 12], [40, 16, 25, 9], [48, 7]]


def order(lengths=TRAIN, **changes) -> RowOrder:
    return RowOrder(IDS(lengths), lengths, **({"seed": 0, "epochs": 3, "row_tokens": 48, "global_batch": 4} | changes))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 100), max_size=12), min_size=1, max_size=20), st.integers(0, 5), st.integers(1, 4)
)
def test_every_sample_comes_exactly_once_an_epoch_and_rows_never_overflow(lengths, epoch, window_shards):
    rows = epoch_plan(IDS(lengths), lengths, seed=1, epoch=epoch, row_tokens=64, window_shards=window_shards)
    seen = [sample for row in rows for sample in row]
    assert sorted(seen) == [(i, j) for i, shard in enumerate(lengths) for j in range(len(shard))]
    assert all(row and sum(min(64, lengths[i][j]) for i, j in row) <= 64 for row in rows)


def test_packing_wastes_little_on_chat_like_lengths():
    lengths = torch.randint(100, 3000, (80, 12), generator=torch.Generator().manual_seed(0)).tolist()
    rows = epoch_plan(IDS(lengths), lengths, seed=0, epoch=0, row_tokens=4096)
    assert sum(map(sum, lengths)) / (4096 * len(rows)) > 0.93


def test_order_depends_on_seed_and_epoch_alone():
    plan = lambda **k: epoch_plan(IDS(TRAIN), TRAIN, **({"seed": 0, "epoch": 0, "row_tokens": 48} | k))
    assert plan() == plan()
    assert plan() != plan(seed=1) and plan() != plan(epoch=1)


def test_a_row_needs_shards_of_two_neighbouring_windows_at_most():
    lengths = [[10, 25, 3, 17, 60, 33]] * 40
    rows = epoch_plan(IDS(lengths), lengths, seed=0, epoch=0, row_tokens=64, window_shards=4)
    shards = sorted(range(40), key=lambda i: stable_hash("shard", 0, 0, f"train-{i:05d}"))
    window = {shard: k // 4 for k, shard in enumerate(shards)}
    spans = [max(window[i] for i, _ in row) - min(window[i] for i, _ in row) for row in rows]
    assert max(spans) == 1 and spans != sorted(spans)


@pytest.mark.parametrize("world_size, micro_batch", [(1, 2), (2, 1), (2, 2), (4, 1), (1, 4)])
def test_ranks_split_each_global_batch_and_all_take_equally_many_steps(world_size, micro_batch):
    """Trap 39: the order of rows is one line, whatever the number of ranks."""
    line = order()
    for step in range(line.total_steps):
        rows = line.step_rows(step)
        shares = [rank_share(rows, rank, world_size, micro_batch) for rank in range(world_size)]
        assert {len(share) for share in shares} == {4 // (world_size * micro_batch)}
        count = lambda rs: Counter((row.epoch, row.samples) for row in rs)
        assert count(row for share in shares for chunk in share for row in chunk) == count(rows)


def test_epochs_follow_each_other_without_a_gap_and_only_the_last_step_is_filled_up():
    line = order(epochs=3)
    rows = [row for step in range(line.total_steps) for row in line.step_rows(step)]
    assert [bool(row.samples) for row in rows] == [True] * line.total_rows + [False] * (len(rows) - line.total_rows)
    assert len(rows) - line.total_rows < 4
    assert any(len({row.epoch for row in line.step_rows(step)}) == 2 for step in range(line.total_steps))
    for epoch in range(3):
        seen = Counter(sample for row in rows if row.epoch == epoch for sample in row.samples)
        assert seen == Counter({(i, j): 1 for i, shard in enumerate(TRAIN) for j in range(len(shard))})


def test_a_fractional_epoch_takes_the_first_rows_of_the_next_plan():
    whole, half = order(epochs=2), order(epochs=1.5)
    assert half.total_rows == len(half._plan(0)) + -(-len(half._plan(1)) // 2)
    assert [half.row(i) for i in range(half.total_rows)] == [whole.row(i) for i in range(half.total_rows)]


def test_a_sample_over_the_row_is_named_or_cut(tmp_path):
    store = make_store(tmp_path, [[20, 60], [30]])
    markers = list_markers(store, "train")
    lengths = limit_markers(markers, None)
    with pytest.raises(UserError, match=r"60 tokens \(train-00000/s1 in train-00000\)"):
        check_lengths(markers, lengths, 48, "error")
    assert check_lengths(markers, lengths, 48, "cut") == 1
    batch = reader(store, tmp_path).read([Row(0, ((0, 1),))])
    assert torch.equal(batch.token_ids[0], read_shard(tmp_path / "cache" / markers[0].key[7:]).token_ids[20:68].long())


def test_limit_takes_the_first_samples_in_shard_order(tmp_path):
    markers = list_markers(make_store(tmp_path, TRAIN), "train")
    assert limit_markers(markers, 4) == [[20, 30, 12], [40], []]
    assert limit_markers(markers, None) == TRAIN
    rows = epoch_plan(IDS(TRAIN), limit_markers(markers, 4), seed=0, epoch=0, row_tokens=48)
    assert sorted(sample for row in rows for sample in row) == [(0, 0), (0, 1), (0, 2), (1, 0)]


# ---------------------------------------------------------------- bytes


def reader(store, folder, max_bytes=10**9, keep_open=32) -> RowReader:
    return RowReader(ShardCache(store, folder / "cache", max_bytes, keep_open), list_markers(store, "train"), 48)


def test_packed_rows_hold_each_document_as_its_shard_has_it(tmp_path):
    store = make_store(tmp_path, TRAIN)
    rows_reader = reader(store, tmp_path)
    rows = [row for step in range(order().total_steps) for row in order().step_rows(step)]
    batch = rows_reader.read(rows)
    assert batch.hidden.dtype == torch.bfloat16 and batch.token_ids.shape == (len(rows), 48)
    for b, row in enumerate(rows):
        assert batch.sample_ids[b] == [f"train-{i:05d}/s{j}" for i, j in row.samples]
        for document, (i, j) in enumerate(row.samples):
            shard = rows_reader.cache.get(rows_reader.markers[i])
            there = slice(int(shard.offsets[j]), int(shard.offsets[j + 1]))
            here = batch.document_ids[b] == document
            assert torch.equal(batch.token_ids[b, here], shard.token_ids[there].long())
            assert torch.equal(batch.loss_mask[b, here], shard.loss_mask[there])
            assert torch.equal(batch.hidden[b, here], shard.hidden[there])
            assert batch.position_ids[b, here].tolist() == list(range(TRAIN[i][j]))
        padding = batch.document_ids[b] == -1
        assert int(padding.sum()) == 48 - sum(TRAIN[i][j] for i, j in row.samples)
        assert not batch.loss_mask[b, padding].any() and not batch.hidden[b, padding].any()


def prefetch(rows_reader, line, start=0, ahead=2) -> list:
    steps = (chunk for step in range(start, line.total_steps) for chunk in rank_share(line.step_rows(step), 0, 1, 2))
    prefetcher = Prefetcher(rows_reader, steps, ahead)
    try:
        return list(prefetcher)
    finally:
        prefetcher.close()
        assert not prefetcher._thread.is_alive()


def test_reading_from_step_k_gives_what_reading_from_the_start_gives_there(tmp_path):
    """Trap 40: the data order after a resume, inside epoch 2."""
    store, line = make_store(tmp_path, TRAIN), order()
    everything = prefetch(reader(store, tmp_path), line)
    assert len(everything) == 2 * line.total_steps
    k = next(s for s in range(line.total_steps) if line.step_rows(s)[0].epoch == 1) + 1
    resumed = prefetch(reader(store, tmp_path), line, k)
    for (rows, batch), (rows_again, again) in zip(everything[2 * k :], resumed, strict=True):
        assert rows == rows_again and torch.equal(batch.hidden, again.hidden)
        assert torch.equal(batch.token_ids, again.token_ids)


def damage(store, kind: str) -> str:
    key = list_markers(store, "train")[1].key
    path = store.folder / key
    data = path.read_bytes()
    if kind == "gone":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    return key


@pytest.mark.parametrize("kind", ["gone", "cut", "flipped"])
def test_a_bad_shard_is_an_error_that_names_its_key(tmp_path, kind):
    """Trap 33: read side."""
    store = make_store(tmp_path, TRAIN)
    rows_reader = reader(store, tmp_path)
    key = damage(store, kind)
    with pytest.raises(UserError, match=key):
        prefetch(rows_reader, order())


class Broken(RowReader):
    """Fails at the n-th read in a way nobody planned."""

    def __init__(self, inner: RowReader, after: int, error: BaseException):
        self.__dict__.update(inner.__dict__)
        self.left, self.error = after, error

    def read(self, rows):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().read(rows)


@pytest.mark.parametrize("error", [ZeroDivisionError("odd"), MemoryError(), KeyboardInterrupt(), SystemExit(3)])
def test_any_failure_of_the_prefetch_thread_reaches_the_loop(tmp_path, error):
    broken = Broken(reader(make_store(tmp_path, TRAIN), tmp_path), 3, error)
    with pytest.raises(type(error)):
        prefetch(broken, order())


def test_closing_ends_a_thread_that_waits_for_room(tmp_path):
    rows_reader, line = reader(make_store(tmp_path, TRAIN), tmp_path), order()
    prefetcher = Prefetcher(rows_reader, (line.step_rows(s) for s in range(line.total_steps)), ahead=1)
    next(iter(prefetcher))
    deadline = time.monotonic() + 20
    while prefetcher._queue.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    prefetcher.close()
    assert not prefetcher._thread.is_alive()


def test_the_cache_stays_below_its_limit_and_still_gives_every_row(tmp_path):
    store, line = make_store(tmp_path, TRAIN), order()
    largest = max(marker.bytes for marker in list_markers(store, "train"))
    small = reader(store, tmp_path, max_bytes=largest, keep_open=1)
    rows = [row for step in range(line.total_steps) for row in line.step_rows(step)]
    got = small.read(rows)
    assert sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.safetensors")) <= largest
    assert torch.equal(got.hidden, reader(store, tmp_path / "other").read(rows).hidden)


def test_readers_that_share_a_cache_folder_do_not_disturb_each_other(tmp_path):
    store, line = make_store(tmp_path, TRAIN), order()
    rows = [row for step in range(line.total_steps) for row in line.step_rows(step)]
    want = reader(store, tmp_path / "other").read(rows)
    results = {}
    work = lambda n: results.update({n: reader(store, tmp_path, max_bytes=1, keep_open=1).read(rows)})
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(torch.equal(batch.hidden, want.hidden) for batch in results.values())


def test_a_marker_that_names_other_samples_than_its_object_is_refused(tmp_path):
    store = make_store(tmp_path, TRAIN)
    marker = list_markers(store, "train")[0]
    foreign = replace(marker, sample_ids=["x", "y", "z"])
    with pytest.raises(UserError, match="other samples"):
        ShardCache(store, tmp_path / "cache", 10**9).get(foreign)
