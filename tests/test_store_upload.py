"""Staging and upload: bounded room, bounded waits, nothing lost however the run ends."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from threading import Timer

import pytest
from helpers_store import FlakyStore, make_shard

from dflash_train.config import StoreConfig
from dflash_train.store import staging
from dflash_train.store.base import StoreUnavailable
from dflash_train.store.local import LocalStore
from dflash_train.store.shard import ShardFacts, list_markers, write_shard
from dflash_train.store.staging import PREFIX, Room, remove_leftovers, staging_folder, staging_parent
from dflash_train.store.upload import Uploader, stop_on_signals
from dflash_train.util.errors import UserError

Usage = namedtuple("Usage", "total used free")
MB = 1_000_000
ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}


def python(code: str, argument: Path) -> subprocess.CompletedProcess:
    """Run code in a process of its own."""
    command = [sys.executable, "-c", code, str(argument)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)


@pytest.fixture
def ram(monkeypatch):
    """Pretend every folder is a RAM disk of 64 MB in which others have `foreign` bytes; real files count on top."""
    state = {"foreign": 0, "total": 64 * MB}

    def usage(folder):
        ours = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        used = state["foreign"] + ours
        return Usage(state["total"], used, state["total"] - used)

    monkeypatch.setattr(staging, "_is_ram", lambda folder: True)
    monkeypatch.setattr(staging.shutil, "disk_usage", usage)
    return state


def put(uploader, folder, shard_id, shard=None, reserve=None):
    shard = shard or make_shard(seed=int(shard_id[-3:]), prefix=f"{shard_id}-")
    path = folder / f"{shard_id}.safetensors"
    uploader.reserve(reserve or 1000)
    write_shard(path, shard)
    uploader.submit(path, ShardFacts.of(shard_id, shard), reserve or 1000)


# ---------------------------------------------------------------- room


def test_on_a_ram_disk_everyones_bytes_count(ram, tmp_path):
    """Trap 34: /dev/shm of 64 MB, foreign files at 85 %."""
    assert Room(tmp_path).fits(51 * MB) and not Room(tmp_path).fits(52 * MB)
    ram["foreign"] = 54 * MB
    with pytest.raises(UserError, match=r"10.0 MB of 64.0 MB free, to be filled to 80%(.|\n)*store.staging_dir"):
        Room(tmp_path).require(1)


def test_on_a_disk_only_what_is_free_counts(ram, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_is_ram", lambda folder: False)
    ram["foreign"] = 54 * MB
    room = Room(tmp_path)
    assert room.fits(8 * MB) and not room.fits(9 * MB)  # 80 % of the 10 MB that are free
    ram["foreign"] = 62 * MB  # the store itself may lie on the same disk and have grown
    assert room.fits(1 * MB) and not room.fits(2 * MB)


def test_ours_is_also_bounded_by_free_memory(ram, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_free_memory", lambda: 10 * MB)
    assert Room(tmp_path).fits(8 * MB) and not Room(tmp_path).fits(9 * MB)


def test_a_real_tmpfs_is_told_from_a_disk():
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    assert staging._is_ram(Path("/dev/shm")) == (["/dev/shm", "tmpfs"] in mounts)
    assert not staging._is_ram(Path("/proc"))


def test_a_shard_bigger_than_the_staging_folder_is_an_error_before_the_run(ram, tmp_path):
    """Trap 34: a sample bigger than the staging folder."""
    config = StoreConfig(kind="local", root="x", staging_dir=str(tmp_path))
    assert staging_parent(config, 50 * MB) == tmp_path
    with pytest.raises(UserError, match=r"room for one shard of 70.0 MB"):
        staging_parent(config, 70 * MB)


def test_without_a_wish_a_full_dev_shm_is_passed_over_aloud(ram, tmp_path, monkeypatch, capsys):
    config = StoreConfig(kind="local", root="x")
    shm, temporary = tmp_path / "shm", tmp_path / "tmp"
    shm.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(staging, "_SHM", shm)
    monkeypatch.setattr(staging.tempfile, "gettempdir", lambda: str(temporary))
    assert staging_parent(config, 40 * MB) == shm and capsys.readouterr().out == ""
    (shm / "foreign").write_bytes(bytes(20 * MB))
    assert staging_parent(config, 40 * MB) == temporary
    assert "has no room" in capsys.readouterr().out


# ---------------------------------------------------------------- leftovers


def test_leftovers_of_a_killed_run_go_and_everything_else_stays(tmp_path):
    """Trap 34: leftovers of a killed run, our own living runs, foreign files."""
    code = (
        "import os, signal, sys; from pathlib import Path; from dflash_train.store.staging import staging_folder\n"
        "with staging_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'train-00000.safetensors').write_bytes(b'x' * 1000); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert python(code, tmp_path).returncode == -signal.SIGKILL
    (tmp_path / "deepspeed_allreduce_buffer_0").write_bytes(b"y" * 10)
    (left,) = tmp_path.glob(f"{PREFIX}*")
    assert (left / "train-00000.safetensors").exists()
    with staging_folder(tmp_path) as alive:
        assert not left.exists() and alive.exists()
        assert remove_leftovers(tmp_path) == 0 and alive.exists()  # ours is held
    assert [path.name for path in tmp_path.iterdir()] == ["deepspeed_allreduce_buffer_0"]


def test_a_folder_that_is_just_being_made_is_left_alone(tmp_path):
    starting = tmp_path / f"{PREFIX}host-1-abc"
    starting.mkdir()
    with open(starting / "starting", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remove_leftovers(tmp_path) == 0 and starting.exists()


# ---------------------------------------------------------------- uploader


def test_everything_queued_is_uploaded_when_the_block_ends(tmp_path):
    store, done = LocalStore(tmp_path / "store"), []
    with staging_folder(tmp_path) as folder, Uploader(store, folder, on_done=lambda m, s: done.append(m)) as uploader:
        for i in range(12):
            put(uploader, folder, f"train-{i:05d}")
    assert sorted(done, key=lambda m: m.shard_id) == list_markers(store)
    assert len(done) == 12 and uploader.staged_bytes == 0
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_a_store_that_fails_twice_is_tried_again(tmp_path):
    store = FlakyStore(tmp_path / "store", failures=2)
    with staging_folder(tmp_path) as folder, Uploader(store, folder, threads=1, backoff_s=0.01) as uploader:
        put(uploader, folder, "train-00000")
    assert store.puts == 3 and len(list_markers(store)) == 1


def test_a_store_that_always_fails_ends_the_run_naming_the_shard(tmp_path):
    """Trap 32: what could not be uploaded is named, and the run fails."""
    store = FlakyStore(tmp_path / "store", failures=-1)
    with (
        pytest.raises(UserError, match=r"train-00000(.|\n)*has no marker") as failed,
        staging_folder(tmp_path) as folder,
        Uploader(store, folder, threads=1, attempts=3, backoff_s=0.01) as uploader,
    ):
        put(uploader, folder, "train-00000")
    assert failed.value.exit_code == 1  # the same command may do better: launch/node.sh tries it again
    assert store.puts == 3 and store.list() == []


def test_a_refusal_is_not_tried_again_and_stops_the_producer(tmp_path):
    store = FlakyStore(tmp_path / "store", failures=-1, error=UserError("bucket", got="AccessDenied"))
    with (
        pytest.raises(UserError, match="AccessDenied") as refused,
        staging_folder(tmp_path) as folder,
        Uploader(store, folder, threads=1) as uploader,
    ):
        for i in range(1000):
            put(uploader, folder, f"train-{i:05d}")
            time.sleep(0.005)
    assert refused.value.exit_code == 2
    assert store.puts < 1000


def test_an_exception_in_the_producer_still_uploads_what_is_queued(tmp_path):
    """Trap 32: an exception."""
    store = LocalStore(tmp_path / "store")
    with (
        pytest.raises(ZeroDivisionError),
        staging_folder(tmp_path) as folder,
        Uploader(store, folder, threads=1) as uploader,
    ):
        for i in range(5):
            put(uploader, folder, f"train-{i:05d}")
        raise ZeroDivisionError
    assert len(list_markers(store)) == 5


def test_an_exception_and_a_dead_store_name_what_is_missing(tmp_path, capsys):
    """Trap 32: an exception, and uploads that fail."""
    store = FlakyStore(tmp_path / "store", failures=-1)
    with (
        pytest.raises(ZeroDivisionError),
        staging_folder(tmp_path) as folder,
        Uploader(store, folder, threads=1, attempts=1) as uploader,
    ):
        put(uploader, folder, "train-00000")
        raise ZeroDivisionError
    assert "not uploaded: train-00000" in capsys.readouterr().out


TERMINATED = """
import os, signal, sys, time
sys.path.insert(0, "tests")
from pathlib import Path
from helpers_store import make_shard
from dflash_train.store.local import LocalStore
from dflash_train.store.shard import ShardFacts, write_shard
from dflash_train.store.staging import staging_folder
from dflash_train.store.upload import Uploader, stop_on_signals

