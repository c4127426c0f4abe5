"""The loop of one device: shard -> batches -> capture -> valid rows in one tensor -> host memory -> staged file.

It runs in a process per GPU (supervisor.py), or in the stage's own process where there is none. It knows neither store
nor upload: jobs come from an iterator, and what was made of them is reported.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol

import numpy as np
import torch

from dflash_train.capture.rows import RenderedRows
from dflash_train.capture.setup import Setup
from dflash_train.config import ExtractRun
from dflash_train.records import HiddenShard
from dflash_train.store.gather import RowBuffer, RowLayout
from dflash_train.store.shard import ShardFacts, write_shard
from dflash_train.store.slices import ShardPlan, plan_batches
from dflash_train.target.base import TargetModel
from dflash_train.util.ahead import Ahead

REPORT_S = 0.5
"""Batches of a shard are reported together, once in so many seconds and at its end."""


@dataclass(frozen=True)
class Order:
    """What every worker of a run must know. capacity: tokens of the largest shard."""

    run: ExtractRun
    layer_ids: tuple[int, ...]
    hidden_size: int
    provenance: dict
    rows_folder: Path
    staging_folder: Path
    capacity: int

    @classmethod
    def of(cls, setup: Setup, rows: RenderedRows, staging_folder: Path, shards: list[ShardPlan]) -> "Order":
        return cls(setup.run, setup.layer_ids, setup.hidden_size, setup.shard_provenance(), rows.folder, staging_folder,
                   max((shard.num_tokens for shard in shards), default=0))  # fmt: skip

    @property
    def layout(self) -> RowLayout:
        """What a captured row is."""
        return RowLayout.of(self.hidden_size, len(self.layer_ids), self.run.store)


@dataclass(frozen=True)
class Job:
    """One shard to capture. rows: its samples' numbers among the rendered rows."""

    shard: ShardPlan
    rows: tuple[int, ...]


class Report(Protocol):
    """Who hears what became of the jobs. `captured` is called by the loop, `staged` by the thread that writes."""

    def captured(self, job: Job, samples: slice, seconds: float) -> None:
        """Those of the job's samples went through the target, within so many seconds."""

    def staged(self, job: Job, path: Path, facts: ShardFacts) -> None:
        """The whole shard is on file."""


@dataclass(frozen=True)
class Batch:
    """Samples of a shard that go through the target together: right-padded ids i64[B, T], lengths i64[B]."""

    samples: slice
    token_ids: torch.Tensor
    lengths: torch.Tensor


def capture_jobs(target: TargetModel, order: Order, jobs: Iterator[Job], report: Report,
                 stop_check: Callable[[], None]) -> None:  # fmt: skip
    """Capture and stage every job; all of them are on file and reported when this returns.

    Two buffers: while one shard is written to the staging folder, the next one is captured. Ids are read and padded
    ahead of the device. Rows that are not finite raise UserError; what `stop_check` raises ends the loop between two
    batches, and shards that were captured by then are still written.
    """
    rows, buffers, writing = RenderedRows(order.rows_folder), [], [None, None]
    with Ahead(read_batches(order, rows, jobs, target.device)) as prepared, ThreadPoolExecutor(1) as writer:
        for i, (job, batches) in enumerate(prepared):
            since = monotonic()
            if i < 2:
                layout = order.layout
                buffers.append(RowBuffer(order.capacity, layout.width, layout.buffer_dtype, target.device))
            if writing[i % 2]:
                writing[i % 2].result()  # the buffer is free once its last shard is on file
            capture_shard(target, order, job, batches, buffers[i % 2], report, stop_check, since)
            writing[i % 2] = writer.submit(stage, order, rows, job, buffers[i % 2], report)
        raise_first(writing)


def raise_first(writing: list[Future | None]) -> None:
    for future in filter(None, writing):
        future.result()


def read_batches(order: Order, rows: RenderedRows, jobs: Iterator[Job],
                 device: torch.device) -> Iterator[tuple[Job, list[Batch]]]:  # fmt: skip
    """Each job with its padded batches, in pinned memory where there is a GPU to copy them to."""
    for job in jobs:
        batches = []
        for samples in plan_batches(job.shard.lengths, order.run.extract.batch_tokens):
            lengths = torch.tensor(job.shard.lengths[samples])
            padded = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int64)
            for i, row in enumerate(job.rows[samples]):
                padded[i, : lengths[i]] = torch.from_numpy(rows.token_ids(row).astype(np.int64))
            pinned = padded.pin_memory() if device.type == "cuda" else padded
            batches.append(Batch(samples, pinned, lengths))
        yield job, batches


def capture_shard(target: TargetModel, order: Order, job: Job, batches: list[Batch], buffer: RowBuffer, report: Report,
                  stop_check: Callable[[], None], since: float) -> None:  # fmt: skip
    """A batch of similar lengths -> forward -> valid rows in one tensor -> one copy into host memory.

    since: when this thread turned to the job. A GPU runs behind it, and the wait for a free buffer is its time, too.
    """
    buffer.clear()
    done = 0
    for batch in batches:
        stop_check()
        token_ids = batch.token_ids.to(target.device, non_blocking=True)
        features = target.capture(token_ids, order.layer_ids, order.run.store.last_hidden)
        buffer.put(order.layout.gather(features, batch.lengths))
        now, end = monotonic(), batch.samples.stop
        if now - since >= REPORT_S or batch is batches[-1]:
            report.captured(job, slice(done, end), now - since)
            done, since = end, now


def stage(order: Order, rows: RenderedRows, job: Job, buffer: RowBuffer, report: Report) -> None:
    """The captured rows of a job [T, width] as a staged file. Rows that are not finite raise UserError."""
    content = HiddenShard(
        list(job.shard.sample_ids),
        torch.from_numpy(np.concatenate([rows.token_ids(row) for row in job.rows])),
        torch.from_numpy(np.concatenate([rows.loss_mask(row) for row in job.rows])),
        torch.tensor([0, *job.shard.lengths]).cumsum(0),
        provenance=order.provenance,
        **order.layout.split(buffer.rows()),
    )
    path = order.staging_folder / f"{job.shard.shard_id}.safetensors"
    write_shard(path, content)
    report.staged(job, path, ShardFacts.of(job.shard.shard_id, content))
