"""Locks on files: one process at a time, on one machine or on several that share a disk. A lock goes with its process,
however that ends."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dflash_train.util.errors import UserError
from dflash_train.util.log import duration, say

_TICK_S, _SAY_EVERY_S = 0.2, 60.0


def try_lock(file: IO, how: int = fcntl.LOCK_EX) -> bool:
    """Lock the open file as long as it stays open; False where another one has it."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


@contextmanager
def one_at_a_time(path: Path, what: str, patience_s: float) -> Iterator[None]:
    """Hold the lock file `path`, waiting while another process does; says for `what`, and who has it.

    The caller must look again, once it has the lock, whether there is still something to do. Raises UserError after
    patience_s seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        started, said = time.monotonic(), None
        while not try_lock(file):
            waited_s, holder = time.monotonic() - started, path.read_text("utf-8").strip() or "another process"
            if waited_s > patience_s:
                raise UserError(what, got=f"{holder} is at it, for more than {duration(waited_s)}", want="its end",
                                fix=f"wait for it or end it, then run the command again (lock: {path})")  # fmt: skip
            if said is None or waited_s - said > _SAY_EVERY_S:
                said = waited_s
                say(f"waiting for {what}: {holder} is at it; {duration(waited_s)} of at most {duration(patience_s)}")
            time.sleep(_TICK_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
