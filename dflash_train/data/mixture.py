"""The one mixer: read every source, clean, filter, deduplicate, hold out, take by hash order, shuffle. A pure function
of its inputs, whatever the number of processes.

    sift       each source is read once; the rows whose hash may be low enough wait in a raw spool  mixing/sift.py
    prepare    those that are needed: clean, cut to a prompt, length, what filters compare    mixing/candidates.py
    choose     held-out rows of all sources first, then source by source until each has its take mixing/selection.py
    order      one seeded shuffle over all

Sampling is without replacement: within a source rows stand in the order of sha256(seed|source|id) and the first `take`
that pass the filters are taken, so a smaller take is a prefix of a larger one. The lowest `heldout_fraction` of the
hash range (of rows, or of groups where rows have one) is set aside before that. Where filters leave a source short,
more of its rows are prepared, and it is read again, deeper, when those run out.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np

from dflash_train.config import DataConfig
from dflash_train.data.mixing.candidates import HELDOUT_TASK, Candidate, asked_text, decontaminator, prepare
from dflash_train.data.mixing.near_duplicates import NearIndex
from dflash_train.data.mixing.pool import Pool, Side, SourceReport
from dflash_train.data.mixing.selection import Selection
from dflash_train.data.mixing.sift import sift
from dflash_train.data.recipe import plan_takes
from dflash_train.util.io import read_json, write_json
from dflash_train.util.parallel import Workers, num_cores
from dflash_train.util.provenance import digest, stable_hash

UNBOUNDED = 2**62  # rows of a source that has more than anyone asked for


@dataclass
class Mix:
    """The result: per-source reports, and the chosen candidates in final order, whose rows `rows` reads back. coverage:
    by task the evaluation items that were looked for, and how many of them a row could hold unnoticed; num_wrappers:
    n-grams of too many items to count."""

    reports: dict[str, SourceReport]
    splits: dict[str, list[Candidate]]
    spools: dict[str, Path]
    coverage: dict[str, dict[str, int]]
    num_wrappers: int

    def rows(self, split: str) -> Iterator[dict]:
        """Canonical rows of "train", "heldout" or "reserve", in their order, one read each."""
        files = {name: open(path, "rb") for name, path in self.spools.items() if path.exists()}  # noqa: SIM115
        try:
            for candidate in self.splits[split]:
                f = files[candidate.source]
                f.seek(candidate.offset)
                yield {**json.loads(f.read(candidate.size)), "split": split}
        finally:
            for f in files.values():
                f.close()


def build_mix(
    data: DataConfig,
    evaluation: dict[str, list[tuple[str, ...]]],
    workspace: Path,
    *,
    limit: int | None = None,
    on_row: Callable[[int], None] = lambda number: None,
    on_step: Callable[[str], None] = lambda what: None,
) -> Mix:
    """Mix the recipe's sources. evaluation: {task: [item texts]} that no row may contain; workspace: an empty folder
    for spools; limit: only the first rows of the final order; on_row, on_step: called for progress. Raises UserError
    for an unreadable, bad (strict) or short source."""
    with Workers(data.num_processes or num_cores(), on_row) as workers:
        return Mixer(data, evaluation, workspace, workers, on_step).mix(limit)


class Mixer:
    """The sources' pools and the steps between them."""

    def __init__(self, data: DataConfig, evaluation: dict, workspace: Path, workers: Workers, on_step: Callable):
        self.data, self.evaluation, self.workspace = data, evaluation, workspace
        self.workers, self.on_step = workers, on_step
        self.pools = {
            name: Pool(name, source, data, workspace / str(number))
            for number, (name, source) in enumerate(data.sources.items())
        }
        self.texts = self.evaluation_path = self._write_texts([])

    def mix(self, limit: int | None) -> Mix:
        """Read, choose; again with more rows while sources that came out short have some, and with other takes where
        data.allow_short lets others of a bucket fill in."""
        takes: dict[str, int | None] = {name: source.take for name, source in self.data.sources.items()}
        ends: dict[str, int] = {}  # rows of sources that turned out to have no more
        self.aim(takes)
        self.read(list(self.pools.values()))
        while True:
            self.hold_out()
            selection = self.take(takes)
            if self.deepen_train(selection, takes):
                continue
            taken = {name: len(outcome.train) for name, outcome in selection.outcomes.items()}
            ends |= {name: taken[name] for name, take in takes.items() if take is None or taken[name] < take}
            settled = plan_takes(self.data, {name: ends.get(name, UNBOUNDED) for name in takes})
            if settled == taken:
                return self.finish(selection, limit)
            takes = {name: None if take is None else settled[name] for name, take in takes.items()}
            self.aim(takes)

    # ------------------------------------------------------------ how much of each source

    def num_heldout(self, pool: Pool) -> int:
        """Held-out rows the source should give: a share of its take in the recipe, or of all it has."""
        take = len(pool.train.places) if pool.source.take is None else pool.source.take
        return ceil(self.data.heldout_fraction * take)

    def num_reserve(self, take: int | None) -> int:
        return 0 if take is None else ceil(self.data.reserve_fraction * take)

    def aim(self, takes: dict[str, int | None]) -> None:
        """Set how far each source is to be read and prepared. A range of the hash may hold far more held-out rows than
        the take asks for: the rest of it stays unused rather than trained on."""
        for name, pool in self.pools.items():
            take = takes[name]
            pool.train.aim(None if take is None else take + self.num_reserve(take))
            if self.data.heldout_fraction:
                pool.heldout.aim(None if pool.source.take is None else self.num_heldout(pool))

    # ------------------------------------------------------------ reading and preparing

    def read(self, pools: list[Pool]) -> None:
        """Sift these sources, one a process."""
        self.on_step(f"reading {', '.join(pool.name for pool in pools)}")
        results = self.workers.map(sift, [pool.sift_job() for pool in pools], said=lambda job: f"reading {job.name}")
        for pool, result in zip(pools, results, strict=True):
            pool.sifted(result)

    def _prepare(self, sides: list[tuple[Pool, Side]], texts: Path) -> None:
        """Candidates of each side, as far as its goal."""
        work = [(pool, side, job) for pool, side in sides for job in pool.prepare_jobs(side, texts)]
        if not work:
            return
        self.on_step(f"preparing {sum(len(job.places) for _, _, job in work):,} rows")
        said = lambda job: f"preparing rows of {job.name}"
        results = self.workers.map(prepare, [job for _, _, job in work], ahead=2, said=said)
        for (pool, side, _), result in zip(work, results, strict=True):
            pool.prepared(side, result)

    def _deepen(self, short: list[tuple[Pool, Side, int]]) -> bool:
        """More rows of sides that lack some: from those kept at reading or, where they run out, by reading the source
        again. False where there are no more."""
        short = [(pool, side, lacking) for pool, side, lacking in short if lacking > 0 and not side.exhausted]
        again = [pool for pool, side, lacking in short if side.deepen(lacking) == "read"]
        if again:
            self.read(list(dict.fromkeys(again)))
        return bool(short)

    def _write_texts(self, heldout: list[tuple[str, ...]]) -> Path:
        """What no row may contain, in a file that each process reads once; its name tells texts from other texts."""
        texts = {**self.evaluation, **({HELDOUT_TASK: heldout} if heldout else {})}
        path = self.workspace / f"texts-{digest(texts)}.json"
        write_json(path, texts)
        return path

    # ------------------------------------------------------------ choosing

    def hold_out(self) -> None:
        """Choose the held-out rows of all sources, and make them texts that train rows may not contain."""
        while True:
            self._prepare([(pool, pool.heldout) for pool in self.pools.values()], self.evaluation_path)
            selection = self._selection([pool.heldout for pool in self.pools.values()])
            self._offer_heldout(selection)
            lacking = {n: self.num_heldout(p) - len(selection.outcomes[n].heldout) for n, p in self.pools.items()}
            if not self._deepen([(pool, pool.heldout, lacking[name]) for name, pool in self.pools.items()]):
                break
        texts = []
        if HELDOUT_TASK in self.data.decontaminate:
            rows = (self.pools[name].row(c) for name, outcome in selection.outcomes.items() for c in outcome.heldout)
            texts = [tuple(m["content"] for m in row["messages"] if m["role"] == "user") for row in rows]
        path = self._write_texts(texts)
        if path != self.texts:
            self.texts = path
            for pool in self.pools.values():
                pool.train.forget()

    def take(self, takes: dict[str, int | None]) -> Selection:
        """Offer held-out rows, then each source's train rows until it has its take and reserve."""
        self._prepare([(pool, pool.train) for pool in self.pools.values()], self.texts)
        self.on_step("choosing")
        selection = self._selection([side for pool in self.pools.values() for side in (pool.heldout, pool.train)])
        self._offer_heldout(selection)
        for name, pool in self.pools.items():
            take = UNBOUNDED if takes[name] is None else takes[name]
            selection.take(pool.train.candidates, take, self.num_reserve(takes[name]))
        return selection

    def deepen_train(self, selection: Selection, takes: dict[str, int | None]) -> bool:
        """Whether sources that came out short of their take or reserve have more rows, which are then made ready."""
        short = []
        for name, take in takes.items():
            if take is not None:
                outcome = selection.outcomes[name]
                lacking = take + self.num_reserve(take) - len(outcome.train) - len(outcome.reserve)
                short.append((self.pools[name], self.pools[name].train, lacking))
        return self._deepen(short)

    def _offer_heldout(self, selection: Selection) -> None:
        for pool in self.pools.values():
            selection.hold_out(pool.heldout.candidates, self.num_heldout(pool))

    def _selection(self, sides: list[Side]) -> Selection:
        """An empty selection that can compare the near duplicates among these sides."""
        indexes = {bucket: self._near_index(bucket, sides) for bucket in self.data.near_duplicates.buckets}
        return Selection(self.data, {bucket: index for bucket, index in indexes.items() if index is not None})

    def _near_index(self, bucket: str, sides: list[Side]) -> NearIndex | None:
        """An empty index over all candidates of the bucket, which are told their numbers in it (`near`); None where
        there are none."""
        sides = [side for side in sides if side.candidates]
        sides = [side for side in sides if self.data.sources[side.candidates[0].source].bucket == bucket]
        candidates = [candidate for side in sides for candidate in side.candidates]
        if not candidates:
            return None
        for number, candidate in enumerate(candidates):
            candidate.near = number
        signatures = np.concatenate([part for side in sides for part in side.signatures])
        text_of = lambda number: asked_text(self._row(candidates[number])["messages"])
        owners = [candidate.conversation for candidate in candidates]
        return NearIndex(signatures, owners, text_of, self.data.near_duplicates.threshold)

    def _row(self, candidate: Candidate) -> dict:
        return self.pools[candidate.source].row(candidate)

    # ------------------------------------------------------------ the result

    def finish(self, selection: Selection, limit: int | None) -> Mix:
        """Train and held-out rows in one seeded shuffle, reserve rows by source in hash order; of a limited mix so many
        that their share stays."""
        outcomes = selection.outcomes
        seed = self.data.seed
        final = lambda rows: sorted(rows, key=lambda c: (stable_hash(seed, "final", c.source, c.id), c.id))[:limit]
        train = final(c for outcome in outcomes.values() for c in outcome.train)
        heldout = final(c for outcome in outcomes.values() for c in outcome.heldout)
        used = Counter(candidate.source for candidate in train)
        reserve = [c for name, out in outcomes.items() for c in out.reserve[: self.num_reserve(used[name])]]
        evaluation = decontaminator(self.texts)
        return Mix(
            reports={name: pool.report(outcomes[name]) for name, pool in self.pools.items()},
            splits={"train": train, "heldout": heldout, "reserve": reserve},
            spools={name: pool.rows_path for name, pool in self.pools.items()},
            coverage={
                task: {"items": len(items), "unchecked": evaluation.unchecked(items)}
                for task, items in read_json(self.texts).items()
            },
            num_wrappers=evaluation.num_wrappers,
        )
