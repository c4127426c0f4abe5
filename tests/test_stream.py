"""A stream without models: rows as from a disk, a ring that never holds more than it may, sides that come and go."""

import threading
import time

import pytest
from helpers_stream import (
    ORDER,
    Maker,
    Reader,
    assert_same,
    lengths_of,
    local_batches,
    make,
    order_of,
    plan_of,
    stream_store,
)

from dflash_train.store import stream as stream_module
from dflash_train.store.order import WINDOW_SHARDS
from dflash_train.store.stream import READER, WRITER, Beat, OtherSideAway, Peer, StopAsked
from dflash_train.store.stream_line import Line, Uses, least_bytes
from dflash_train.store.stream_reader import plan_stream
from dflash_train.store.stream_writer import Ring
from dflash_train.util.errors import UserError

MANY = lengths_of(2 * WINDOW_SHARDS + 9)


def need_of(shards, order) -> int:
    return Uses(order, Line(shards, ORDER["seed"]), order.total_steps).need_bytes


# ---------------------------------------------------------------- the line


@pytest.mark.parametrize("epochs", [1, 2, 1.4])
def test_a_place_is_needed_from_the_first_step_that_uses_it_to_the_last(epochs):
    shards = plan_of(lengths_of(2 * WINDOW_SHARDS + 3))
    order, line = order_of(shards, epochs), Line(shards, ORDER["seed"])
    uses = Uses(order, line, order.total_steps)
    used = [{line.place(row.epoch, i) for row in order.step_rows(step) for i, _ in row.samples}
            for step in range(order.total_steps)]  # fmt: skip
    for step in range(order.total_steps):
        assert uses.first_needed(step) == min(min(places) for places in used[step:])
        for i, _ in order.row(step * ORDER["global_batch"]).samples:
            assert line.at(line.place(0, i)) is shards[i]
    assert uses.end == max(max(places) for places in used) + 1
    size = lambda start, stop: sum(line.at(place).num_bytes for place in range(start, stop))
    spans = [size(uses.first_needed(max(0, s - 1)), max(map(max, used[: s + 1])) + 1) for s in range(order.total_steps)]
    assert uses.need_bytes == max(spans) >= least_bytes(shards)


def test_a_files_bytes_are_known_before_it_is_made(tmp_path):
    for shard in plan_of(MANY[:5]):
        path, _ = make(shard, tmp_path)
        assert shard.num_bytes - 2500 < path.stat().st_size <= shard.num_bytes


# ---------------------------------------------------------------- both sides at once


@pytest.mark.parametrize("epochs, share", [(1, 1), (2, 1), (1.5, 1.3), (2, 100)])
def test_rows_are_those_of_a_store_on_disk_and_the_ring_keeps_its_limit(tmp_path, epochs, share):
    """share 1: the smallest ring that training accepts; 100: one that holds the whole line."""
    shards = plan_of(MANY)
    order = order_of(shards, epochs)
    store = stream_store(tmp_path, int(share * need_of(shards, order)))
    maker = Maker(store, shards)
    wait_for(lambda: store.size(WRITER))
    reader = Reader(store, order, order.total_steps)
    got = reader.steps()
    reader.close()
    maker.join(10)
    assert maker.problem is None and not maker.is_alive() and not store.ring_files()
    assert 0 < maker.peak_bytes <= maker.ring.peak_bytes <= store.max_bytes
    assert maker.ring.made == reader.feed.stream.uses.end
    assert_same(got, local_batches(tmp_path, shards, order, order.total_steps))


def test_a_set_smaller_than_a_window_goes_round_for_many_epochs(tmp_path):
    shards = plan_of(lengths_of(3))
    order = order_of(shards, 7)
    store = stream_store(tmp_path, need_of(shards, order))
    maker = Maker(store, shards)
    wait_for(lambda: store.size(WRITER))
    reader = Reader(store, order, order.total_steps)
    assert_same(reader.steps(), local_batches(tmp_path, shards, order, order.total_steps))
    reader.close()
    maker.join(10)
    assert maker.problem is None and maker.ring.made == 3 * 7


