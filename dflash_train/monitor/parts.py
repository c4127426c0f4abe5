"""The parts of a RunState: one worker, one shard at work, and the bar of all shards, a byte each."""

from dataclasses import dataclass, field

from dflash_train.monitor.rates import Rate

WORKER_STATUSES = ("starting", "loading", "capturing", "paused", "idle", "stopped", "dead")
SHARD_STATUSES = ("waiting", "claimed", "captured", "staged", "uploaded", "failed", "elsewhere")
DONE = ("uploaded", "elsewhere")
_WORKING = ("capturing", "paused", "idle")
_WAITING, _UPLOADED, _FAILED = (SHARD_STATUSES.index(status) for status in ("waiting", "uploaded", "failed"))
_DONE = tuple(SHARD_STATUSES.index(status) for status in DONE)
_CELLS = 600


@dataclass
class Worker:
    """One worker process; `since` is when it came into its status."""

    device: str
    pid: int | None
    status: str
    since: float
    shard_id: str | None = None
    seen: float = 0.0
    samples: int = 0
    tokens: Rate = field(default_factory=Rate)
    seconds: dict[str, float] = field(default_factory=dict)  # by status, up to `since`

    def enter(self, status: str, now: float) -> None:
        self.seconds[self.status] = self.seconds.get(self.status, 0.0) + now - self.since
        self.status, self.since = status, now

    def share(self, status: str, now: float) -> float | None:
        """Part of its working time (starting and loading left out) that it was in `status`; None before any."""
        spent = {name: self.seconds.get(name, 0.0) for name in _WORKING}
        if self.status in spent:
            spent[self.status] += now - self.since
        total = sum(spent.values())
        return spent[status] / total if total > 0 else None


@dataclass
class OpenShard:
    """A shard on its way to the store: what it holds (0: not told), what of it is captured, its bytes once staged."""

    size_samples: int = 0
    size_tokens: int = 0
    samples: int = 0
    tokens: int = 0
    staged_bytes: int | None = None
    sources: dict[str, int] = field(default_factory=dict)

    def add(self, samples: int, tokens: int, sources: dict[str, int]) -> None:
        self.samples += samples
        self.tokens += tokens
        for source, count in sources.items():
            self.sources[source] = self.sources.get(source, 0) + count


class ShardBar:
    """The status of every shard, in the order the run came by them, those of earlier runs first."""

    def __init__(self, total: int, before: int):
        self.before = before
        self._statuses = bytearray([_UPLOADED]) * before + bytearray([_WAITING]) * (total - before)
        self._index: dict[str, int] = {}

    def set(self, shard_id: str, status: str) -> bool:
        """Note it; True when the shard was done already."""
        index = self._index.setdefault(shard_id, self.before + len(self._index))
        if index == len(self._statuses):  # more than were foretold: shown, since a view must not end a run
            self._statuses.append(_WAITING)
        was_done = self._statuses[index] in _DONE
        self._statuses[index] = SHARD_STATUSES.index(status)
        return was_done

    def as_dict(self) -> dict:
        """Counts by status, and at most 600 cells of neighbours: a letter and the percentage done of each."""
        statuses = self._statuses
        counts = {status: statuses.count(i) for i, status in enumerate(SHARD_STATUSES)}
        per_cell = max(1, -(-len(statuses) // _CELLS))
        cells = [statuses[i : i + per_cell] for i in range(0, len(statuses), per_cell)]
        done = [sum(cell.count(i) for i in _DONE) * 100 // len(cell) for cell in cells]
        return {
            "total": len(statuses), "before": self.before, "done": sum(counts[status] for status in DONE),
            "counts": counts,
            "grid": {"per_cell": per_cell, "cells": "".join(map(_letter, cells)), "done_percent": done},
        }  # fmt: skip


def _letter(cell: bytearray) -> str:
    """'x' where one failed, else '~' where one is on its way, else '#' where all are done, '.' where not."""
    if _FAILED in cell:
        return "x"
    if any(status in cell for status in range(_WAITING + 1, _UPLOADED)):
        return "~"
    return "." if _WAITING in cell else "#"
