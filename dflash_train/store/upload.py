"""The threads that empty the staging folder into the bucket.

The producer waits while the folder is over its high-water mark, and learns at once of an upload that failed for good.
However a run ends (done, exception, SIGTERM), what was staged is uploaded or named: `Uploader` is a context manager.
"""

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_train.store.base import ObjectStore, StoreUnavailable
from dflash_train.store.markers import Marker, ShardFacts, marker_for, put_marker
from dflash_train.store.staging import HIGH_WATER, LOW_WATER, Room
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes
from dflash_train.util.log import say
from dflash_train.util.retry import backoff_s

MAX_BACKOFF_S = 60.0
ATTEMPTS_AT_EXIT = 3
_TICK_S = 0.5


class Uploader:
    """Bounded threads that publish staged shards: base.Sink for a bucket. Leaving the context manager drains the queue.

    `on_done(marker, seconds)` and `on_retry(what, why)` are called from the upload threads. `stop_check()` is called
    while the producer waits and raises when the run was asked to end.
    attempts: of each request, with pauses that grow from backoff_s to a minute (24: a quarter of an hour without a
    network); a run that ends by an exception tries no more than 3 times. stall_s: how long a full staging folder may
    show no progress before the producer gets an error instead of waiting on; longer than the attempts take, whose error
    says more. paused_s: seconds the producer has waited here. exit_s: so long a run that was told to end (SystemExit)
    waits for its uploads; None: until they are done.
    """

    def __init__(
        self, store: ObjectStore, folder: Path, *, threads: int = 4, attempts: int = 24, backoff_s: float = 1.0,
        stall_s: float = 1800.0, exit_s: float | None = None,
        on_done: Callable[[Marker, float], None] = lambda marker, seconds: None,
        on_retry: Callable[[str, str], None] = lambda what, why: None, stop_check: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        self.store, self.folder, self.room = store, folder, Room(folder)
        self.attempts, self.backoff_s, self.stall_s, self.exit_s = attempts, backoff_s, stall_s, exit_s
        self.on_done, self.on_retry, self.stop_check = on_done, on_retry, stop_check
        self.staged_bytes = 0  # ours: reserved or written, not yet uploaded
        self._written_bytes = 0  # the part of it that lies in the folder
        self.failed: dict[str, Exception] = {}
        self.paused_s, self._started = 0.0, time.monotonic()
        self._pending: set[str] = set()
        self._in_a_hurry = False  # the run ends by an exception
        self._closed = False  # nothing new is begun
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        # Daemons: a second signal during the drain ends the process, and `__exit__` has named what is missing.
        self._threads = [threading.Thread(target=self._work, daemon=True, name=f"upload-{i}") for i in range(threads)]

    def __enter__(self) -> "Uploader":
        self._started = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._in_a_hurry = kind is not None
        if kind is not None and self._pending:
            say(f"stopping ({kind.__name__}): uploading {len(self._pending)} staged shard(s) first")
        asked = None
        try:
            asked = self._drain_at_exit(kind)
        finally:
            self._closed = True
            if self._pending or self.failed:
                say(f"not uploaded: {', '.join(sorted(self._pending | self.failed.keys()))}")
            for _ in self._threads:
                self._queue.put(None)
            self._abort_unfinished()
        if kind is None:
            self.raise_failed()
            if asked is not None:
                raise asked

    def _drain_at_exit(self, kind: type[BaseException] | None) -> BaseException | None:
        """Upload what is left; returns what asked the run to end meanwhile. From then on exit_s bounds it."""
        if kind is SystemExit:
            self.drain(self.exit_s)
            return None
        while not self.drain(_TICK_S):
            try:
                self.stop_check()
            except BaseException as asked:
                self._in_a_hurry = True
                self.drain(self.exit_s)
                return asked
        return None

    @property
    def pending(self) -> list[str]:
        """Ids of shards that were submitted and have no marker yet, sorted."""
        with self._changed:
            return sorted(self._pending)

    @property
    def is_behind(self) -> bool:
        """What fills the folder waits for the store, or is not ours; else it is only room for shards to be captured."""
        return bool(self._pending) or self.staged_bytes == 0

    @property
    def paused_share(self) -> float:
        """Share of the time since the start in which the producer waited for room: 0 = the store keeps up."""
        return self.paused_s / max(time.monotonic() - self._started, 1e-9)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is pending; False when some is left after timeout_s."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self._pending:
                left = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def reserve(self, num_bytes: int) -> None:
        """Wait until a shard of `num_bytes` may be staged.

        Raises the error of a failed upload, or UserError with the numbers after `stall_s` without progress.
        """
        self.raise_failed()
        if not self._admits(num_bytes, HIGH_WATER):
            started = time.monotonic()
            say(f"staging: {human_bytes(self.staged_bytes)} of ours in {self.folder.parent}, {self.room}: "
                "waiting for uploads")  # fmt: skip
            self._wait_for_room(num_bytes)
            say(
                f"staging: going on after {time.monotonic() - started:.0f} s, paused {self.paused_share:.0%} of the run"
            )
        self._add(num_bytes)

    def _wait_for_room(self, num_bytes: int) -> None:
        progress_at, last = time.monotonic(), (self.staged_bytes, self.room.free())
        while not self._admits(num_bytes, LOW_WATER):
            since, behind = time.monotonic(), self.is_behind
            with self._changed:
                self._changed.wait(min(1.0, self.stall_s / 10))
            self.paused_s += time.monotonic() - since if behind else 0.0
            self.raise_failed()
            self.stop_check()
            now = (self.staged_bytes, self.room.free())
            if now[0] < last[0] or now[1] > last[1] or not behind:  # not while the target still loads
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
            may_pass = isinstance(error, (StoreUnavailable, ConnectionError, TimeoutError))
            raise (StoreUnavailable if may_pass else UserError)(
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
        while (item := self._queue.get()) is not None and not self._closed:
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
        """Object, then marker, each tried again where that may help. An object that is there is not sent twice."""
        marker = marker_for(path, facts)
        self._try(f"upload of {facts.shard_id}", lambda: self.store.put_file(marker.key, path))
        return self._try(f"marker of {facts.shard_id}", lambda: put_marker(self.store, marker))

    def _try(self, what: str, call: Callable):
        attempt = 1
        while True:
            try:
                return call()
            except (StoreUnavailable, ConnectionError, TimeoutError) as error:
                attempts = min(self.attempts, ATTEMPTS_AT_EXIT) if self._in_a_hurry else self.attempts
                if attempt >= attempts or self.failed or self._closed:  # one shard has found out, or it is too late
                    raise
                pause = backoff_s(attempt, self.backoff_s, MAX_BACKOFF_S)
                attempt += 1
                why = f"{error.got}" if isinstance(error, UserError) else str(error)
                say(f"{what} failed ({why}); try {attempt} of {attempts} in {pause:.1f} s")
                self.on_retry(what, why)
                self._pause(pause)

    def _pause(self, seconds: float) -> None:
        """In pieces, so that the end of the run is noticed."""
        whole, rest = divmod(seconds, _TICK_S)
        for piece in [rest, *[_TICK_S] * int(whole)]:
            time.sleep(piece)
            if self._in_a_hurry or self.failed:
                return

    def _abort_unfinished(self) -> None:
        """Parts of uploads that will not be completed cost money until somebody deletes them."""
        try:
            count = self.store.abort_unfinished()
        except UserError as error:
            say(f"unfinished uploads are left in {self.store.url} ({error.got}): verify=true drops them after a day")
            return
        if count:
            say(f"aborted {count} unfinished upload(s)")


@contextmanager
def stop_on_signals(echo_s: float = 2.0) -> Iterator[Callable[[], None]]:
    """Yields `check()`, which raises SystemExit(128 + n) once SIGTERM or SIGINT came; a second signal raises at once.

    Raising only where the producer asks keeps a signal from cutting a hand-over in half.
    echo_s: signals so close after the first are the same request. Slurm and systemd signal every process of a job, and
    launch/node.sh, one of them, passes on what it gets.
    """
    asked: list[int] = []
    asked_at = 0.0

    def on_signal(number, frame):
        nonlocal asked_at
        if asked and time.monotonic() - asked_at < echo_s:
            return
        asked.append(number)
        if len(asked) > 1:
            raise SystemExit(128 + number)
        asked_at = time.monotonic()
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
