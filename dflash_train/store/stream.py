"""A stream: a store for those who cannot keep tens of terabytes. Extraction and training run at the same time, on
different GPUs of one host, and share a folder in memory that holds only the shards which training needs next.

manifest.json, target/, heldout shards and their markers    as in any store (shard.py); they stay
stream/plan.jsonl      every train shard before it is made: its samples, their lengths, its bytes as a file
ring/<place>-<id>.safetensors    the ring: train shards that are made and not yet used up
stream/reader.json     training: its seed, the first place that it still needs, a sign of life (stream_reader.py)
stream/writer.json     extraction: the ring's size, how far it is, a sign of life (stream_writer.py)

Both sides know from the plan and training's seed in which order shards are used up, through all epochs: the line
(stream_line.py). Nothing else passes between them: training says how far it is, extraction keeps in the ring what comes
next, as much as fits, and removes the rest. So either side may end and come back; every epoch is extracted anew.
"""

import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import IO

from dflash_train.config import StoreConfig
from dflash_train.store.hosts import process_is_gone, read_record, this_process
from dflash_train.store.local import LocalStore
from dflash_train.store.markers import Marker
from dflash_train.store.staging import Room
from dflash_train.store.stream_line import StreamShard
from dflash_train.util.checks import Check
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes, json_line
from dflash_train.util.locks import try_lock
from dflash_train.util.log import say
from dflash_train.util.provenance import canonical_json, digest

PLAN, READER, WRITER = "stream/plan.jsonl", "stream/reader.json", "stream/writer.json"
RING = "ring"
BEAT_S, LEASE_S = 1.0, 20.0
"""A sign of life is given so often; a side without one for so long is away, one whose process is gone at once."""

QUIET_S, SAY_EVERY_S = 2.0, 30.0


@dataclass
class Options:
    """wait_s: so long either side waits for the other before it ends with an error; less than the collectives' timeout
    (half an hour), within which all ranks of training must go on. heldout_samples: so many of them are kept, in whole
    shards; null = all."""

    wait_s: float = 1200.0
    heldout_samples: int | None = 256


class OtherSideAway(UserError):
    """The other side did not come within the time: trying again may help."""

    exit_code = 1


class StopAsked(Exception):
    """Training was told to stop while it waited for rows."""


def open_store(config: StoreConfig, name: str) -> "StreamStore":
    """Store under `<store.root>/<name>/`. Nothing is touched yet, but a root of another user's is refused."""
    root = config.root.removeprefix("file://")
    if "://" in root:
        raise UserError("store.root", got=config.root, want="a folder in memory or on a disk, since store=stream",
                        fix="store=s3")  # fmt: skip
    if config.max_bytes is None:
        raise UserError("store.max_bytes", got="null with store=stream", want="the size of the ring in bytes")
    for folder in (Path(root), Path(root, name)):  # in /dev/shm anybody may have made it
        if folder.exists() and folder.stat().st_uid != os.getuid():
            raise UserError("store.root", got=f"{folder} belongs to another user", want="a folder of your own")
    return StreamStore(Path(root, name), config.max_bytes, Options(**config.options))


