"""The staging folder between the producer and the bucket: what it may hold, and what killed runs left there."""

import fcntl
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from dflash_train.config import StoreConfig
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes
from dflash_train.util.log import say

HIGH_WATER, LOW_WATER = 0.8, 0.6
PREFIX = "dflash_train-staging-"
_SHM = Path("/dev/shm")


def staging_parent(config: StoreConfig, need_bytes: int) -> Path:
    """store.staging_dir, else /dev/shm where `need_bytes` fit below its high-water mark, else the temporary folder.

    Raises UserError when the folder that was asked for cannot hold `need_bytes` (the largest shard).
    """
    if config.staging_dir is not None:
        parent = Path(config.staging_dir)
        parent.mkdir(parents=True, exist_ok=True)
        Room(parent).require(need_bytes)
        return parent
    if _SHM.is_dir() and os.access(_SHM, os.W_OK) and Room(_SHM).fits(need_bytes):
        return _SHM
    parent = Path(tempfile.gettempdir())
    say(f"staging: {_SHM} has no room for shards of {human_bytes(need_bytes)}; using {parent}")
    Room(parent).require(need_bytes)
    return parent


class Room:
    """How much the staging folder may hold.

    On a RAM disk everybody's bytes together stay below 80 % of its size, and ours below 80 % of the memory that was
    free at the start. On a disk, which may well be 85 % full and have a terabyte left, ours stay below 80 % of what was
    free at the start, and a new file takes at most 80 % of what is free now.
    """

    def __init__(self, folder: Path):
        self.folder, self.ram = folder, _is_ram(folder)
        usage = shutil.disk_usage(folder)
        self.total = usage.total
        self.own_size = min(usage.total, _free_memory()) if self.ram else usage.free

    def free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def fits(self, need_bytes: int) -> bool:
        """Below the high-water mark with `need_bytes` more, whoever fills the rest."""
        free = self.free()
        room = free - (1 - HIGH_WATER) * self.total if self.ram else HIGH_WATER * free
        return need_bytes <= room and need_bytes <= HIGH_WATER * self.own_size

    def require(self, need_bytes: int) -> None:
        """Raise UserError with the numbers unless `need_bytes` fit now."""
        if not self.fits(need_bytes):
            raise UserError(
                f"staging folder {self.folder}",
                got=f"{self}, to be filled to {HIGH_WATER:.0%} at most",
                want=f"room for one shard of {human_bytes(need_bytes)}",
                fix="store.staging_dir=<a larger folder>, a smaller store.shard_bytes, or a smaller extract.max_tokens",
            )

    def __str__(self) -> str:
        memory = f", {human_bytes(self.own_size)} of memory" if self.ram and self.own_size < self.total else ""
        return f"{human_bytes(self.free())} of {human_bytes(self.total)} free{memory}"


def _free_memory() -> int:
    """Bytes this process may still take: what the machine has available, and what its control group allows."""
    limits = [psutil.virtual_memory().available]
    try:
        limit, current = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        limits += [int(limit) - int(current)] if limit != "max" else []
    except OSError:  # no control group, or its first version
        pass
    return min(limits)


def _is_ram(folder: Path) -> bool:
    """The file system under `folder` is a tmpfs (longest mount point that holds it)."""
    real = str(folder.resolve())
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text().splitlines() if os.path.exists("/proc/mounts") else ():
        point, fs = line.split()[1:3]
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, fs
    return kind in ("tmpfs", "ramfs")


# ---------------------------------------------------------------- our folder, and those of killed runs


@contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """A folder of our own in `parent`, held by a file lock and removed at the end; leftovers of dead runs go first.

    The lock, not the process id, says who is alive: it also holds across containers that share /dev/shm.
    """
    remove_leftovers(parent)
    folder = parent / f"{PREFIX}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    with open(folder / "starting", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / "starting", folder / "lock")  # from here on the folder can be judged
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(parent: Path) -> int:
    """Remove staging folders whose run is dead; returns the bytes freed. Other people's files are not touched."""
    freed = 0
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            with open(folder / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                freed += sum(path.stat().st_size for path in folder.iterdir())
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # alive, just starting, or another user's
    if freed:
        say(f"staging: removed {human_bytes(freed)} that a killed run had left in {parent}; those shards are redone")
    return freed
