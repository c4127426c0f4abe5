"""First look at a source: which of its rows can be among those that the mix takes? All others are counted, not stored.

Rows stand in hash order, so only the lowest are ever needed: a row above a bound is told by its id alone, before any
cleaning. The bound falls while the source is read. What is kept goes raw into a spool file that is compacted as rows
fall out again, so neither memory nor disk grows with the source.
"""

import heapq
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.forms import RawRow
from dflash_train.data.recipe import read_source
from dflash_train.util.errors import UserError
from dflash_train.util.parallel import count
from dflash_train.util.provenance import stable_hash

HASH_RANGE = 2**64
_COUNT_EVERY = 500
_MIN_GARBAGE = 32 << 20  # bytes of rows that fell out again, below which a spool is not rewritten
_CONTENT = ("messages", "tools", "thinking", "license", "group", "unique", "kind", "notes")
_PLACE = ("location", "id", "upstream")  # where a row stands: not part of what tells equal ids apart


class Place(NamedTuple):
    """A raw row's place in the hash order (rows of one id by their content), and its bytes in the spool."""

    order: int
    tie: int
    offset: int
    size: int


@dataclass(frozen=True)
class SiftJob:
    """Read one source. num_heldout, num_train: how many rows of either side to keep (None = all); spool: a new file."""

    name: str
    source: SourceConfig
    data: DataConfig
    spool: Path
    num_heldout: int | None
    num_train: int | None


@dataclass
class Sifted:
    """The rows of a source that may be needed, in hash order. complete: nothing of that side was left out."""

    spool: Path
    heldout: list[Place]
    train: list[Place]
    heldout_complete: bool
    train_complete: bool
    read: int = 0
    skipped: Counter = field(default_factory=Counter)
    dropped: Counter = field(default_factory=Counter)  # rows that could not be read or do not fit their form
    lost: Counter = field(default_factory=Counter)  # of their files, with such rows: by reason and unit


class Lowest:
    """The `limit` lowest places seen so far; everything for None."""

    def __init__(self, limit: int | None):
        self.limit, self.complete, self.live_bytes = limit, True, 0
        self._heap: list[tuple[int, int, int, int]] = []  # order and tie negated: the highest is on top

    def wants(self, order: int) -> bool:
        """False where a row of this order is certainly not among the lowest."""
        full = self.limit is not None and len(self._heap) >= self.limit
        wanted = not full or (bool(self._heap) and order <= -self._heap[0][0])
        self.complete = self.complete and wanted
        return wanted

    def add(self, place: Place) -> None:
        heapq.heappush(self._heap, (-place.order, -place.tie, place.offset, place.size))
        self.live_bytes += place.size
        if self.limit is not None and len(self._heap) > self.limit:
            self.live_bytes -= heapq.heappop(self._heap)[3]
            self.complete = False

    def moved(self, copy) -> None:
        """Every row gets the offset that copy(offset, size) returns."""
        self._heap = [(order, tie, copy(offset, size), size) for order, tie, offset, size in self._heap]

    def places(self) -> list[Place]:
        return sorted(Place(-order, -tie, offset, size) for order, tie, offset, size in self._heap)


def sift(job: SiftJob) -> Sifted:
    """Read the source once. Raises UserError where it cannot be read or, with data.strict, has a bad row."""
    out = Sifted(job.spool, [], [], True, True)
    sides = {True: Lowest(job.num_heldout), False: Lowest(job.num_train)}
    held_range = job.data.heldout_fraction * HASH_RANGE
    with _Spool(job.spool, sides) as spool:
        for raw in read_source(job.name, job.source, job.data):
            out.read += 1
            if out.read % _COUNT_EVERY == 0:
                count(_COUNT_EVERY)
            if raw.skip:
                out.skipped[raw.skip] += 1
                continue
            if raw.drop:
                _drop(out, raw, raw.drop, job.data.strict)
                continue
            order = stable_hash(job.data.seed, job.name, raw.id)
            group = order if raw.group is None else stable_hash(job.data.seed, job.name, raw.group)
            lowest = sides[group < held_range]
            if not lowest.wants(order):
                continue
            try:
                lowest.add(spool.write(raw, order))
            except RecursionError:
                _drop(out, raw, "nested_too_deep", job.data.strict)
    count(out.read % _COUNT_EVERY)
    out.heldout, out.train = sides[True].places(), sides[False].places()
    out.heldout_complete, out.train_complete = sides[True].complete, sides[False].complete
    return out


def _drop(out: Sifted, raw: RawRow, reason: str, strict: bool) -> None:
    refuse_bad_row(raw, reason, strict)
    out.dropped[reason] += 1
    if raw.lost[0]:
        out.lost[f"{reason}, {raw.lost[1]}"] += raw.lost[0]


def refuse_bad_row(raw: RawRow, reason: str, strict: bool) -> None:
    """Raise UserError with file and line where data.strict says so."""
    if strict:
        raise UserError(
            raw.location,
            got=f"a row that cannot be used ({reason})",
            want="clean rows, since data.strict=true",
            fix="data.strict=false counts it",
        )


# ---------------------------------------------------------------- the spool


class _Spool:
    """Raw rows, one JSON line each; rewritten where most of it has fallen out of the lowest."""

    def __init__(self, path: Path, sides: dict[bool, Lowest]):
        self.path, self.sides = path, sides
        self.file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self.size = 0

    def __enter__(self) -> "_Spool":
        return self

    def __exit__(self, *_) -> None:
        self.file.close()

    def write(self, raw: RawRow, order: int) -> Place:
        # ASCII: a lone surrogate, which cleaning has yet to find, cannot be encoded otherwise.
        content, place = (_ENCODER.encode([getattr(raw, key) for key in keys]) for keys in (_CONTENT, _PLACE))
        tie = int.from_bytes(sha256(content.encode("ascii")).digest()[:8], "big")
        line = f"[{content},{place}]\n".encode("ascii")
        live = sum(lowest.live_bytes for lowest in self.sides.values())
        if self.size - live > max(live, _MIN_GARBAGE):
            self._compact()
        self.file.write(line)
        self.size += len(line)
        return Place(order, tie, self.size - len(line), len(line))

    def _compact(self) -> None:
        self.file.close()
        smaller = self.path.with_suffix(".compact")
        with open(self.path, "rb") as old, open(smaller, "wb") as new:

            def copy(offset: int, size: int) -> int:
                old.seek(offset)
                start = new.tell()
                new.write(old.read(size))
                return start

            for lowest in self.sides.values():
                lowest.moved(copy)
            self.size = new.tell()
        os.replace(smaller, self.path)
        self.file = open(self.path, "ab")  # noqa: SIM115


def _opaque(value: object) -> dict:
    """What JSON cannot hold (a date, bytes) is no text either: cleaning drops it by its kind."""
    return {"not_text": type(value).__name__}


_ENCODER = json.JSONEncoder(default=_opaque, skipkeys=True)


def read_places(spool: Path, places: list[Place]) -> Iterator[RawRow]:
    """The raw rows at these places, one read each."""
    with open(spool, "rb") as f:
        for place in places:
            f.seek(place.offset)
            content, where = json.loads(f.read(place.size))
            yield RawRow(**dict(zip(_CONTENT, content, strict=True)), **dict(zip(_PLACE, where, strict=True)))