def test_a_slow_trainer_pauses_extraction_and_a_slow_extraction_is_waited_for(tmp_path):
    shards = plan_of(MANY)
    order = order_of(shards, 2)
    for name, making_s, training_s in (("slow-trainer", 0.0, 0.1), ("slow-extraction", 0.02, 0.0)):
        store = stream_store(tmp_path / name, need_of(shards, order))
        maker = Maker(store, shards, pause_s=making_s)
        wait_for(lambda store=store: store.size(WRITER))
        reader = Reader(store, order, order.total_steps)
        reader.steps(pause_s=training_s)
        reader.close()
        maker.join(10)
        if name == "slow-trainer":
            assert maker.ring.paused_s > 0.5 and f"paused {maker.ring.paused_share:.0%}" in maker.ring.summary()
        else:
            assert reader.feed.cache.waited_s > 0.5


# ---------------------------------------------------------------- one side ends, and comes back


def test_a_trainer_that_is_killed_goes_on_from_an_older_step_whose_shards_are_made_again(tmp_path):
    shards = plan_of(MANY)
    order = order_of(shards, 2)
    store = stream_store(tmp_path, need_of(shards, order))
    maker = Maker(store, shards)
    wait_for(lambda: store.size(WRITER))
    first = Reader(store, order, order.total_steps)
    got = first.steps(order.total_steps * 3 // 4)
    abandon(first)
    made = maker.ring.made
    again = order.total_steps // 4
    assert first.feed.stream.uses.first_needed(again) < maker.ring._position  # those shards are gone
    second = Reader(store, order, order.total_steps, step=again)
    got = got[:again] + second.steps()
    second.close()
    maker.join(10)
    assert maker.problem is None and maker.ring.made > made and maker.peak_bytes <= store.max_bytes
    assert_same(got, local_batches(tmp_path, shards, order, order.total_steps))


def test_an_extraction_that_is_killed_is_waited_for_and_goes_on_where_the_ring_ends(tmp_path):
    shards = plan_of(MANY)
    order = order_of(shards, 2)
    store = stream_store(tmp_path, need_of(shards, order))
    first = Maker(store, shards, pause_s=0.005)
    wait_for(lambda: store.size(WRITER))
    reader = Reader(store, order, order.total_steps)
    got = reader.steps(order.total_steps // 3)
    first.kill()
    left = len(store.ring_files())
    assert left > 0
    threading.Timer(1.0, lambda: seconds.append(Maker(store, shards))).start()
    seconds: list[Maker] = []
    got += reader.steps()
    reader.close()
    seconds[0].join(10)
    assert seconds[0].problem is None and reader.feed.cache.waited_s > 0.5
    assert first.ring.made + seconds[0].ring.made <= reader.feed.stream.uses.end + 1  # one may be lost in its hand
    assert_same(got, local_batches(tmp_path, shards, order, order.total_steps))


def test_a_trainer_with_another_seed_finds_its_own_order_and_not_the_shards_of_the_one_before(tmp_path):
    shards = plan_of(MANY)
    order, other = order_of(shards, 1), order_of(shards, 1, seed=8)
    store = stream_store(tmp_path, max(need_of(shards, order), 2 * need_of(shards, other)))
    maker = Maker(store, shards)
    wait_for(lambda: store.size(WRITER))
    first = Reader(store, order, order.total_steps)
    first.steps(3)
    abandon(first)
    second = Reader(store, other, other.total_steps, seed=8)
    assert_same(second.steps(), local_batches(tmp_path, shards, other, other.total_steps))
    second.close()
    maker.join(10)
    assert maker.problem is None


# ---------------------------------------------------------------- refusals and bounded waits


def test_a_ring_one_byte_too_small_is_refused_by_both_sides_with_the_number(tmp_path):
    shards = plan_of(MANY)
    order = order_of(shards, 1)
    need = need_of(shards, order)
    store = stream_store(tmp_path, need - 1)
    store.write_plan(shards)
    with pytest.raises(UserError, match=f"store.max_bytes={need} in both commands; or a smaller store.shard_bytes"):
        plan_stream(store, order, ORDER["seed"], order.total_steps)
    beat = Beat(store, READER, seed=3, end=9, position=0, need_bytes=need)
    with pytest.raises(UserError, match=f">= {need} bytes"):
        next(Ring(store, shards, []).take())
    beat.close()


def test_without_extraction_a_trainer_waits_for_a_bounded_time_and_names_what_to_start(tmp_path):
    shards = plan_of(MANY)
    order = order_of(shards, 1)
    store = stream_store(tmp_path, need_of(shards, order), wait_s=0.4)
    store.write_plan(shards)
    reader = Reader(store, order, order.total_steps)
    started = time.monotonic()
    with pytest.raises(OtherSideAway, match=r"no extraction runs\n.*\n.*python -m dflash_train.extract store=stream"):
        reader.steps()
    assert 0.3 < time.monotonic() - started < 5 and OtherSideAway.exit_code == 1
    reader.close(done=False)


def test_without_a_trainer_extraction_waits_for_a_bounded_time_and_names_what_to_start(tmp_path):
    store = stream_store(tmp_path, 1 << 30, wait_s=0.3)
    ring = Ring(store, plan_of(MANY), [])
    ring._ready = True  # the target's files are there
    with ring, pytest.raises(OtherSideAway, match=r"deepspeed launch/train\.py store=stream"):
        next(ring.take())


def test_a_trainer_that_is_told_to_stop_does_not_wait_for_rows(tmp_path):
    shards = plan_of(MANY)
    order = order_of(shards, 1)
    store = stream_store(tmp_path, need_of(shards, order))
    store.write_plan(shards)
    reader = Reader(store, order, order.total_steps)
    asked: list[int] = []
    reader.feed.stops_when(lambda: bool(asked))
    threading.Timer(0.3, lambda: asked.append(1)).start()
    with pytest.raises(StopAsked):
        reader.steps()
    reader.close(done=False)


def test_a_second_trainer_or_extraction_is_refused_while_the_first_one_runs(tmp_path):
    store, other = stream_store(tmp_path, 1), stream_store(tmp_path, 1)
    for side in ("training", "extraction"):
        with store.held(side), pytest.raises(UserError, match=f"another {side} runs on this stream"):
            other.lock(side)
        other.lock(side)
        other.unlock(side)


def test_a_side_without_a_sign_of_life_or_whose_process_is_gone_is_away(tmp_path, monkeypatch):
    store, now = stream_store(tmp_path, 1), [0.0]
    peer = Peer(store, READER, clock=lambda: now[0])
    assert peer.look() == ({}, False)
    beat = Beat(store, READER, position=7)
    assert peer.look()[0]["position"] == 7 and peer.look()[1]
    beat._closed.set()  # it hangs
    beat._thread.join()
    assert peer.look()[1]
    now[0] += stream_module.LEASE_S
    assert not peer.look()[1]
    beat.tell()
    assert peer.look()[1]
    monkeypatch.setattr(stream_module, "process_is_gone", lambda record: True)
    assert not peer.look()[1]
    monkeypatch.undo()
    beat.close(done=True)
    assert peer.look()[0]["done"] and not peer.look()[1]


def wait_for(condition, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def abandon(reader: Reader) -> None:
    """As SIGKILL leaves it: no last word, and no sign of life that changes; its process is gone."""
    reader.feed.beat._closed.set()
    reader.feed.beat._thread.join()
    reader.feed.cache.close()
    reader.prefetcher.close()