class Slow(LocalStore):
    def put_file(self, key, path):
        time.sleep(0.05)
        super().put_file(key, path)

root = Path(sys.argv[1])
store = Slow(root / "store")
with staging_folder(root) as folder, stop_on_signals() as check, Uploader(store, folder, threads=2) as uploader:
    for i in range(10_000):
        check()
        shard = make_shard(seed=i, prefix=f"{i}-")
        path = folder / f"train-{i:05d}.safetensors"
        uploader.reserve(1000)
        write_shard(path, shard)
        uploader.submit(path, ShardFacts.of(path.stem, shard), 1000)
        if i == 9:
            (root / "made").write_text("10")
            os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_uploads_what_is_queued_and_exits_143(tmp_path):
    """Trap 32: SIGTERM with uploads in the queue."""
    result = python(TERMINATED, tmp_path)
    assert result.returncode == 143, result.stderr
    assert len(list_markers(LocalStore(tmp_path / "store"))) == 10
    assert "SIGTERM: stopping" in result.stdout
    assert not list(tmp_path.glob(f"{PREFIX}*"))


@pytest.mark.parametrize("first", [None, ZeroDivisionError])
def test_a_run_that_is_told_to_end_during_the_last_uploads_waits_no_longer_than_exit_s(tmp_path, first, capsys):
    store, asked = Held(tmp_path / "store"), []

    def stop_check():
        asked.append(1)
        raise SystemExit(143)

    with (
        pytest.raises(first or SystemExit),
        staging_folder(tmp_path) as folder,
        Uploader(store, folder, threads=1, exit_s=0.1, stop_check=stop_check) as uploader,
    ):
        put(uploader, folder, "train-00000")
        late = Timer(20, setattr, (store, "open", True))  # a drain that asks nobody ends, too late
        late.start()
        if first:
            raise first
    late.cancel()
    assert asked and not store.open and "not uploaded: train-00000" in capsys.readouterr().out
    store.open = True


