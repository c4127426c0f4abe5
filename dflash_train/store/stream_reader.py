"""Training's side of a stream: shards are opened in the ring as they come, and given up once all ranks are past."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_train.records import HiddenShard
from dflash_train.store.markers import Marker
from dflash_train.store.order import Row, RowOrder
from dflash_train.store.shard import MANIFEST, read_manifest, read_shard
from dflash_train.store.stream import (
    PLAN,
    READER,
    WRITER,
    Beat,
    OtherSideAway,
    Peer,
    Seldom,
    StopAsked,
    StreamStore,
    planned_marker,
    ring_key,
)
from dflash_train.store.stream_line import Line, Uses, at_places, too_small
from dflash_train.store.target_files import has_target_files
from dflash_train.util.dist import is_main
from dflash_train.util.errors import UserError
from dflash_train.util.log import duration, say

POLL_S = 0.05
START = "python -m dflash_train.extract store=stream, with the same data and target, on GPUs that training does not use"


@dataclass(frozen=True)
class Stream:
    """What training knows of its stream before it begins."""

    line: Line
    uses: Uses


def wait_for_extraction(store: StreamStore) -> None:
    """Until manifest, plan, held-out shards and the target's files are there: either side may be started first.
    Raises OtherSideAway after store.options.wait_s."""
    peer, wait = Peer(store, WRITER), Patience(store, "what training needs first", Seldom())
    while missing := _missing(store):
        wait.a_moment(peer, 5 * POLL_S, lacks=missing)


def _missing(store: StreamStore) -> str:
    """What extraction has still to leave before training may begin; empty = nothing."""
    if any(store.size(key) is None for key in (MANIFEST, PLAN, WRITER)):
        return "plan"
    held_out = read_manifest(store)["shards"]["heldout"]
    if (there := len(store.list("markers/heldout-"))) < held_out:
        return f"held-out shards ({there} of {held_out})"
    return "" if has_target_files(store) else "target's embedding and head"


def plan_stream(store: StreamStore, order: RowOrder, seed: int, num_steps: int) -> Stream:
    """The line and its uses. Raises UserError where the ring is too small for training's steps."""
    line = Line(store.read_plan(), seed)
    uses = Uses(order, line, num_steps)
    max_bytes = Peer(store, WRITER).look()[0].get("max_bytes", store.max_bytes)
    if uses.need_bytes > max_bytes:
        raise UserError("store.max_bytes", **too_small(uses.need_bytes, max_bytes))
    return Stream(line, uses)


class Patience:
    """One wait for extraction; it is said every so often, and ended by an error when it lasts too long."""

    def __init__(self, store: StreamStore, what: str, voice: Seldom):
        self.store, self.what, self.voice, self.since = store, what, voice, time.monotonic()

    def a_moment(self, peer: Peer, seconds: float, lacks: str = "") -> None:
        """lacks: what of `what` is not there yet."""
        record, is_there = peer.look()
        waited, limit = time.monotonic() - self.since, self.store.options.wait_s
        state = f"extraction is there ({record.get('state', '')})" if is_there else "no extraction runs"
        if waited > limit:
            raise OtherSideAway(
                f"{self.store.url}: {self.what}", got=f"no {lacks or 'such file'} after {duration(waited)}; {state}",
                want=f"it within {duration(limit)} (store.options.wait_s)",
                fix="see what extraction says; the same command goes on from the last checkpoint" if is_there
                else f"{START}; training goes on from its last checkpoint",
            )  # fmt: skip
        lacks = f" ({lacks})" if lacks else ""
        self.voice.say(f"waiting for {self.what}{lacks}; {state}" + ("" if is_there else f": {START}"), self.since)
        time.sleep(seconds)


