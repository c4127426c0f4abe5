"""Which sample goes where, and how many bytes that takes."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.config import StoreConfig
from dflash_train.records import Features
from dflash_train.store import budget
from dflash_train.store.gather import RowBuffer, gather_rows
from dflash_train.store.local import LocalStore
from dflash_train.store.slices import plan_batches, plan_hash, plan_shards
from dflash_train.util.errors import UserError

OPTIONS = {"seed": 3, "window_samples": 8, "shard_tokens": 60}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=60), st.integers(0, 5))
def test_every_sample_is_in_exactly_one_shard_and_shards_are_within_their_size(lengths, seed):
    samples = {f"id{i}": n for i, n in enumerate(lengths)}
    shards = plan_shards("train", samples, **OPTIONS | {"seed": seed})
    assert sorted(i for shard in shards for i in shard.sample_ids) == sorted(samples)
    for number, shard in enumerate(shards):
        assert shard.shard_id == f"train-{number:05d}"
        assert shard.lengths == tuple(samples[i] for i in shard.sample_ids)
        assert shard.num_tokens <= 60 or len(shard.sample_ids) == 1


def test_the_plan_does_not_depend_on_the_order_in_which_samples_come():
    """Trap 35: which worker plans, and in which order it read the samples, does not matter."""
    samples = {f"id{i}": 5 + i % 17 for i in range(100)}
    items = list(samples.items())
    random.Random(1).shuffle(items)
    assert plan_shards("train", dict(items), **OPTIONS) == plan_shards("train", samples, **OPTIONS)


def test_another_seed_gives_another_plan():
    samples = {f"id{i}": 5 + i % 17 for i in range(100)}
    assert plan_shards("train", samples, **OPTIONS) != plan_shards("train", samples, **OPTIONS | {"seed": 4})


def test_bucketing_pads_less_and_windows_keep_lengths_mixed_over_the_store():
    rng = random.Random(0)
    samples = {f"id{i}": rng.randint(1, 1000) for i in range(512)}
    padded = {}
    for window in (1, 128):
        shards = plan_shards("train", samples, seed=0, window_samples=window, shard_tokens=8_000)
        batches = [shard.lengths[batch] for shard in shards for batch in plan_batches(shard.lengths, 2_000)]
        padded[window] = sum(max(batch) * len(batch) for batch in batches)
    assert padded[128] < 1.1 * sum(samples.values()) < padded[1]
    means = [sum(shard.lengths) / len(shard.lengths) for shard in shards]
    first = means[: len(means) // 4]  # the first window has short and long ones
    assert max(first) > 600 > 400 > min(first)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=60))
def test_batches_cover_the_shard_in_order_within_the_padded_budget(lengths):
    lengths = tuple(sorted(lengths))
    batches = plan_batches(lengths, 128)
    assert [i for batch in batches for i in range(batch.start, batch.stop)] == list(range(len(lengths)))
    assert all(max(lengths[batch]) * len(lengths[batch]) <= 128 for batch in batches)


def test_the_plan_hash_follows_content_and_order():
    shards = plan_shards("train", {"a": 5, "b": 6}, **OPTIONS)
    hashes = {"a": "1", "b": "2"}
    assert plan_hash(shards, hashes) == plan_hash(shards, dict(hashes))
    assert len({plan_hash(shards, hashes), plan_hash(shards, {"a": "1", "b": "3"}), plan_hash([], hashes)}) == 3


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("last_hidden", [False, True])
def test_gathered_rows_equal_a_loop_over_samples_and_padding_is_left_out(last_hidden):
    hidden, last = torch.randn(3, 7, 8), torch.randn(3, 7, 4)
    lengths = torch.tensor([7, 2, 5])
    for b in range(3):
        hidden[b, lengths[b] :] = last[b, lengths[b] :] = float("nan")
    rows = gather_rows(Features(hidden, last if last_hidden else None), lengths, torch.float32)
    naive = []
    for b, n in enumerate(lengths.tolist()):
        for t in range(n):
            naive.append(torch.cat([hidden[b, t], last[b, t]]) if last_hidden else hidden[b, t])
    assert torch.equal(rows, torch.stack(naive))
    assert gather_rows(Features(hidden), lengths, torch.bfloat16).dtype == torch.bfloat16


def test_a_row_buffer_holds_the_batches_in_order_and_is_used_again():
    buffer = RowBuffer(10, 4, torch.float32, torch.device("cpu"))
    first, second = torch.randn(3, 4), torch.randn(5, 4)
    buffer.put(first)
    buffer.put(second)
    assert torch.equal(buffer.rows(), torch.cat([first, second]))
    memory = buffer.memory.data_ptr()
    buffer.clear()
    buffer.put(second)
    assert torch.equal(buffer.rows(), second) and buffer.rows().data_ptr() == memory


@pytest.mark.gpu
def test_two_hundred_batches_arrive_whole_with_one_copy_each():
    """Trap 8: checksums of 200 batches behind a slow reader; exactly one device-to-host copy a batch."""
    from torch.profiler import ProfilerActivity, profile

    device = torch.device("cuda")
    buffers = [RowBuffer(20 * 4096, 1024, torch.bfloat16, device) for _ in range(2)]
    sums, got = [], []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for shard in range(10):
            buffer = buffers[shard % 2]
            buffer.clear()
            for _ in range(20):
                rows = torch.randint(-99, 99, (4096, 1024), device=device).to(torch.bfloat16)
                sums.append(rows.long().sum())
                buffer.put(rows)
                del rows  # the allocator may hand its memory out again at once
            got += [part.long().sum() for part in buffer.rows().split(4096)]
    copies = [e for e in profiler.events() if "Memcpy DtoH" in e.name and "Pinned" in e.name]
    assert torch.stack(sums).cpu().tolist() == torch.stack(got).tolist()
    assert len(copies) == 200


# ---------------------------------------------------------------- bytes


def test_the_storage_of_a_million_samples_is_said_in_words():
    """Trap 44: hidden 4096 x 5 layers x 914,000 samples x 1,000 tokens is 40.96 MB a sample and 37.4 TB."""
    line = budget.storage_line(4096, 5, StoreConfig(kind="local", root="x"), 914_000, 914_000_000)
    for part in ("hidden 4096 x 5 layers x bfloat16 = 40.96 KB a token", "40.96 MB a sample", "37.4 TB"):
        assert part in line
    stored = StoreConfig(kind="local", root="x", last_hidden=True, dtype="float32")
    assert budget.row_bytes(4096, 5, stored) == 6 * 4096 * 4


def test_the_default_limit_is_four_fifths_of_the_free_disk_and_counts_what_is_there(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    monkeypatch.setattr(store, "free_bytes", lambda: 1000)
    config = StoreConfig(kind="local", root=str(tmp_path))
    assert budget.max_bytes(config, store, 500)[0] == 1200
    config.max_bytes = 7
    assert budget.max_bytes(config, store, 500) == (7, "store.max_bytes")
    config.max_bytes = None
    monkeypatch.setattr(store, "free_bytes", lambda: None)
    assert budget.max_bytes(config, store, 0)[0] == 10**12


def test_too_many_bytes_are_refused_with_every_way_out():
    budget.refuse_too_much(10, (10, "store.max_bytes"))
    with pytest.raises(UserError) as error:
        budget.refuse_too_much(37_400_000_000_000, (10**12, "the default of store.max_bytes on S3"))
    for word in ("37.4 TB", "1.0 TB", "extract.num_taps", "limit=N", "store.root", "store.max_bytes=37400000000000"):
        assert word in str(error.value)