def test_no_upload_is_begun_or_tried_again_after_the_end(tmp_path):
    tried = []

    class Away(LocalStore):
        def put_file(self, key, path):
            tried.append(key)
            time.sleep(0.2)
            raise StoreUnavailable("store", got="HTTP 503")

    with (
        pytest.raises(SystemExit),
        staging_folder(tmp_path) as folder,
        Uploader(Away(tmp_path / "store"), folder, threads=1, exit_s=0.05, backoff_s=0.01) as uploader,
    ):
        for i in range(3):
            put(uploader, folder, f"train-{i:05d}")
        raise SystemExit(143)
    for thread in uploader._threads:
        thread.join(5)
        assert not thread.is_alive()
    assert len(tried) == 1


def test_a_second_signal_stops_at_once_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop, stop_on_signals(echo_s=0) as check:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not stopped")
    assert stop.value.code == 143 and check
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_a_launcher_passes_on_as_well_is_one_request():
    """Slurm signals every process of a job, node.sh too, which passes it on."""
    with pytest.raises(SystemExit) as stop, stop_on_signals(echo_s=60) as check:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        check()
    assert stop.value.code == 143


# ---------------------------------------------------------------- back-pressure


class Held(LocalStore):
    """Uploads wait until `open` is set."""

    open = False

    def put_file(self, key, path):
        while not self.open:
            time.sleep(0.005)
        super().put_file(key, path)


