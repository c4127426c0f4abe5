"""RunState: its sums, rates and shares against a twin that recounts a log of events."""

import math
import random

import pytest
from helpers_monitor import Clock, small_state, strict_json

from dflash_train.monitor.parts import DONE, SHARD_STATUSES, WORKER_STATUSES
from dflash_train.monitor.rates import WINDOW_S
from dflash_train.monitor.state import RunState


def drive(state: RunState, clock: Clock, steps: int, seed: int) -> list[tuple]:
    """Random events as a supervisor reports them, dead workers and other hosts among them; returns their log."""
    rng, log, at = random.Random(seed), [], {}

    def call(name: str, *arguments, **named) -> None:
        log.append((clock.now, name, arguments, named))
        getattr(state, name)(*arguments, **named)

    waiting = [f"train-{i:06d}" for i in range(36)]
    for step in range(steps):
        clock.now += rng.choice([0.1, 0.9, 2.7, 40.0 if step % 97 == 0 else 0.3])
        worker = rng.choice("abc")
        if worker not in at:
            if not waiting:
                break
            at[worker] = waiting.pop(0)
            call("shard", at[worker], "claimed", worker, tokens=2_500, samples=25)
            call("worker", worker, "cpu", 1, "capturing", at[worker])
        dice = rng.random()
        if dice < 0.8:
            call("captured", worker, at[worker], rng.randint(1, 9), rng.randint(10, 900), 0.2, {rng.choice("xyz"): 2})
        elif dice < 0.85:
            call("worker", worker, "cpu", 1, "dead", at[worker])
            waiting.insert(0, at.pop(worker))
        elif dice < 0.9:
            call("shard", at[worker], "captured", worker)
            call("shard", at[worker], "uploaded", bytes=77)
            call("uploaded", 77, 0.5)
            call("worker", worker, "cpu", 1, rng.choice(["paused", "idle"]))
            del at[worker]
        elif dice < 0.92 and waiting:
            call("shard", waiting.pop(), "elsewhere", tokens=1_800, samples=21)
        else:
            call("staging", 10, rng.randint(10, 100), 100, 0.8, rng.random() < 0.5)
    return log


def in_window(log: list[tuple], now: float, amount) -> float:
    """Amount a second over the last minute, by going through everything."""
    events = [(time, amount(arguments)) for time, name, arguments, _ in log if name == "captured"]
    total = 0.0
    for time, value in events:
        if math.floor(time) >= math.floor(now) - (WINDOW_S - 1):
            total += value
    return total / min(WINDOW_S, now - (events[0][0] - 0.2))


def progress(log: list[tuple]) -> tuple[int, int, dict[str, int]]:
    """Samples, tokens and samples by source that count: of each shard what came after its last claim."""
    shards = {arguments[0] for _, name, arguments, _ in log if name == "shard"}
    samples = tokens = 0
    sources = {}
    for shard in shards:
        mine = [(0, 0, {})]
        for _, name, arguments, named in log:
            if name == "shard" and arguments[0] == shard and arguments[1] == "claimed":
                mine = [(0, 0, {})]
            if name == "shard" and arguments[0] == shard and arguments[1] == "elsewhere":
                mine = [(named["samples"], named["tokens"], {})]
            if name == "captured" and arguments[1] == shard:
                mine.append((arguments[2], arguments[3], arguments[5]))
        samples += sum(part[0] for part in mine)
        tokens += sum(part[1] for part in mine)
        for _, _, counts in mine:
            for source, count in counts.items():
                sources[source] = sources.get(source, 0) + count
    return samples, tokens, sources


def seconds_in(log: list[tuple], now: float, worker: str, status: str) -> float:
    """Seconds that `worker` was in `status`, from the times between its reports."""
    reports = [(time, arguments[3]) for time, name, arguments, _ in log if name == "worker" and arguments[0] == worker]
    ends = [time for time, _ in reports[1:]] + [now]
    return sum(end - start for (start, was), end in zip(reports, ends) if was == status)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sums_rates_and_shares_equal_a_recount_of_the_log(seed):
    clock = Clock()
    state = small_state(clock)
    log = drive(state, clock, 400, seed)
    deaths = [arguments for _, name, arguments, _ in log if name == "worker" and arguments[3] == "dead"]
    assert deaths, "the seed must make shards go back"
    clock.now += 1.5
    got, now = strict_json(state), clock.now
    samples, tokens, sources = progress(log)
    assert (got["samples"]["done"], got["tokens"]["done"], got["sources"]) == (samples, tokens, sources)
    captured = sum(arguments[3] for _, name, arguments, _ in log if name == "captured")
    assert got["tokens"]["captured"] == captured > tokens - 1_800 * 36
    assert got["tokens"]["per_s"] == pytest.approx(in_window(log, now, lambda arguments: arguments[3]))
    assert got["samples"]["per_s"] == pytest.approx(in_window(log, now, lambda arguments: arguments[2]))
    first = next(time for time, name, *_ in log if name == "captured")
    assert got["tokens"]["per_s_overall"] == pytest.approx(captured / (now - first + 0.2))
    last = {arguments[0]: arguments[1] for _, name, arguments, _ in log if name == "shard"}
    for status in SHARD_STATUSES[1:]:
        expected = sum(value == status for value in last.values()) + 4 * (status == "uploaded")
        assert got["shards"]["counts"][status] == expected
    assert got["shards"]["done"] == 4 + sum(value in DONE for value in last.values())
    for row in got["workers"]:
        spent = {status: seconds_in(log, now, row["name"], status) for status in ("capturing", "paused", "idle")}
        assert row["capturing_share"] == pytest.approx(spent["capturing"] / sum(spent.values()))
        assert row["paused_share"] == pytest.approx(spent["paused"] / sum(spent.values()))


