"""Extraction into a stream: what is planned for it, and the desk between its ring and the workers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from dflash_train.capture.desk import PAUSED_S, Desk
from dflash_train.capture.rows import RenderedRows
from dflash_train.capture.setup import Setup
from dflash_train.capture.worker import Job
from dflash_train.store.shard import FORMAT, ShardFacts
from dflash_train.store.slices import ShardPlan
from dflash_train.store.stream import StreamStore
from dflash_train.store.stream_line import StreamShard, least_bytes, too_small
from dflash_train.store.stream_writer import Ring
from dflash_train.util.errors import UserError
from dflash_train.util.log import Progress, say
from dflash_train.util.provenance import canonical_json

HEADER_BYTES = 2048
"""Of a safetensors file, at most, beside its one metadata entry."""


def plan_stream(setup: Setup, store: StreamStore, shards: list[ShardPlan]) -> tuple[list[StreamShard], list[ShardPlan]]:
    """(train shards with their bytes, the held-out shards that are kept). Raises UserError for a ring that is too small
    whatever training wants."""
    provenance = setup.shard_provenance()
    train = [StreamShard(*vars(shard).values(), num_bytes=file_bytes(shard, setup.token_bytes, provenance))
             for shard in shards if shard.shard_id.startswith("train")]  # fmt: skip
    need_bytes = least_bytes(train)
    if need_bytes > store.max_bytes:
        raise UserError("store.max_bytes", **too_small(need_bytes, store.max_bytes))
    kept, num_samples, wish = [], 0, store.options.heldout_samples
    for shard in (shard for shard in shards if shard.shard_id.startswith("heldout")):
        if wish is None or num_samples < wish:
            kept.append(shard)
            num_samples += len(shard.sample_ids)
    return train, kept


def file_bytes(shard: ShardPlan, token_bytes: int, provenance: dict) -> int:
    """Of the shard's file, at most: its rows, and a header with all sample ids in it."""
    facts = canonical_json({"format": FORMAT, "sample_ids": shard.sample_ids, "provenance": provenance})
    header = len(json.dumps(facts, ensure_ascii=False).encode()) + HEADER_BYTES
    return shard.num_tokens * token_bytes + 8 * (len(shard.sample_ids) + 1) + header


class StreamDesk(Desk):
    """Hands out what the ring wants next, and puts into it what was made."""

    def __init__(self, rows: RenderedRows, ring: Ring, token_bytes: int, state, stop_check: Callable[[], None]):
        super().__init__(rows, [], token_bytes, None, state, stop_check)  # no claims: there is one extraction
        self.progress = Progress("stream", None, "samples")
        self.ring = ring
        self.open(ring)

    def jobs(self) -> Iterator[Job]:
        for shard in self.ring.take():
            self._tell_claimed(shard)
            yield Job(shard, tuple(self._row_of[sample_id] for sample_id in shard.sample_ids))

    @property
    def paused(self) -> bool:
        """Workers get nothing since training has not used up what is there."""
        return self.ring.is_waiting(PAUSED_S)

    def staged(self, worker: str, job: Job, path: Path, facts: ShardFacts) -> None:
        num_bytes = path.stat().st_size
        super().staged(worker, job, path, facts)
        self.state.shard(job.shard.shard_id, "uploaded", bytes=num_bytes)

    def close(self) -> None:
        super().close()
        say(self.ring.summary())
