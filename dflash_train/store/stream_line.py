"""The line of a stream: in which order its shards are used up, and when. Pure functions of the plan and of training's
order of rows, so that both sides know them without asking.

A place is a number in the line: epoch * shards + the shard's place in that epoch's order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from dflash_train.store.order import WINDOW_SHARDS, Row, RowOrder, shard_order
from dflash_train.store.slices import ShardPlan
from dflash_train.util.io import human_bytes


@dataclass(frozen=True)
class StreamShard(ShardPlan):
    """A shard before it is made. num_bytes: as a file, at most."""

    num_bytes: int


class Line:
    """Which shard is at which place, for one seed of training."""

    def __init__(self, shards: Sequence[StreamShard], seed: int):
        self.shards, self.seed = shards, seed
        self.shards_by_id = {shard.shard_id: shard for shard in shards}
        ids = list(self.shards_by_id)
        self._order = lru_cache(maxsize=3)(lambda epoch: shard_order(ids, seed, epoch))
        self._places = lru_cache(maxsize=3)(lambda epoch: {i: at for at, i in enumerate(self._order(epoch))})

    def at(self, place: int) -> StreamShard:
        epoch, at = divmod(place, len(self.shards))
        return self.shards[self._order(epoch)[at]]

    def place(self, epoch: int, shard: int) -> int:
        """Of a shard, by its number in the plan, in that epoch."""
        return epoch * len(self.shards) + self._places(epoch)[shard]

    def stop(self, position: int, end: int, max_bytes: int) -> int:
        """The ring holds position..stop-1: what fits into max_bytes, and no place from `end` on."""
        place = position
        while place < end and self.at(place).num_bytes <= max_bytes:
            max_bytes -= self.at(place).num_bytes
            place += 1
        return place


class Uses:
    """When training needs which place. end: no place from there on is used.

    need_bytes: the smallest ring that training can run on. It holds, at every step, what this step and the one before
    use (other ranks may still be in that) and what lies between in the line.
    """

    def __init__(self, order: RowOrder, line: Line, num_steps: int):
        first, last = _first_and_last_use(order, line, num_steps)
        self.line, self.end = line, max(last, default=-1) + 1
        self._from = [self.end] * (num_steps + 1)
        for place, step in last.items():
            self._from[step] = min(self._from[step], place)
        for step in reversed(range(num_steps)):
            self._from[step] = min(self._from[step], self._from[step + 1])
        upto = [0] * num_steps
        for place, step in first.items():
            upto[step] = max(upto[step], place + 1)
        before = [0, *accumulate(line.at(place).num_bytes for place in range(self.end))]
        self.need_bytes = max((before[stop] - before[min(stop, self.first_needed(max(0, step - 1)))]
                               for step, stop in enumerate(accumulate(upto, max))), default=0)  # fmt: skip

    def first_needed(self, step: int) -> int:
        """The first place that `step` (0-based) or a later one uses."""
        return self._from[min(step, len(self._from) - 1)]


def _first_and_last_use(order: RowOrder, line: Line, num_steps: int) -> tuple[dict[int, int], dict[int, int]]:
    """Place -> the first step that uses it, and the last one."""
    first, last = {}, {}
    for index in range(min(order.total_rows, num_steps * order.global_batch)):
        row, step = order.row(index), index // order.global_batch
        for i, _ in row.samples:
            place = line.place(row.epoch, i)
            first.setdefault(place, step)
            last[place] = step
    return first, last


def at_places(row: Row, line: Line, base: int) -> Row:
    """The row with its samples' shards named by their places in the line, counted from `base` on."""
    return Row(row.epoch, tuple((line.place(row.epoch, i) - base, j) for i, j in row.samples))


def least_bytes(shards: Sequence[StreamShard]) -> int:
    """What no order of rows gets by with: the shards of two neighbouring windows, were they the smallest ones."""
    return sum(sorted(shard.num_bytes for shard in shards)[: 2 * WINDOW_SHARDS])


def too_small(need_bytes: int, max_bytes: int) -> dict[str, str]:
    """Got, want and fix of the error about a ring that would never hold what a step of training needs."""
    return {
        "got": f"a ring of {human_bytes(max_bytes)}",
        "want": f">= {need_bytes} bytes ({human_bytes(need_bytes)}): samples are shuffled over {2 * WINDOW_SHARDS} and "
                "more shards, and all of these must be there at once",
        "fix": f"store.max_bytes={need_bytes} in both commands; or a smaller store.shard_bytes, in extraction, after "
               "clean=true",
    }  # fmt: skip