class StreamStore(LocalStore):
    """The folder that both sides share. max_bytes: of the ring, as this side is told; extraction's word counts."""

    def __init__(self, folder: str | Path, max_bytes: int, options: Options):
        super().__init__(folder)
        self.max_bytes, self.options = max_bytes, options
        self._locks: dict[str, IO] = {}

    def check(self) -> None:
        self.make_folder()
        super().check()

    def make_folder(self) -> None:
        """For us alone: rows say what the samples say."""
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.folder / RING).mkdir(mode=0o700, parents=True, exist_ok=True)

    def check_room(self) -> Check:
        """A row of extraction's table: the ring fits where it is to be."""
        place = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        room, there = Room(place), sum(size for _, size in self.ring_files().values())
        free = min(room.free(), room.own_size) + there
        detail = f"a ring of {human_bytes(self.max_bytes)}, {human_bytes(free)} free at {place}; beside it, to stay, "
        detail += "the target's embedding and head, and held-out shards. Every epoch is extracted anew"
        fix = f"a smaller store.max_bytes than {self.max_bytes}, or store.root=<a larger folder>"
        return Check("storage", free >= self.max_bytes, detail, fix)

    @contextmanager
    def held(self, side: str) -> Iterator[None]:
        """Be the one "training" or "extraction" of this stream. Raises UserError where there is one."""
        self.lock(side)
        try:
            yield
        finally:
            self.unlock(side)

    def lock(self, side: str) -> None:
        """As `held`, until `unlock` or the end of this process, however that comes."""
        self.make_folder()
        path = self.folder / "stream" / f"{side}.lock"
        path.parent.mkdir(exist_ok=True)
        file = open(path, "a")  # noqa: SIM115 (held)
        if not try_lock(file):
            file.close()
            raise UserError(self.url, got=f"another {side} runs on this stream", want="one",
                            fix="wait for it or stop it; or another store.root for this one")  # fmt: skip
        self._locks[side] = file

    def unlock(self, side: str) -> None:
        file = self._locks.pop(side, None)
        if file is not None:
            file.close()

    # ------------------------------------------------------------ the plan

    def write_plan(self, shards: Sequence[StreamShard]) -> None:
        """Every train shard, in the order of their numbers."""
        self.put_bytes(PLAN, "".join(json_line(asdict(shard)) for shard in shards).encode())

    def read_plan(self) -> list[StreamShard]:
        """Raises UserError where extraction has not planned yet."""
        try:
            rows = [json.loads(line) for line in self.get_bytes(PLAN).splitlines()]
        except KeyError:
            raise UserError(
                f"{self.url}/{PLAN}", got="no such file", want="a stream that extract has begun",
                fix="python -m dflash_train.extract store=stream, same data and target",
            ) from None  # fmt: skip
        return [StreamShard(row["shard_id"], tuple(row["sample_ids"]), tuple(row["lengths"]), row["num_bytes"])
                for row in rows]  # fmt: skip

    def ring_path(self, place: int, shard_id: str) -> Path:
        return self.folder / ring_key(place, shard_id)

    def ring_files(self) -> dict[int, tuple[Path, int]]:
        """Place -> (file, bytes) of every shard in the ring."""
        found = {}
        for path in (self.folder / RING).glob("[0-9]*-*.safetensors"):
            with suppress(FileNotFoundError):  # it goes just now
                found[int(path.name.partition("-")[0])] = path, path.stat().st_size
        return found


def ring_key(place: int, shard_id: str) -> str:
    return f"{RING}/{place:08d}-{shard_id}.safetensors"


def planned_marker(shard: StreamShard, key: str = PLAN) -> Marker:
    """What a marker would say of a shard that is not made yet: it names what is planned, not the bytes."""
    planned = digest([shard.shard_id, shard.sample_ids, shard.lengths])
    return Marker(shard.shard_id, "train", list(shard.sample_ids), list(shard.lengths), shard.num_tokens, 0, key,
                  shard.num_bytes, planned)  # fmt: skip


# ---------------------------------------------------------------- signs of life


class Beat:
    """This side's record, written anew every second by a thread. `note` changes what it says next, `tell` says it
    now."""

    def __init__(self, store: StreamStore, key: str, **facts: object):
        self.store, self.key, self.facts = store, key, facts
        self.record = {"session": uuid.uuid4().hex[:12], **this_process()}
        self._counter, self._lock, self._closed = 0, threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, daemon=True, name=f"beat {key}")
        self.tell()
        self._thread.start()

    def note(self, **facts: object) -> None:
        with self._lock:
            self.facts |= facts

    def tell(self, **facts: object) -> None:
        with self._lock:
            self.facts |= facts
            self._counter += 1
            record = {**self.record, **self.facts, "counter": self._counter}
            self.store.put_bytes(self.key, canonical_json(record).encode())

    def close(self, **facts: object) -> None:
        """The last words."""
        self._closed.set()
        self._thread.join(BEAT_S + 1)
        with suppress(UserError, OSError):  # must not replace what ended the run
            self.tell(**facts, ended=True)

    def _keep_beating(self) -> None:
        while not self._closed.wait(BEAT_S):
            with suppress(UserError, OSError):  # a full folder, perhaps; who watches sees that nothing comes
                self.tell()


class Seldom:
    """Says at most one line in SAY_EVERY_S seconds, and none in the first two of a wait."""

    def __init__(self):
        self._next = 0.0

    def say(self, text: str, since: float) -> None:
        """since: when the wait began, on the monotonic clock."""
        now = monotonic()
        if now >= self._next and now - since > QUIET_S:
            self._next = now + SAY_EVERY_S
            say(text)


class Peer:
    """The other side, as this one sees it: no two clocks are compared."""

    def __init__(self, store: StreamStore, key: str, clock: Callable[[], float] = monotonic):
        self.store, self.key, self.clock = store, key, clock
        self._seen: tuple[object, float] = (None, clock())

    def look(self) -> tuple[dict, bool]:
        """(its record, {} where it never was here; whether it is there now)."""
        record, now = read_record(self.store, self.key), self.clock()
        sign = record.get("session"), record.get("counter")
        if self._seen[0] != sign:
            self._seen = sign, now
        away = not record or bool(record.get("ended")) or process_is_gone(record)
        return record, not away and now - self._seen[1] < LEASE_S
