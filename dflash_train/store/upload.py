"""The threads that empty the staging folder into the bucket.

The producer waits while the folder is over its high-water mark, and learns at once of an upload that failed for good.
However a run ends (done, exception, SIGTERM), what was staged is uploaded or named: `Uploader` is a context manager.
"""

import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_train.store.base import ObjectStore, StoreUnavailable
from dflash_train.store.shard import Marker, ShardFacts, publish_shard
from dflash_train.store.staging import HIGH_WATER, LOW_WATER, Room
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes
from dflash_train.util.log import say


class Uploader:
    """Bounded threads that publish staged shards. Use as a context manager; leaving it drains the queue.

    `on_done(marker, seconds)` is called from a worker thread after each marker. `stop_check()` is called while the
    producer waits and raises when the run was asked to end. stall_s: how long a full staging folder may show no
    progress before the producer gets an error instead of waiting on.
    """

    def __init__(
        self, store: ObjectStore, folder: Path, *, threads: int = 4, attempts: int = 5, backoff_s: float = 1.0,
        stall_s: float = 600.0, on_done: Callable[[Marker, float], None] = lambda marker, seconds: None,
        stop_check: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self.store, self.folder, self.room = store, folder, Room(folder)
        self.attempts, self.backoff_s, self.stall_s = attempts, backoff_s, stall_s
        self.on_done, self.stop_check = on_done, stop_check
        self.staged_bytes = 0  # ours: reserved or written, not yet uploaded
        self._written_bytes = 0  # the part of it that lies in the folder
        self.failed: dict[str, Exception] = {}
        self._pending: set[str] = set()
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        # Daemons: a second signal during the drain ends the process, and `__exit__` has named what is missing.
        self._threads = [threading.Thread(target=self._work, daemon=True, name=f"upload-{i}") for i in range(threads)]

    def __enter__(self) -> "Uploader":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None and self._pending:
            say(f"stopping ({kind.__name__}): uploading {len(self._pending)} staged shard(s) first")
        try:
            with self._changed:
                while self._pending:
                    self._changed.wait(1.0)
        finally:
            if self._pending or self.failed:
                say(f"not uploaded: {', '.join(sorted(self._pending | self.failed.keys()))}")
            for _ in self._threads:
                self._queue.put(None)
        if kind is None:
            self.raise_failed()

    def reserve(self, num_bytes: int) -> None:
        """Wait until a shard of `num_bytes` may be staged.

        Raises the error of a failed upload, or UserError with the numbers after `stall_s` without progress.
        """
        self.raise_failed()
        if self._admits(num_bytes, HIGH_WATER):
            return self._add(num_bytes)
        started = progress_at = time.monotonic()
        last = (self.staged_bytes, self.room.free())
        say(f"staging: {human_bytes(last[0])} of ours in {self.folder.parent}, {self.room}: waiting for uploads")
        while not self._admits(num_bytes, LOW_WATER):
            with self._changed:
                self._changed.wait(min(1.0, self.stall_s / 10))
            self.raise_failed()
            self.stop_check()
            now = (self.staged_bytes, self.room.free())
            if now[0] < last[0] or now[1] > last[1]:
                progress_at = time.monotonic()
            elif time.monotonic() - progress_at > self.stall_s:
                raise UserError(
                    f"staging folder {self.folder.parent}",
                    got=f"no progress for {self.stall_s:.0f} s: {human_bytes(now[0])} of ours in {len(self._pending)} "
                    f"shard(s), {self.room}",
                    want=f"room for {human_bytes(num_bytes)}, the folder filled to {HIGH_WATER:.0%} at most",
                    fix="look at the store and at who fills that folder; or store.staging_dir=<a larger folder>",
                )
            last = now
        say(f"staging: going on after {time.monotonic() - started:.0f} s")
        return self._add(num_bytes)

    def submit(self, path: Path, facts: ShardFacts, reserved_bytes: int) -> None:
        """Hand over a staged file; its true size replaces what was reserved. Returns at once."""
        num_bytes = path.stat().st_size
        with self._changed:
            self.staged_bytes += num_bytes - reserved_bytes
            self._written_bytes += num_bytes
            self._pending.add(facts.shard_id)
            self._queue.put((path, facts, num_bytes))

    def raise_failed(self) -> None:
        """Raise for the first shard that could not be uploaded, naming all of them."""
        if self.failed:
            error = next(iter(self.failed.values()))
            raise UserError(
                f"upload to {self.store.url}", got=str(error).replace("\n", " "),
                want=f"{len(self.failed)} shard(s) uploaded: {', '.join(sorted(self.failed))}",
                fix="run extract again once the store takes them: only what has no marker is done",
            ) from error  # fmt: skip

    def _admits(self, num_bytes: int, level: float) -> bool:
        """Ours below the level (or nothing of ours is left to wait for), everyone's below the high-water mark."""
        ours = self.staged_bytes + num_bytes <= level * self.room.own_size or self.staged_bytes == 0
        return ours and self.room.fits(num_bytes + self.staged_bytes - self._written_bytes)

    def _add(self, num_bytes: int) -> None:
        with self._changed:
            self.staged_bytes += num_bytes
            self._changed.notify_all()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            path, facts, num_bytes = item
            started = time.monotonic()
            try:
                marker = self._publish(path, facts)
                self.on_done(marker, time.monotonic() - started)
            except Exception as error:  # whatever it is, the producer must learn of it
                self.failed[facts.shard_id] = error
            path.unlink(missing_ok=True)
            with self._changed:
                self._pending.discard(facts.shard_id)
                self.staged_bytes -= num_bytes
                self._written_bytes -= num_bytes
                self._changed.notify_all()

    def _publish(self, path: Path, facts: ShardFacts) -> Marker:
        """publish_shard, tried again with growing pauses where that may help."""
        for attempt in range(1, self.attempts + 1):
            try:
                return publish_shard(self.store, path, facts)
            except (StoreUnavailable, ConnectionError, TimeoutError) as error:
                if attempt == self.attempts or self.failed:  # one shard has found out that the store stays away
                    raise
                pause = self.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                say(f"upload of {facts.shard_id} failed ({str(error).splitlines()[0]}); try {attempt + 1} of "
                    f"{self.attempts} in {pause:.1f} s")  # fmt: skip
                time.sleep(pause)
        raise AssertionError("unreachable")


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], None]]:
    """Yields `check()`, which raises SystemExit(128 + n) once SIGTERM or SIGINT came; a second signal raises at once.

    Raising only where the producer asks keeps a signal from cutting a hand-over in half.
    """
    asked: list[int] = []

    def on_signal(number, frame):
        asked.append(number)
        if len(asked) > 1:
            raise SystemExit(128 + number)
        say(f"{signal.Signals(number).name}: stopping after this batch (again to stop at once)")

    def check() -> None:
        if asked:
            raise SystemExit(128 + asked[0])

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