def test_a_full_folder_without_progress_is_an_error_with_the_numbers(ram, tmp_path):
    """Trap 34: an uploader that does not move at 80 %: a bounded wait."""
    store = Held(tmp_path / "store")
    with staging_folder(tmp_path) as folder, pytest.raises(UserError, match="no progress for 0 s") as error:
        ram["foreign"] = 30 * MB
        with Uploader(store, folder, threads=1, stall_s=0.2) as uploader:
            put(uploader, folder, "train-00000", reserve=10 * MB)
            try:
                uploader.reserve(30 * MB)
            finally:
                store.open = True
    assert re.search(r"of ours in 1 shard\(s\), 3.\.. MB of 64.0 MB free", str(error.value))
    assert len(list_markers(store)) == 1


def test_room_that_waits_for_its_own_capture_is_no_stall(ram, tmp_path):
    """While the target still loads, reserved room has no upload that could make progress."""
    with staging_folder(tmp_path) as folder, Uploader(LocalStore(tmp_path / "store"), folder, stall_s=0.2) as uploader:
        uploader.reserve(40 * MB)
        shard, path = make_shard(), folder / "train-00000.safetensors"

        def capture():
            write_shard(path, shard)
            uploader.submit(path, ShardFacts.of("train-00000", shard), 40 * MB)

        Timer(0.8, capture).start()
        uploader.reserve(30 * MB)
        assert uploader.paused_s < 0.4, "the store is not what was waited for"


def test_the_producer_waits_for_the_low_water_mark_and_goes_on(ram, tmp_path, capsys):
    """Trap 34: a full staging folder holds the producer until uploads have made room."""
    store = Held(tmp_path / "store")
    with staging_folder(tmp_path) as folder, Uploader(store, folder, threads=1, stall_s=30) as uploader:
        big = make_shard(lengths=(1000,) * 10, width=500)  # 10 MB
        for i in range(4):
            put(uploader, folder, f"train-{i:05d}", big, reserve=10 * MB)
        assert uploader.staged_bytes > 40 * MB
        waits = []

        def stop_check():
            waits.append(uploader.staged_bytes)
            store.open = True

        uploader.stop_check = stop_check
        uploader.reserve(12 * MB)  # 52 of 64 MB would be over 80 %
        assert waits[0] > 40 * MB and uploader.staged_bytes <= 0.6 * 64 * MB
        uploader._add(-12 * MB)
    out = capsys.readouterr().out
    assert "waiting for uploads" in out and "going on after" in out


def test_a_file_system_that_fills_up_between_check_and_write_leaves_nothing(tmp_path):
    """Trap 34: full between check and write; safetensors raises its own error."""
    code = (
        "import resource, signal, sys; sys.path.insert(0, 'tests'); from helpers_store import make_shard\n"
        "from dflash_train.store.shard import write_shard; from dflash_train.util.errors import UserError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "try: write_shard(sys.argv[1], make_shard(lengths=(500, 500)))\n"
        "except UserError as error: print(error); sys.exit(2)"
    )
    result = python(code, tmp_path / "a.safetensors")
    assert result.returncode == 2, result.stderr
    assert "could not be written" in result.stdout and "store.staging_dir" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_full_tmpfs_leaves_nothing_half_written(tmp_path):
    """Trap 34: a real tmpfs of 1 MB, where safetensors raises SafetensorError."""
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    unshare = ["unshare", "-rm", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*unshare, mount], capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs in a namespace of its own")
    code = (
        "import os, sys; sys.path.insert(0, 'tests'); from helpers_store import make_shard\n"
        "from dflash_train.store.shard import write_shard; from dflash_train.util.errors import UserError\n"
        "try: write_shard(sys.argv[1] + '/a.safetensors', make_shard(lengths=(500, 500), width=2000))\n"
        "except UserError as error: print(error, type(error.__cause__).__name__, os.listdir(sys.argv[1])); sys.exit(2)"
    )
    command = [*unshare, f'{mount} && "$@"', "sh", sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
    assert result.returncode == 2, result.stderr
    assert "No space left on device" in result.stdout and "SafetensorError []" in result.stdout


def test_a_full_disk_under_a_folder_store_leaves_no_object(tmp_path, monkeypatch):
    """Trap 34: the same in the store itself."""
    store = LocalStore(tmp_path / "store")
    (tmp_path / "a").write_bytes(b"x" * 1000)

    def full(source, target):
        Path(target).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        with pytest.raises(UserError, match="No space left on device"):
            store.put_file("shards/a", tmp_path / "a")
    assert store.list() == [] and not [p for p in store.folder.rglob("*") if p.is_file()]