def test_paused_seconds_are_those_between_its_reports():
    clock = Clock()
    state, start = small_state(clock), clock.now
    waited = 0.0
    for paused in (False, True, True, False, True, False, True):
        clock.now += 3.0
        state.staging(1, 2, 10, 0.8, paused)
    for _ in range(4):
        clock.now += 1.0
    waited = 3.0 + 3.0 + 3.0 + 4.0
    staging = strict_json(state)["staging"]
    assert staging["paused_s"] == pytest.approx(waited)
    assert staging["paused_share"] == pytest.approx(waited / (clock.now - start))
    assert staging["fill"] == 0.2


def test_eta_is_what_is_left_at_the_present_rate_and_then_the_backlog():
    clock = Clock()
    state = small_state(clock, total_tokens=100_000)
    assert strict_json(state)["eta_s"] is None
    clock.now += 10
    state.captured("a", "train-000000", 5, 20_000, 10.0)
    assert strict_json(state)["eta_s"] == pytest.approx(80_000 / 2_000)
    state.uploaded(1_000, 10.0)
    for shard, num_bytes in (("train-000001", 300), ("train-000002", 400), ("train-000003", 5_000)):
        state.shard(shard, "staged", "a", num_bytes)
    state.shard("train-000003", "uploaded")
    assert strict_json(state)["eta_s"] == pytest.approx(40 + 700 / 100)
    assert strict_json(state)["uploads"]["backlog_shards"] == 2
    clock.now += 600  # nothing within the window: the mean since the beginning
    assert strict_json(state)["eta_s"] == pytest.approx(80_000 / (20_000 / 610) + 700 / (1_000 / 610))
    state.backlog(5, 1_400)
    assert strict_json(state)["eta_s"] == pytest.approx(80_000 / (20_000 / 610) + 1_400 / (1_000 / 610))
    state.finished(True)
    assert strict_json(state)["eta_s"] == 0.0


def test_flop_utilisation_counts_the_workers_that_are_alive():
    clock = Clock()
    state = small_state(clock, flops_per_token=6e9, peak_flops=1e13)
    for name in "abc":
        state.worker(name, "cuda", 1, "capturing")
    state.worker("c", "cuda", 1, "dead")
    clock.now += 10
    state.captured("a", "s", 1, 20_000, 10.0)
    assert strict_json(state)["flops"]["utilisation"] == pytest.approx(2_000 * 6e9 / (2 * 1e13))
    for name in "ab":
        state.worker(name, "cuda", 1, "stopped")
    assert strict_json(state)["flops"]["utilisation"] is None


def test_a_shard_of_unknown_size_done_elsewhere_counts_as_the_mean_and_only_once():
    state = small_state()
    for _ in range(3):
        state.shard("train-000007", "elsewhere")
    got = strict_json(state)
    assert (got["tokens"]["done"], got["samples"]["done"], got["shards"]["done"]) == (100_000 // 36, 1000 // 36, 5)


def test_a_shard_lost_after_capture_no_longer_counts_as_progress():
    state = small_state()
    state.shard("a", "claimed", "w")
    state.captured("w", "a", 3, 300, 0.1, {"x": 3})
    state.shard("a", "captured", "w")
    state.shard("a", "staged", "w", 10)
    assert strict_json(state)["tokens"]["done"] == 300
    state.shard("a", "failed")
    got = strict_json(state)
    assert (got["tokens"]["done"], got["tokens"]["captured"], got["sources"]) == (0, 300, {})


def test_a_finished_run_stands_still_and_says_how_it_ended():
    clock = Clock()
    state = small_state(clock)
    state.captured("w", "s", 1, 100, 1.0)
    clock.now += 5
    state.finished(False)
    before = state.snapshot()
    clock.now += 1000
    assert state.snapshot() == before
    assert before["status"] == "failed" and state.ended


def test_statuses_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match=WORKER_STATUSES[0]):
        small_state().worker("w", "cpu", 1, "busy")
    with pytest.raises(ValueError, match=SHARD_STATUSES[0]):
        small_state().shard("s", "done")
