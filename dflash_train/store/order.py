"""In which order training reads samples: pure functions of the markers, (seed, epoch) and row_tokens.

Shards are shuffled, samples are shuffled inside a window of shards (so that a row needs only shards that are near each
other), packed first-fit into rows, and the rows of a window are shuffled again. The rows of all epochs form one line;
step s takes the next global_batch of it, so a step may hold the end of one epoch and the beginning of the next, and
each sample comes exactly once an epoch. Only the very last step is filled up with empty rows. Ranks appear in
`rank_share` alone.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dflash_train.store.shard import Marker
from dflash_train.util.errors import UserError
from dflash_train.util.provenance import stable_hash

WINDOW_SHARDS = 16  # samples are shuffled inside this many shards; a constant, or the order would depend on the machine
OPEN_ROWS = 32  # rows kept open while packing: they fill to 98 % on chat lengths (lognormal, mean 1,300 of 4,096)

SampleRef = tuple[int, int]  # (index of the shard, index of the sample in it)


@dataclass(frozen=True)
class Row:
    """Samples packed together in one row of one epoch; no samples = an empty row that fills up the last step."""

    epoch: int
    samples: tuple[SampleRef, ...] = ()


def limit_markers(markers: Sequence[Marker], limit: int | None) -> list[list[int]]:
    """Lengths per shard, of the first `limit` samples in shard order (null = all)."""
    left, lengths = limit if limit is not None else math.inf, []
    for marker in markers:
        take = int(min(left, len(marker.lengths)))
        lengths.append(list(marker.lengths[:take]))
        left -= take
    return lengths


def check_lengths(markers: Sequence[Marker], lengths: list[list[int]], row_tokens: int, long_samples: str) -> int:
    """Number of samples over row_tokens, which "cut" cuts; where they are an error, UserError naming the longest."""
    over = [(n, i, j) for i, shard in enumerate(lengths) for j, n in enumerate(shard) if n > row_tokens]
    if over and long_samples == "error":
        n, i, j = max(over)
        raise UserError("train.row_tokens", got=f"{row_tokens}, but {len(over)} sample(s) are longer, up to {n} tokens "
                        f"({markers[i].sample_ids[j]} in {markers[i].shard_id})",
                        want=f">= {n}", fix=f"train.row_tokens={n}, or train.long_samples=cut")  # fmt: skip
    return len(over)


def shard_order(shard_ids: Sequence[str], seed: int, epoch: int) -> list[int]:
    """In which order an epoch's windows take the shards: their indices."""
    return sorted(range(len(shard_ids)), key=lambda i: stable_hash("shard", seed, epoch, shard_ids[i]))


def epoch_plan(
    shard_ids: Sequence[str], lengths: Sequence[Sequence[int]], *, seed: int, epoch: int, row_tokens: int,
    window_shards: int = WINDOW_SHARDS,
) -> list[tuple[SampleRef, ...]]:  # fmt: skip
    """Rows of one epoch: every sample exactly once, at most row_tokens in a row (longer samples count as row_tokens).

    lengths[i][j] is the length of sample j of shard shard_ids[i].
    """
    rng = random.Random(stable_hash("order", seed, epoch, row_tokens))
    order = shard_order(shard_ids, seed, epoch)
    rows, open_rows = [], []  # open row: [free tokens, samples, start of the window that opened it]
    for start in range(0, len(order), window_shards):
        samples = [(i, j) for i in order[start : start + window_shards] for j in range(len(lengths[i]))]
        rng.shuffle(samples)
        closed = []
        for i, j in samples:
            size = min(lengths[i][j], row_tokens)
            slot = next((slot for slot in open_rows if slot[0] >= size), None)
            if slot is None:
                if len(open_rows) == OPEN_ROWS:
                    fullest = min(range(OPEN_ROWS), key=lambda k: open_rows[k][0])
                    closed.append(tuple(open_rows.pop(fullest)[1]))
                slot = [row_tokens, [], start]
                open_rows.append(slot)
            slot[0] -= size
            slot[1].append((i, j))
        # A row stays open into the next window and no further, so that it needs shards of two windows at most.
        last = start + window_shards >= len(order)
        closed += [tuple(slot[1]) for slot in open_rows if last or slot[2] < start]
        open_rows = [slot for slot in open_rows if slot[2] == start]
        rng.shuffle(closed)
        rows += closed
    return rows


class RowOrder:
    """The line of rows through all epochs. epochs may be fractional: the last one is then cut after its first rows."""

    def __init__(
        self, shard_ids: Sequence[str], lengths: Sequence[Sequence[int]], *, seed: int, epochs: float, row_tokens: int,
        global_batch: int,
    ):  # fmt: skip
        self.global_batch = global_batch
        plan = lambda epoch: epoch_plan(shard_ids, lengths, seed=seed, epoch=epoch, row_tokens=row_tokens)
        self._plan = lru_cache(maxsize=2)(plan)
        self.starts = [0]  # of each epoch, in rows; plans differ in length, since packing depends on the order
        for epoch in range(math.ceil(epochs)):
            share = min(1.0, epochs - epoch)
            self.starts.append(self.starts[-1] + math.ceil(share * len(self._plan(epoch))))

    @property
    def total_rows(self) -> int:
        return self.starts[-1]

    @property
    def total_steps(self) -> int:
        return math.ceil(self.total_rows / self.global_batch)

    def row(self, index: int) -> Row:
        """Row number `index` of the line; past its end an empty one."""
        if index >= self.total_rows:
            return Row(len(self.starts) - 2)
        epoch = next(e for e in range(len(self.starts) - 1) if index < self.starts[e + 1])
        return Row(epoch, self._plan(epoch)[index - self.starts[epoch]])

    def step_rows(self, step: int) -> list[Row]:
        """The global batch of `step` (0-based)."""
        return [self.row(step * self.global_batch + i) for i in range(self.global_batch)]


def rank_share(rows: list[Row], rank: int, world_size: int, micro_batch: int) -> list[list[Row]]:
    """This rank's micro-batches of a global batch, whose size is a multiple of micro_batch * world_size."""
    assert len(rows) % (micro_batch * world_size) == 0
    chunks = [rows[i : i + micro_batch] for i in range(0, len(rows), micro_batch)]
    return chunks[rank::world_size]
