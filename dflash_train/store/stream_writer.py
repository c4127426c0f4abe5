"""Extraction's side of a stream: what is made next, and the ring that it goes into.

The ring holds what fits of the line from training's first needed place on, and nothing else: whatever happened before
(a trainer that came back from an older checkpoint, say), what is missing there is made in order, the rest goes.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic

from dflash_train.store.shard import ShardFacts, publish_shard
from dflash_train.store.slices import ShardPlan
from dflash_train.store.stream import READER, WRITER, Beat, OtherSideAway, Peer, Seldom, StreamStore
from dflash_train.store.stream_line import Line, StreamShard, too_small
from dflash_train.store.target_files import has_target_files
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes
from dflash_train.util.log import duration, say

POLL_S = 0.1
START = "deepspeed launch/train.py store=stream, with the same data and target, on GPUs that extraction does not use"


class Ring:
    """base.Sink for shards that training takes from memory, and the source of what is to be made (`take`).

    heldout: shards that are still missing; they are made first, and stay. A context manager: leaving it without an
    error empties the ring. paused_s: seconds in which nothing more was handed out since the ring was full.
    """

    def __init__(self, store: StreamStore, shards: Sequence[StreamShard], heldout: Sequence[ShardPlan],
                 stop_check: Callable[[], None] = lambda: None):  # fmt: skip
        self.store, self.shards, self.heldout, self.stop_check = store, shards, heldout, stop_check
        self.failed: dict[str, Exception] = {}
        self.room, self.total = self, store.max_bytes  # for the desk, to which this is a staging folder
        self.staged_bytes = self.peak_bytes = self.made = 0
        self.paused_s, self.waiting_since, self._started = 0.0, None, monotonic()
        self._line: Line | None = None
        self._session: str | None = None
        self._position = self._end = 0
        self._in_hand: dict[str, int | None] = {}  # shard id -> place (held-out: None) of what is being made
        self._changed, self._voice, self._away_since = threading.Condition(), Seldom(), monotonic()
        self._ready = False  # training has all that it needs before it begins
        self._peer = Peer(store, READER)
        record, is_there = self._peer.look()
        self._stale = None if is_there else record.get("session")  # of a training that ended before our time
        self._beat: Beat | None = None

    def __enter__(self) -> "Ring":
        self._beat = Beat(self.store, WRITER, max_bytes=self.store.max_bytes, state="loading the target")
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is None:
            for path, _ in self.store.ring_files().values():
                path.unlink(missing_ok=True)
        self._beat.close(state="done" if kind is None else f"ended by {kind.__name__}")

    # ------------------------------------------------------------ what is made next

    def take(self) -> Iterator[ShardPlan]:
        """Held-out shards, then those of the line, as training goes on; ends when training is done.

        Raises UserError for a ring that is too small for that training, OtherSideAway when none comes for
        store.options.wait_s, and what `stop_check` raises.
        """
        for shard in self.heldout:
            self._in_hand[shard.shard_id] = None
            yield shard
        while not self._hear():
            place = self._next_place()
            if place is None:
                self._wait()
                continue
            self.waiting_since = None
            self._beat.note(state=f"at place {place:,} of {self._end:,}, paused {self.paused_share:.0%} of the time")
            yield self._line.at(place)

    def _hear(self) -> bool:
        """Listen to training; True when it is done."""
        self.stop_check()
        record, is_there = self._peer.look()
        if is_there or self._in_hand or not self._is_ready():
            self._away_since = monotonic()
        session = record.get("session")
        if session is None or session == self._stale:
            return False
        if is_there and session != self._session:
            self._begin(record)
        if session == self._session:
            self._position = record["position"]
        return bool(record.get("done"))

    def _begin(self, record: dict) -> None:
        """A training has come, or come back."""
        if record["need_bytes"] > self.store.max_bytes:
            raise UserError("store.max_bytes", **too_small(record["need_bytes"], self.store.max_bytes))
        self._session, self._line = record["session"], Line(self.shards, record["seed"])
        self._position, self._end = record["position"], record["end"]
        say(f"stream: training is there, at place {self._position:,} of {self._end:,} in its line of shards")

    def _next_place(self) -> int | None:
        """Tidy the ring; the first place that is missing in it, where it fits, as in hand."""
        if self._line is None:
            return None
        with self._changed:
            stop = self._line.stop(self._position, self._end, self.store.max_bytes)
            there = self._tidy(stop)
            in_hand = [self._line.shards_by_id[shard_id] for shard_id, place in self._in_hand.items()
                       if place is not None]  # fmt: skip
            self._count(sum(there.values()) + sum(shard.num_bytes for shard in in_hand))
            known = there.keys() | set(self._in_hand.values())
            place = next((place for place in range(self._position, stop) if place not in known), None)
            if place is None:
                return None
            shard = self._line.at(place)
            # What is in hand may be for places that are not wanted any more: it goes first. And a shard of a small set
            # may be in hand for another epoch.
            if self.staged_bytes + shard.num_bytes > self.store.max_bytes or shard.shard_id in self._in_hand:
                return None
            self._in_hand[shard.shard_id] = place
            self._count(self.staged_bytes + shard.num_bytes)
            return place

    def _count(self, num_bytes: int) -> None:
        """In the ring or on its way there."""
        self.staged_bytes, self.peak_bytes = num_bytes, max(self.peak_bytes, num_bytes)

    def _tidy(self, stop: int) -> dict[int, int]:
        """Remove what training has used up, and what keeps out what comes before it -> place: bytes of the rest."""
        there = {}
        for place, (path, size) in self.store.ring_files().items():
            if self._position <= place < stop and path == self.store.ring_path(place, self._line.at(place).shard_id):
                there[place] = size
            else:
                path.unlink(missing_ok=True)
        return there

    def _wait(self) -> None:
        since, full = monotonic(), self._line is not None and not self._reaches_the_end()
        self.waiting_since = self.waiting_since or since
        with self._changed:
            self._changed.wait(POLL_S)
        away_s, limit = monotonic() - self._away_since, self.store.options.wait_s
        if away_s > limit:
            raise OtherSideAway(f"{self.store.url}: training", got=f"none runs, for {duration(away_s)}",
                                want=f"one within {duration(limit)} (store.options.wait_s)", fix=START)  # fmt: skip
        if away_s > 1:
            self._beat.note(state="waiting for training")
            self._voice.say(f"stream: waiting for training: {START}", self._away_since)
        elif full:
            self.paused_s += monotonic() - since
            self._voice.say(
                f"stream: the ring is full ({human_bytes(self.staged_bytes)} from place {self._position:,} on), as "
                f"training is slower: paused {self.paused_share:.0%} of the time",
                self.waiting_since,
            )  # fmt: skip

    def _reaches_the_end(self) -> bool:
        return self._line.stop(self._position, self._end, self.store.max_bytes) == self._end

    def _is_ready(self) -> bool:
        self._ready = self._ready or has_target_files(self.store)
        return self._ready

    # ------------------------------------------------------------ what was made

    @property
    def paused_share(self) -> float:
        """Share of the time since the start: 0 = training keeps up."""
        return self.paused_s / max(monotonic() - self._started, 1e-9)

    @property
    def pending(self) -> list[str]:
        """Nothing: what is handed over is in the ring at once."""
        return []

    def is_waiting(self, seconds: float) -> bool:
        """Nothing was handed out for so long."""
        since = self.waiting_since
        return since is not None and monotonic() - since > seconds

    def free(self) -> int:
        """Room for shards that are not made yet."""
        return max(0, self.total - self.staged_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Nothing to wait for: `take` gives out what has room."""

    def submit(self, path: Path, facts: ShardFacts, reserved_bytes: int) -> None:
        """Into the ring by its place, without a copy; a held-out shard into the store, with its marker."""
        place = self._in_hand[facts.shard_id]
        if place is None:
            publish_shard(self.store, path, facts)
            path.unlink()
        with self._changed:
            if place is not None:
                os.replace(path, self.store.ring_path(place, facts.shard_id))
            del self._in_hand[facts.shard_id]
            self.made += 1
            self._changed.notify_all()

    def drain(self, timeout_s: float | None = None) -> bool:
        return True

    def raise_failed(self) -> None:
        """Nothing fails behind the producer's back."""

    def summary(self) -> str:
        held = f"{human_bytes(self.peak_bytes)} of {human_bytes(self.total)}"
        return (f"stream: {self.made:,} shards made; the ring held at most {held}; paused {self.paused_share:.0%} of "
                "the time, since training was slower")  # fmt: skip