class StreamCache:
    """`get` as of loader.ShardCache, for the markers of `Feed` (by place) and of held-out shards. Shards are mapped
    where they lie, on every rank; nothing is copied. waited_s: what its threads have waited, together."""

    def __init__(self, store: StreamStore):
        self.store, self.waited_s = store, 0.0
        self.stop_asked: Callable[[], bool] = lambda: False  # training was told to stop
        self._peer, self._closed = Peer(store, WRITER), threading.Event()
        self._open: dict[str, HiddenShard] = {}
        self._lock, self._voice = threading.Lock(), Seldom()

    def get(self, marker: Marker) -> HiddenShard:
        """Wait until the shard is there, and open it.

        Raises OtherSideAway after store.options.wait_s, StopAsked when training is told to stop meanwhile, and
        UserError naming the file when it is not what was planned.
        """
        with self._lock:
            if marker.key in self._open:
                return self._open[marker.key]
        path, name = Path(self.store.folder, marker.key), f"{self.store.url}/{marker.key}"
        since, wait = time.monotonic(), Patience(self.store, marker.key, self._voice)
        while (shard := self._read(path, name)) is None:
            if self._closed.is_set() or self.stop_asked():
                raise StopAsked
            wait.a_moment(self._peer, POLL_S)
        if list(shard.sample_ids) != list(marker.sample_ids):
            raise UserError(name, got="other samples than planned", want=f"those of {marker.shard_id} in {PLAN}")
        with self._lock:
            self.waited_s += time.monotonic() - since
            return self._open.setdefault(marker.key, shard)

    def _read(self, path: Path, name: str) -> HiddenShard | None:
        if not path.exists():
            return None
        try:
            return read_shard(path, name)
        except UserError:
            if not path.exists():  # it was removed between the look and the opening, and will be made again
                return None
            raise

    def drop(self, before: str) -> None:
        """Close the ring's shards whose key is less than `before`."""
        with self._lock:
            for key in [key for key in self._open if key.startswith("ring/") and key < before]:
                del self._open[key]

    def close(self) -> None:
        """Who waits in `get` gets StopAsked."""
        self._closed.set()


class Feed:
    """Rows of the coming steps out of a stream, from `step` on: cache, markers and step_rows as RowReader wants them;
    `advance` after each step. On rank 0 it is training's sign of life, too."""

    def __init__(self, store: StreamStore, stream: Stream, order: RowOrder, step: int):
        self.store, self.stream, self.order, self.cache = store, stream, order, StreamCache(store)
        self.base, uses = stream.uses.first_needed(step), stream.uses
        self.markers = self._markers()
        self.beat = None
        if is_main():
            self.beat = Beat(store, READER, seed=stream.line.seed, end=uses.end, need_bytes=uses.need_bytes,
                             position=self.base, step=step)  # fmt: skip

    def _markers(self) -> list[Marker]:
        """By place, from the first one that is needed; a shard's sample ids are there once."""
        planned = {shard.shard_id: planned_marker(shard) for shard in self.stream.line.shards}
        places = range(self.base, self.stream.uses.end)
        ids = (self.stream.line.at(place).shard_id for place in places)
        return [replace(planned[shard_id], key=ring_key(place, shard_id)) for place, shard_id in zip(places, ids)]

    def stops_when(self, asked: Callable[[], bool]) -> None:
        """Who waits for rows gives up when `asked` says so."""
        self.cache.stop_asked = asked

    def step_rows(self, step: int) -> list[Row]:
        return [at_places(row, self.stream.line, self.base) for row in self.order.step_rows(step)]

    def advance(self, step: int) -> None:
        """`step` steps are done here, so all ranks have left the one before: give up what only that and earlier ones
        used."""
        position = max(self.base, self.stream.uses.first_needed(step - 1))
        self.cache.drop(before=ring_key(position, ""))
        if self.beat is not None:
            self.beat.note(step=step)
            if position != self.beat.facts["position"]:
                self.beat.tell(position=position)

    def close(self, done: bool) -> None:
        """done: training needs nothing any more, and extraction may end."""
        self.cache.close()
        if self.beat is not None:
            self.beat.close(done=done)
            say(f"stream: waited {self.cache.waited_s:.0f} s for shards that were not there yet")
        self.store.unlock("training")
