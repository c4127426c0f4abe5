"""What goes wrong between staging and bucket, as drills: after each the set is complete and no shard is there twice."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from helpers_store import FlakyStore, make_shard

from dflash_train.store import staging, upload
from dflash_train.store.base import StoreUnavailable
from dflash_train.store.local import LocalStore
from dflash_train.store.shard import ShardFacts, list_markers, write_shard
from dflash_train.store.staging import Room, staging_folder
from dflash_train.store.upload import Uploader, stop_on_signals
from dflash_train.util.errors import UserError

MB = 1_000_000


@pytest.fixture
def ram(monkeypatch):
    """Pretend that every folder is a RAM disk of 64 MB; real files count, and so do `foreign` bytes."""
    state = {"foreign": 0, "total": 64 * MB}

    def usage(folder):
        ours = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        return type(before)(state["total"], state["foreign"] + ours, state["total"] - state["foreign"] - ours)

    before = staging.shutil.disk_usage("/")
    monkeypatch.setattr(staging, "_is_ram", lambda folder: True)
    monkeypatch.setattr(staging.shutil, "disk_usage", usage)
    return state


@pytest.fixture
def no_waits(monkeypatch):
    """Pauses between tries take no time, but are counted."""
    pauses = []
    monkeypatch.setattr(upload.time, "sleep", pauses.append)
    return pauses


def stage(folder: Path, uploader: Uploader, number: int, shard=None) -> None:
    shard_id = f"train-{number:05d}"
    shard = shard or make_shard(seed=number, prefix=f"t{number}-")
    path = folder / f"{shard_id}.safetensors"
    num_bytes = shard.hidden.nbytes + 1000
    uploader.reserve(num_bytes)
    write_shard(path, shard)
    uploader.submit(path, ShardFacts.of(shard_id, shard), num_bytes)


def complete(store: LocalStore, num_shards: int) -> None:
    """Each shard once, and no object beside them."""
    markers = list_markers(LocalStore(store.folder))
    assert [marker.shard_id for marker in markers] == [f"train-{i:05d}" for i in range(num_shards)]
    assert sorted(key for key, _ in store.list("shards/")) == sorted(marker.key for marker in markers)


def resume(store: LocalStore, folder: Path, num_shards: int) -> int:
    """A second run: do what has no marker; returns how many."""
    done = {marker.shard_id for marker in list_markers(LocalStore(store.folder))}
    todo = [i for i in range(num_shards) if f"train-{i:05d}" not in done]
    with staging_folder(folder) as staged, Uploader(LocalStore(store.folder), staged) as uploader:
        for number in todo:
            stage(staged, uploader, number)
    return len(todo)


# ---------------------------------------------------------------- a network that goes and comes back


class Outage(LocalStore):
    """Answers nothing between the first call after `down` was set and the `calls`-th."""

    def __init__(self, folder, calls):
        super().__init__(folder)
        self.calls, self.down, self.refused = calls, False, 0

    def _ask(self):
        if self.down and self.refused < self.calls:
            self.refused += 1
            raise StoreUnavailable(self.url, got="EndpointConnectionError", want="an answer")

    def put_file(self, key, path):
        self._ask()
        super().put_file(key, path)

    def put_bytes(self, key, data, *, if_absent=False):
        self._ask()
        return super().put_bytes(key, data, if_absent=if_absent)


def test_a_network_that_is_away_for_minutes_costs_tries_and_no_shard(tmp_path, no_waits):
    """Trap 32: waits grow to a minute, each is reported, and nothing is lost."""
    store, retries = Outage(tmp_path / "store", calls=16), []
    with (
        staging_folder(tmp_path) as folder,
        Uploader(store, folder, threads=2, on_retry=lambda what, why: retries.append((what, why))) as uploader,
    ):
        for number in range(6):
            store.down = number >= 2
            stage(folder, uploader, number)
    complete(store, 6)
    assert store.refused == 16 == len(retries)
    assert sum(no_waits) > 60  # however the tries fall on the two threads
    assert retries[0][1] == "EndpointConnectionError" and re.match(r"(upload of|marker of) train-0000\d", retries[0][0])


def test_an_object_that_is_up_is_not_sent_again_because_its_marker_could_not_be_put(tmp_path, no_waits):
    class NoMarkers(FlakyStore):
        tries = 0

        def put_bytes(self, key, data, *, if_absent=False):
            self.tries += 1
            if self.tries <= 3:
                raise StoreUnavailable("flaky", got="HTTP 503", want="success")
            return super().put_bytes(key, data, if_absent=if_absent)

    store = NoMarkers(tmp_path / "store", failures=0)
    with staging_folder(tmp_path) as folder, Uploader(store, folder, threads=1) as uploader:
        stage(folder, uploader, 0)
    complete(store, 1)
    assert (store.puts, store.tries) == (1, 4)


def test_a_store_that_stays_away_ends_the_run_after_a_bounded_time_and_names_every_shard(tmp_path, no_waits, capsys):
    """Traps 32, 34: the producer hears of it, the rest is not tried for as long again, a second run completes it."""
    store = Outage(tmp_path / "store", calls=10**9)
    store.down = True
    with (
        pytest.raises(UserError, match=r"train-00000(.|\n)*has no marker"),
        staging_folder(tmp_path) as folder,
        Uploader(store, folder, threads=1) as uploader,
    ):
        for number in range(3):
            stage(folder, uploader, number)
    assert 24 <= store.refused <= 26 and sum(no_waits) < 24 * 60  # once one is given up, the others are tried once
    assert "not uploaded: train-00000" in capsys.readouterr().out
    assert resume(store, tmp_path, 3) == 3
    complete(store, 3)


def test_a_bucket_that_starts_to_refuse_ends_the_run_at_once_and_a_second_run_completes_it(tmp_path):
    class Refusing(LocalStore):
        puts = 0

        def put_file(self, key, path):
            self.puts += 1
            if self.puts > 3:
                raise UserError(self.url, got="refused by the store: AccessDenied in PutObject", want="credentials")
            super().put_file(key, path)

    store = Refusing(tmp_path / "store")
    with (
        pytest.raises(UserError, match="AccessDenied"),
        staging_folder(tmp_path) as folder,
        Uploader(store, folder, threads=1) as uploader,
    ):
        for number in range(500):
            stage(folder, uploader, number)
            time.sleep(0.002)
    assert store.puts < 500
    left = resume(store, tmp_path, 8)
    assert left == 5
    complete(store, 8)


def test_an_upload_that_dies_at_four_fifths_leaves_no_object_and_the_next_run_makes_it(tmp_path, monkeypatch):
    """Trap 34: an uploader that always fails at 80 %."""
    store = LocalStore(tmp_path / "store")

    def copy(source, target):
        content = Path(source).read_bytes()
        Path(target).write_bytes(content[: len(content) * 4 // 5])
        raise StoreUnavailable("store", got="connection reset", want="success")

    with monkeypatch.context() as patch:
        patch.setattr("dflash_train.store.local.shutil.copyfile", copy)
        patch.setattr(upload.time, "sleep", lambda seconds: None)
        with (
            pytest.raises(UserError, match="train-00000"),
            staging_folder(tmp_path) as folder,
            Uploader(store, folder, threads=1) as uploader,
        ):
            stage(folder, uploader, 0)
    assert store.list() == [] and not [path for path in store.folder.rglob("*") if path.is_file()]
    assert resume(store, tmp_path, 2) == 2
    complete(store, 2)


# ---------------------------------------------------------------- ends of a run


def test_a_run_that_ends_by_an_exception_does_not_wait_minutes_for_a_dead_store(tmp_path, no_waits, capsys):
    """Trap 32: an exception while the store is away: three tries, and what is missing is named."""
    ending = threading.Event()

    class Dead(Outage):
        def put_file(self, key, path):
            ending.wait(20)
            super().put_file(key, path)

    class Ending(Uploader):
        def drain(self, timeout_s=None):
            ending.set()
            return super().drain(timeout_s)

    store = Dead(tmp_path / "store", calls=10**9)
    store.down = True
    with (
        pytest.raises(ZeroDivisionError),
        staging_folder(tmp_path) as folder,
        Ending(store, folder, threads=1) as uploader,
    ):
        stage(folder, uploader, 0)
        raise ZeroDivisionError
    assert store.refused == 3 and sum(no_waits) < 10 and "not uploaded: train-00000" in capsys.readouterr().out


def test_unfinished_uploads_are_aborted_when_the_process_does_not_wait_for_them(tmp_path, capsys):
    """Trap 33: a second signal during the drain; parts that stay would be paid for."""
    release = threading.Event()

    class Slow(LocalStore):
        aborted = 0

        def put_file(self, key, path):
            release.wait(20)
            super().put_file(key, path)

        def abort_unfinished(self):
            Slow.aborted += 1
            return 1

    store = Slow(tmp_path / "store")

    class Impatient(Uploader):
        def drain(self, timeout_s=None):
            raise SystemExit(143)

    with pytest.raises(SystemExit), staging_folder(tmp_path) as folder, Impatient(store, folder, threads=1) as uploader:
        stage(folder, uploader, 0)
    out = capsys.readouterr().out
    release.set()
    assert Slow.aborted == 1 and "aborted 1 unfinished upload" in out and "not uploaded: train-00000" in out


def test_draining_with_a_time_limit_says_whether_something_is_left(tmp_path):
    held = threading.Event()

    class Held(LocalStore):
        def put_file(self, key, path):
            held.wait(20)
            super().put_file(key, path)

    store = Held(tmp_path / "store")
    with staging_folder(tmp_path) as folder, Uploader(store, folder) as uploader:
        assert uploader.drain(0) and uploader.pending == []
        stage(folder, uploader, 1)
        stage(folder, uploader, 0)
        assert not uploader.drain(0.05) and uploader.pending == ["train-00000", "train-00001"]
        held.set()
        assert uploader.drain() and uploader.pending == []
    complete(store, 2)


# ---------------------------------------------------------------- a store slower than the GPU


class Throttled(LocalStore):
    """Takes `seconds` for a shard, one at a time, whatever the number of threads."""

    def __init__(self, folder, seconds):
        super().__init__(folder)
        self.seconds, self.lock = seconds, threading.Lock()

    def put_file(self, key, path):
        with self.lock:
            time.sleep(self.seconds)
            super().put_file(key, path)


def run(store, folder, num_shards: int, work_s: float) -> tuple[float, float, int]:
    """(seconds, paused share, most staged bytes) of a producer that works `work_s` seconds a shard of 10 MB."""
    big, most, start = make_shard(lengths=(1000,) * 10, width=500), 0, time.monotonic()
    with staging_folder(folder) as staged, Uploader(store, staged, threads=4) as uploader:
        for number in range(num_shards):
            time.sleep(work_s)
            stage(staged, uploader, number, big)
            most = max(most, uploader.staged_bytes)
        uploader.drain()
        return time.monotonic() - start, uploader.paused_share, most


def test_a_throttled_store_sets_the_pace_and_the_pause_is_reported(ram, tmp_path, capsys):
    """Trap 34: a bandwidth-limited store settles at the slower of the two, within the water marks."""
    seconds, share, most = run(Throttled(tmp_path / "slow", 0.2), tmp_path, 14, work_s=0)
    assert seconds >= 14 * 0.2 and share > 0.3  # the first shards fill the folder without a pause
    assert most <= 0.8 * 64 * MB
    assert re.search(r"going on after \d+ s, paused \d+% of the run", capsys.readouterr().out)
    complete(LocalStore(tmp_path / "slow"), 14)


def test_a_store_that_keeps_up_costs_no_pause(ram, tmp_path):
    """The control: the same shards, a producer slower than the store."""
    _, share, most = run(LocalStore(tmp_path / "fast"), tmp_path, 8, work_s=0.2)
    assert share == 0 and most <= 0.8 * 64 * MB
    complete(LocalStore(tmp_path / "fast"), 8)


def test_foreign_bytes_that_fill_the_folder_pause_the_producer_until_they_go(ram, tmp_path):
    """Trap 34: full between check and write is everybody's doing, and a bounded wait."""
    store, asked = LocalStore(tmp_path / "store"), []
    big = make_shard(lengths=(1000,) * 10, width=500)
    with staging_folder(tmp_path) as folder, Uploader(store, folder, threads=1) as uploader:
        stage(folder, uploader, 0, big)
        ram["foreign"] = 60 * MB

        def stop_check():
            asked.append(len(asked))
            ram["foreign"] = 0 if len(asked) > 2 else 60 * MB

        uploader.stop_check = stop_check
        stage(folder, uploader, 1, make_shard(lengths=(1000,) * 10, width=500, seed=1, prefix="u"))
    assert len(asked) > 2 and uploader.paused_s > 0
    complete(store, 2)


def test_a_shard_larger_than_what_is_left_of_a_small_folder_is_refused_before_any_work(ram, tmp_path):
    """Trap 34: 64 MB of /dev/shm are too small by far."""
    with pytest.raises(UserError, match=r"room for one shard of 1.1 GB(.|\n)*store.staging_dir"):
        Room(tmp_path).require(1 << 30)


def test_a_signal_while_the_producer_waits_ends_the_wait(ram, tmp_path):
    store, open_gate = LocalStore(tmp_path / "store"), threading.Event()
    inner = store.put_file
    store.put_file = lambda key, path: open_gate.wait(20) and inner(key, path)
    big = make_shard(lengths=(1000,) * 10, width=500)
    with (
        pytest.raises(SystemExit) as stop,
        staging_folder(tmp_path) as folder,
        stop_on_signals() as check,
        Uploader(store, folder, threads=1, stop_check=check) as uploader,
    ):
        try:
            for number in range(10):
                if number == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                stage(folder, uploader, number, big)
        finally:
            open_gate.set()
    assert stop.value.code == 143
    assert 5 <= len(list_markers(store)) < 10
    complete(store, len(list_markers(store)))
