"""What a host hands out and takes in: claims and staging room for each shard, then its upload, counts and progress.

The same desk serves the loop in this process and worker processes (supervisor.py).
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

from dflash_train.capture.rows import RenderedRows
from dflash_train.capture.serve import loaded_target
from dflash_train.capture.worker import Job, Order, capture_jobs
from dflash_train.store.claims import Claims
from dflash_train.store.shard import Marker, ShardFacts
from dflash_train.store.slices import ShardPlan
from dflash_train.store.staging import HIGH_WATER, LOW_WATER
from dflash_train.store.upload import Uploader
from dflash_train.util.device import device_name
from dflash_train.util.log import Progress, say

PAUSED_S, SHOW_S = 0.5, 1.0


class Desk:
    """Between claims, workers and uploader. `worker` in its methods is the name of who did it; `state`
    (monitor.state.RunState) shows all of it.

    The uploader calls `uploaded` and reports to this desk, so it is there after it: `open` completes the desk.
    """

    def __init__(self, rows: RenderedRows, todo: list[ShardPlan], token_bytes: int, claims: Claims, state,
                 stop_check: Callable[[], None]):  # fmt: skip
        self.rows, self.todo, self.token_bytes = rows, todo, token_bytes
        self.claims, self.state, self.stop_check = claims, state, stop_check
        self.progress = Progress("extract", sum(len(shard.sample_ids) for shard in todo), "samples")
        self.tokens, self.seconds, self.shards = Counter(), Counter(), Counter()  # by worker
        self._row_of = {sample_id: row for row, sample_id in enumerate(rows.sample_ids)}
        self._sources = rows.sources
        self.elsewhere = 0  # shards that other hosts have made
        self._captured: Counter = Counter()  # samples by shard that is not on file yet
        self._reserving_since: float | None = None
        self._shown, self._lock = float("-inf"), threading.Lock()

    def open(self, uploader: Uploader) -> None:
        self.uploader = uploader

    # ------------------------------------------------------------ handing out

    def jobs(self) -> Iterator[Job]:
        """Shards that this host has claimed and reserved room for; waits for other hosts when only theirs are left."""
        for shard in self.claims.take(self.todo, self._elsewhere):
            self._tell_claimed(shard)
            self._reserving_since = monotonic()
            self.uploader.reserve(shard.num_tokens * self.token_bytes)
            self._reserving_since = None
            yield Job(shard, tuple(self._row_of[sample_id] for sample_id in shard.sample_ids))

    @property
    def paused(self) -> bool:
        """Workers get nothing since the staging folder is full."""
        since = self._reserving_since
        return since is not None and monotonic() - since > PAUSED_S and self.uploader.is_behind

    def again(self, job: Job) -> None:
        """A job whose worker died: what was captured of it does not count."""
        self._tell_claimed(job.shard)
        with self._lock:
            self.progress.done -= self._captured.pop(job.shard.shard_id, 0)

    def check(self) -> None:
        """Called between batches or several times a second: raises what ends the run."""
        self.stop_check()
        for shard_id in list(self.uploader.failed):
            self.state.shard(shard_id, "failed")
        self.uploader.raise_failed()
        if monotonic() - self._shown > SHOW_S:
            self._shown = monotonic()
            room, ours = self.uploader.room, self.uploader.staged_bytes
            self.state.staging(ours, room.total - room.free(), room.total, HIGH_WATER, self.paused, LOW_WATER)

    def _tell_claimed(self, shard: ShardPlan) -> None:
        self.state.shard(shard.shard_id, "claimed", samples=len(shard.sample_ids), tokens=shard.num_tokens)

    def _elsewhere(self, shard: ShardPlan) -> None:
        self.elsewhere += 1
        self.state.shard(shard.shard_id, "elsewhere", samples=len(shard.sample_ids), tokens=shard.num_tokens)
        with self._lock:
            self.progress.update(len(shard.sample_ids))

    # ------------------------------------------------------------ taking in

    def captured(self, worker: str, job: Job, samples: slice, seconds: float) -> None:
        """Some of a job's samples went through the target."""
        shard_id, count, tokens = job.shard.shard_id, len(job.rows[samples]), sum(job.shard.lengths[samples])
        self.tokens[worker] += tokens
        self.seconds[worker] += seconds
        sources = Counter(self._sources[row] for row in job.rows[samples])
        self.state.captured(worker, shard_id, count, tokens, seconds, dict(sources))
        with self._lock:
            self._captured[shard_id] += count
            self.progress.update(count, tokens=tokens, MB=tokens * self.token_bytes / 1e6)

    def staged(self, worker: str, job: Job, path: Path, facts: ShardFacts) -> None:
        """A job's shard is on file: on to the store with it."""
        self.shards[worker] += 1
        self._captured.pop(job.shard.shard_id, None)
        self.state.shard(job.shard.shard_id, "staged", worker, path.stat().st_size)
        self.uploader.submit(path, facts, job.shard.num_tokens * self.token_bytes)

    def uploaded(self, marker: Marker, seconds: float) -> None:
        """Called by the uploader's threads."""
        self.claims.done(marker.shard_id)
        self.state.shard(marker.shard_id, "uploaded", bytes=marker.bytes)
        self.state.uploaded(marker.bytes, seconds)

    def close(self) -> None:
        """The last lines: the rate of all, and of each worker, with its share of the device's matrix rate."""
        self.progress.close()
        if self.elsewhere:
            say(f"{self.elsewhere} shard(s) were made by other hosts")
        per_token, peak = self.state.flops_per_token, self.state.peak_flops
        for worker, tokens in sorted(self.tokens.items()):
            rate = tokens / max(self.seconds[worker], 1e-9)
            share = f", {rate * per_token / peak:.0%} of {peak / 1e12:.0f} TFLOP/s" if per_token and peak else ""
            say(f"{worker}: {self.shards[worker]} shards, {tokens:,} tokens, {rate:,.0f} tokens/s{share}")


class Here:
    """Reports of the loop that runs in this very process."""

    NAME = "worker 0"

    def __init__(self, desk: Desk):
        self.desk = desk

    def captured(self, job: Job, samples: slice, seconds: float) -> None:
        self.desk.captured(self.NAME, job, samples, seconds)

    def staged(self, job: Job, path: Path, facts: ShardFacts) -> None:
        self.desk.staged(self.NAME, job, path, facts)


def run_here(order: Order, desk: Desk, target_files: dict[str, bytes] | None) -> None:
    """Capture in this very process."""
    desk.state.worker(Here.NAME, order.run.hardware.device, os.getpid(), "loading")
    with loaded_target(order, target_files) as target:
        desk.state.worker(Here.NAME, device_name(target.device), os.getpid(), "capturing")
        capture_jobs(target, order, desk.jobs(), Here(desk), desk.check)
        desk.state.worker(Here.NAME, device_name(target.device), os.getpid(), "stopped")
