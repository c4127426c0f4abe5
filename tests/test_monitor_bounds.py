"""RunState in every state a run can be in: strict JSON, bounded memory, many threads."""

import json
import sys
import threading

import pytest
from helpers_monitor import Clock, SimulatedRun, small_state, strict_json

from dflash_train.monitor.parts import ShardBar
from dflash_train.monitor.rates import WINDOW_S, History, Rate, Reasons, clean

# ---------------------------------------------------------------- strict JSON in all states


def states():
    """Every kind of moment in a run's life, the hostile ones among them."""
    yield "before anything", small_state()
    yield "nothing to do", small_state(total_samples=0, total_tokens=0, total_shards=0, done_shards=0)
    loading = small_state(flops_per_token=1e9, peak_flops=0.0)
    loading.worker("w", "cpu", None, "loading")
    yield "loading", loading
    odd = small_state(flops_per_token=float("nan"), peak_flops=float("inf"))
    odd.worker("w", "cpu", 1, "capturing")
    odd.captured("w", "s", 1, 10, float("nan"))
    odd.uploaded(10, float("inf"))
    odd.staging(0, 0, 0, float("nan"), True)
    odd.gpus([{"index": 0, "power_w": float("nan")}])
    yield "numbers that JSON does not have", odd
    text = small_state()
    text.error("half a pair \ud83d and <script>alert(1)</script>\x00\n")
    text.retry("shard", "")
    text.dropped("\udcff", 2)
    text.captured("not announced", "s", 1, 10, 0.0, {"\ud800": 1})
    yield "text that UTF-8 does not have", text
    run = SimulatedRun()
    for _ in range(100):
        run.step()
    yield "in the middle", run.state
    for ok in (True, False):
        over = small_state()
        over.finished(ok)
        yield f"finished {ok}", over


@pytest.mark.parametrize("name, state", states(), ids=lambda value: value if isinstance(value, str) else "")
def test_snapshot_is_strict_json_and_encodes_as_utf8_in_every_state(name, state):
    text = json.dumps(state.snapshot(), allow_nan=False, ensure_ascii=False)
    assert set(json.loads(text.encode())) == set(small_state().snapshot())


# ---------------------------------------------------------------- memory and threads


def test_memory_is_bounded_whatever_the_run_reports():
    clock = Clock()
    state = small_state(clock, total_shards=100)
    for i in range(20_000):
        clock.now += 1.0
        state.error(f"error {i} " + "x" * 10_000)
        state.retry(f"shard {i}", f"reason {i}")
        state.dropped(f"row {i}", 1)
        state.captured("w", "s", 1, 10, 0.5, {f"source {i}": 1})
    got = strict_json(state)
    assert (got["errors"]["total"], got["retries"]["total"], got["dropped"]["total"]) == (20_000, 20_000, 20_000)
    assert sum(got["dropped"]["by_reason"].values()) == 20_000 == sum(got["sources"].values())
    assert len(json.dumps(got)) < 200_000
    assert len(got["errors"]["recent"]) == 50 and got["errors"]["recent"][-1]["line"].startswith("error 19999 ")
    assert 100 <= len(got["history"]["elapsed_s"]) <= 240
    assert got["history"]["elapsed_s"][0] == 0 or got["history"]["elapsed_s"][0] < 2


def test_84_000_shards_are_a_byte_each_and_600_cells_at_most():
    bar = ShardBar(84_000, 0)
    assert sys.getsizeof(bar._statuses) < 90_000
    for i in range(42_000):
        bar.set(f"train-{i:06d}", "uploaded")
    bar.set("train-042000", "claimed")
    grid = bar.as_dict()["grid"]
    assert len(grid["cells"]) == len(grid["done_percent"]) == 600 and grid["per_cell"] == 140
    assert grid["cells"] == "#" * 300 + "~" + "." * 299
    bar.set("train-000005", "failed")
    assert bar.as_dict()["grid"]["cells"][0] == "x"
    assert bar.as_dict()["counts"]["waiting"] == 41_999


@pytest.fixture
def eager_threads():
    """Threads take turns so often that an update without the lock would be torn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_every_count_arrives_when_many_threads_report_and_read_at_once(eager_threads):
    state, reading, over, seen = (
        small_state(total_shards=1_600, done_shards=0),
        threading.Event(),
        threading.Event(),
        [],
    )

    def report(name: str) -> None:
        for i in range(200):
            shard = f"{name}-{i}"
            state.shard(shard, "claimed", name)
            state.worker(name, "cpu", 1, "capturing", shard)
            state.captured(name, shard, 1, 10, 0.01, {"x": 1})
            state.shard(shard, "uploaded")
            state.uploaded(5, 0.1)
            state.error(shard)

    def read() -> None:
        while not over.is_set():
            now = state.snapshot()
            seen.append((now["samples"]["done"], now["samples"]["captured"], now["tokens"]["captured"] // 10,
                         now["sources"].get("x", 0), sum(row["samples"] for row in now["workers"])))  # fmt: skip
            reading.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(20)
    reporters = [threading.Thread(target=report, args=(f"w{i}",)) for i in range(8)]
    for thread in reporters:
        thread.start()
    for thread in reporters:
        thread.join()
    over.set()
    reader.join()
    got = strict_json(state)
    assert (got["samples"]["done"], got["tokens"]["done"], got["shards"]["done"]) == (1_600, 16_000, 1_600)
    assert (got["uploads"]["bytes"], got["errors"]["total"], got["sources"]) == (8_000, 1_600, {"x": 1_600})
    torn = [counts for counts in seen if len(set(counts)) > 1]
    assert seen == sorted(seen) and seen[0][0] == 0 and not torn


# ---------------------------------------------------------------- the parts


def test_a_rate_forgets_what_is_older_than_its_window():
    rate = Rate()
    assert rate.recent(5.0) is None and rate.overall(5.0) is None
    rate.add(5.0, 600.0, 1.0)
    assert rate.recent(5.0) == 600.0
    assert rate.recent(5.0 + WINDOW_S) == 0.0
    assert rate.overall(104.0) == 6.0


def test_history_keeps_the_whole_run_in_bounded_points():
    history, added = History(step_s=1.0), 0
    for second in range(100_000):
        if history.due(float(second)):
            history.add(float(second), second * 2.0)
            added += 1
    columns = history.columns("double")
    assert len(columns["elapsed_s"]) <= 240 < added
    assert columns["elapsed_s"][0] == 0.0 and columns["elapsed_s"][-1] > 98_000
    assert columns["double"] == [2 * value for value in columns["elapsed_s"]]
    steps = {b - a for a, b in zip(columns["elapsed_s"], columns["elapsed_s"][1:])}
    assert steps == {history.step_s}


def test_reasons_beyond_the_bound_are_counted_together_and_zeros_are_left_out():
    reasons = Reasons()
    for i in range(100):
        reasons.add(i)
    reasons.add("0", -1)
    counts = reasons.as_dict()
    assert counts["other"] == 36 and "0" not in counts and sum(counts.values()) == 99


def test_clean_cuts_and_keeps_what_utf8_holds():
    assert clean("a" * 10, 4) == "aaa…" and clean("é\ud83d", 5) == "é?" and clean(7, 5) == "7"
