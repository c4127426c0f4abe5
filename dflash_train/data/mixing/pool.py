"""One source's rows on their way into the mix: sifted once (or again, deeper), prepared as far as they are needed."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.mixing.candidates import Candidate, Prepared, PrepareJob
from dflash_train.data.mixing.selection import Outcome
from dflash_train.data.mixing.sift import Place, Sifted, SiftJob

CHUNK_ROWS, CHUNK_BYTES = 2000, 8 << 20  # of raw rows at a time in a process, whatever is reached first
TURNS_A_ROW = 16  # with turns=all each turn is written with all before it: so much less goes into a chunk
MARGIN = 1.1  # times the needed rows are prepared, for those that filters will drop; the next are prepared on demand
DEPTH = 1.5  # times the needed rows are kept at reading, since reading again is what costs
MIN_SPARE = 200


@dataclass
class Side:
    """The held-out or the trainable rows of a source, in hash order.

    depth: how many to keep at reading, goal: how many of those to prepare (None = all); complete: there are no more in
    the source; counts: what preparing them gave; signatures: u32 by candidate, in buckets that are compared.
    """

    depth: int | None = None
    goal: int | None = 0
    places: list[Place] = field(default_factory=list)
    complete: bool = False
    candidates: list[Candidate] = field(default_factory=list)
    signatures: list[np.ndarray] = field(default_factory=list)
    counts: Prepared = field(default_factory=Prepared)

    def aim(self, need: int | None) -> None:
        """`need` rows should stay: prepare and, at the next reading, keep somewhat more."""
        if need is None or self.goal is None:
            self.depth = self.goal = None
        elif need:
            self.goal = max(self.goal, int(need * MARGIN) + MIN_SPARE)
            self.depth = None if self.depth is None else max(self.depth, int(need * DEPTH) + MIN_SPARE)

    def deepen(self, lacking: int) -> str:
        """`lacking` rows were too few: "prepare" where more were kept at reading, "read" where more have to be."""
        self.goal += max(2 * lacking, MIN_SPARE)
        if self.complete or self.goal <= len(self.places):
            return "prepare"
        self.depth = max(2 * self.depth, self.goal)
        return "read"

    @property
    def exhausted(self) -> bool:
        """All rows of this side that the source has are candidates already."""
        return self.complete and self.counts.rows == len(self.places)

    @property
    def todo(self) -> list[Place]:
        """Places that wait to be prepared."""
        return self.places[self.counts.rows : self.goal]

    def forget(self) -> None:
        """What was prepared has to be prepared again."""
        self.candidates, self.signatures, self.counts = [], [], Prepared()


@dataclass
class SourceReport:
    """What happened to a source's rows: read = converted + skipped + dropped + not_needed, prompts = kept + filtered
    (with data.turns=one prompts = converted), and kept - taken - heldout - reserve rows were not asked for."""

    read: int
    converted: int
    not_needed: int  # too far back in hash order to be looked at
    skipped: Counter  # by the source's own rule: not chosen, but nothing wrong
    dropped: Counter
    lost: Counter  # what was passed over in damaged files, by reason and unit
    repaired: Counter
    prompts: int
    filtered: Counter
    duplicates: Counter  # by the source whose row was kept
    near_duplicates: Counter  # the same
    contaminated: Counter  # by evaluation task, "heldout" for held-out rows
    kept: int
    heldout: int
    taken: int
    reserve: int


class Pool:
    """A source's two sides, its spools in `folder`, and what is counted of it."""

    def __init__(self, name: str, source: SourceConfig, data: DataConfig, folder: Path):
        self.name, self.source, self.data, self.folder = name, source, data, folder
        self.heldout, self.train = Side(depth=0), Side(depth=0)
        self.rows_path = folder / "rows.jsonl"
        folder.mkdir()

    def sift_job(self) -> SiftJob:
        """Read the source from its start."""
        self.heldout.forget()
        self.train.forget()
        self.rows_path.unlink(missing_ok=True)
        return SiftJob(
            self.name, self.source, self.data, self.folder / "raw.jsonl", self.heldout.depth, self.train.depth
        )

    def sifted(self, result: Sifted) -> None:
        self.sift = result
        self.numbers = repeated_ids([*result.heldout, *result.train])
        self.heldout.places, self.heldout.complete = result.heldout, result.heldout_complete
        self.train.places, self.train.complete = result.train, result.train_complete

    def prepare_jobs(self, side: Side, texts: Path) -> Iterator[PrepareJob]:
        """Jobs that turn the places up to the side's goal into candidates, in order."""
        most = CHUNK_BYTES if self.data.turns == "one" else CHUNK_BYTES // TURNS_A_ROW
        for places in chunks(side.todo, CHUNK_ROWS, most):
            numbered = [(place, self.numbers.get(place, 1)) for place in places]
            yield PrepareJob(self.name, self.source, self.data, self.sift.spool, numbered, texts)

    def prepared(self, side: Side, result: Prepared) -> None:
        """The next chunk of that side."""
        with open(self.rows_path, "ab") as f:
            base = f.tell()
            f.write(result.lines)
        for candidate in result.candidates:
            candidate.offset += base
        side.candidates += result.candidates
        side.counts.add(result)
        if result.signatures is not None:
            side.signatures.append(result.signatures)

    def row(self, candidate: Candidate) -> dict:
        """Its canonical row."""
        with open(self.rows_path, "rb") as f:
            f.seek(candidate.offset)
            return json.loads(f.read(candidate.size))

    def report(self, outcome: Outcome) -> SourceReport:
        """All that happened to the source's rows."""
        counts = Prepared()
        for side in (self.heldout, self.train):
            counts.add(side.counts)
        filtered = counts.filtered + outcome.filtered
        in_order = self.sift.read - self.sift.skipped.total() - self.sift.dropped.total()
        return SourceReport(
            read=self.sift.read,
            converted=counts.converted,
            not_needed=in_order - counts.rows,
            skipped=self.sift.skipped,
            dropped=self.sift.dropped + counts.dropped,
            lost=self.sift.lost,
            repaired=counts.repaired,
            prompts=counts.prompts,
            filtered=filtered,
            duplicates=outcome.duplicates,
            near_duplicates=outcome.near_duplicates,
            contaminated=outcome.contaminated,
            kept=counts.prompts - filtered.total(),
            heldout=len(outcome.heldout),
            taken=len(outcome.train),
            reserve=len(outcome.reserve),
        )


def chunks(places: list[Place], most_rows: int, most_bytes: int) -> Iterator[list[Place]]:
    """The places in order, in lists of at most so many rows and bytes; a larger row is alone."""
    chunk, size = [], 0
    for place in places:
        if chunk and (len(chunk) == most_rows or size + place.size > most_bytes):
            yield chunk
            chunk, size = [], 0
        chunk.append(place)
        size += place.size
    if chunk:
        yield chunk


def repeated_ids(places: list[Place]) -> dict[Place, int]:
    """2, 3, ... for every row but the first of those with one id, which stand side by side in hash order."""
    out: dict[Place, int] = {}
    for before, place in pairwise(sorted(places)):
        if before.order == place.order:
            out[place] = out.get(before, 1) + 1
    return out
