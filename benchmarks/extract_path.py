"""Extraction's real way from rendered rows to markers, with its two ends replaced: ids are random, and a shard that is
stored goes again, so that no disk fills up.

Rows, plan, claims, staging, capture, uploader, checksums and markers are the stage's own. Whoever measures opens the
way (`open_path`) and lets capture_jobs, or a supervisor with its processes, work on it.
"""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import numpy as np
from hydra import compose, initialize_config_dir

from dflash_train import cli
from dflash_train.capture.desk import Desk
from dflash_train.capture.rows import RenderedRows, write_rows
from dflash_train.capture.setup import Setup, plan_all
from dflash_train.capture.worker import Job, Order
from dflash_train.config import ExtractRun
from dflash_train.data.rendering import Row, Rows
from dflash_train.extract import make_state
from dflash_train.store.claims import Claims
from dflash_train.store.local import LocalStore
from dflash_train.store.markers import Marker
from dflash_train.store.slices import ShardPlan, plan_batches
from dflash_train.store.upload import Uploader

BASE = ["target=random_27b", "extract.max_tokens=8192", "extract.lease_s=600"]
TINY = [
    "hardware=cpu", "hardware.num_threads=1", "target.dtype=float32", "target.num_layers=8", "target.hidden_size=64",
    "target.vocab_size=128", "target.num_parameters=null", "target.shape.intermediate_size=96",
    "target.shape.num_heads=24", "target.shape.num_kv_heads=4", "target.shape.head_dim=16",
    "target.shape.num_linear_layers=6", "target.shape.linear_key_heads=4", "target.shape.linear_value_heads=12",
    "target.shape.linear_key_dim=16", "target.shape.linear_value_dim=16", "extract.layer_ids=[1,3,6]",
    "extract.max_tokens=128", "extract.batch_tokens=256", "extract.window_samples=128",
]  # fmt: skip
SHM = "/dev/shm"


# ---------------------------------------------------------------- what is extracted


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sample: all `mean`, or log-normal with that mean after it is cut to shortest..longest. num_samples:
    as many as are planned, of which a measurement takes a part."""

    name: str
    mean: int
    sigma: float = 0.0
    shortest: int = 16
    longest: int = 8192
    num_samples: int = 4096

    def draw(self, seed: int = 0) -> np.ndarray:
        """i64[num_samples]. The location is found by bisection, so that what is cut does not shift the mean."""
        shape = np.exp(self.sigma * np.random.default_rng(seed).standard_normal(self.num_samples))
        cut = lambda scale: np.clip(np.rint(scale * shape), self.shortest, self.longest).astype(np.int64)
        low, high = 0.0, float(self.longest)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if cut(middle).mean() < self.mean else (low, middle)
        return cut(high)


def random_rows(folder: Path, lengths: np.ndarray, vocab: int, seed: int = 0) -> RenderedRows:
    """Rendered rows of random ids; the second half of each sample is supervised."""
    rng = np.random.default_rng(seed)
    rows = Rows()
    for i, length in enumerate(lengths):
        ids = rng.integers(0, vocab, length, dtype=np.int32)
        rows.rows[f"sample-{i:06d}"] = Row("train", ids, np.arange(length) >= length // 2, "random")
    folder.mkdir(parents=True)
    write_rows(folder, iter([(SimpleNamespace(split="train"), rows)]))
    return RenderedRows(folder)


def build_run(tiny: bool, *words: str) -> ExtractRun:
    """The stage's typed configuration."""
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        return cli.build_run("extract", compose("extract", [*BASE, *(TINY if tiny else []), *words]))


def with_changes(setup: Setup, *, batch_tokens: int | None = None, **store: object) -> Setup:
    """The same set-up with another batch size, or other keys of the store's group."""
    run = setup.run
    extract = replace(run.extract, batch_tokens=batch_tokens or run.extract.batch_tokens)
    return replace(setup, run=replace(run, store=replace(run.store, **store), extract=extract))


def spread(setup: Setup, rows: RenderedRows, num_tokens: int, at_least: int = 4) -> list[ShardPlan]:
    """Shards from all over the plan with about so many tokens together: short samples and long ones, as a whole run has
    them, bucketed as among many."""
    shards = plan_all(setup, rows)
    mean = sum(shard.num_tokens for shard in shards) / len(shards)
    count = min(len(shards), max(at_least, math.ceil(num_tokens / mean)))
    return [shards[int((i + 0.5) * len(shards) / count)] for i in range(count)]


def padding_waste(shards: Iterable[ShardPlan], batch_tokens: int) -> float:
    """Share of the positions that go through the target and are padding."""
    valid = padded = 0
    for shard in shards:
        for samples in plan_batches(shard.lengths, batch_tokens):
            lengths = shard.lengths[samples]
            valid, padded = valid + sum(lengths), padded + max(lengths) * len(lengths)
    return 1 - valid / padded


# ---------------------------------------------------------------- where it goes


class DrainedStore(LocalStore):
    """A folder in which an object goes as soon as its marker is there. Object and marker are written as ever: copied,
    flushed, renamed. puts: objects stored, by shard; the markers stay."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.puts: Counter = Counter()

    def put_file(self, key: str, path: Path) -> None:
        super().put_file(key, path)
        self.puts[path.stem] += 1

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        written = super().put_bytes(key, data, if_absent=if_absent)
        if written and key.startswith("markers/"):
            self.delete(json.loads(data)["key"])
        return written

    def marked(self) -> list[dict]:
        """Every marker, as it lies there."""
        return [json.loads(self.get_bytes(key)) for key, _ in self.list("markers/")]


class Watched(Desk):
    """The stage's desk, which also remembers when what happened, and can close early."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen: list[tuple[float, str, int]] = []  # when a worker reported how many captured tokens
        self.marks: list[tuple[float, Marker]] = []
        self.handed_out: list[ShardPlan] = []
        self.enough = False

    def jobs(self) -> Iterator[Job]:
        for job in super().jobs():
            self.handed_out.append(job.shard)
            yield job
            if self.enough:
                return

    def captured(self, worker: str, job: Job, samples: slice, seconds: float) -> None:
        super().captured(worker, job, samples, seconds)
        self.seen.append((monotonic(), worker, sum(job.shard.lengths[samples])))

    def uploaded(self, marker: Marker, seconds: float) -> None:
        super().uploaded(marker, seconds)
        self.marks.append((monotonic(), marker))


@contextmanager
def open_path(setup: Setup, store: DrainedStore, rows: RenderedRows, shards: list[ShardPlan],
              staging: Path) -> Iterator[tuple[Order, Watched]]:  # fmt: skip
    """Claims, desk and uploader as the stage opens them. Everything is uploaded once it is left."""
    config, order = setup.run.extract, Order.of(setup, rows, staging, shards)
    with Claims(store, config.lease_s) as claims:
        state = make_state(setup, len(shards), rows, shards)
        desk = Watched(rows, shards, setup.token_bytes, claims, state, lambda: None)
        with Uploader(store, staging, threads=setup.run.store.upload_threads, on_done=desk.uploaded,
                      on_retry=state.retry) as uploader:  # fmt: skip
            desk.open(uploader)
            yield order, desk


@contextmanager
def folders(parent: str | None = None) -> Iterator[tuple[DrainedStore, Path]]:
    """A drained store and a staging folder beside it, in memory; both go in the end."""
    with tempfile.TemporaryDirectory(prefix="dflash_train-benchmark-", dir=parent or SHM) as folder:
        staging = Path(folder, "staging")
        staging.mkdir()
        yield DrainedStore(Path(folder, "store")), staging


# ---------------------------------------------------------------- rates


def steady(marks: list[tuple[float, Marker]], skip: int = 0) -> dict:
    """Rates between a marker, the first after `skip`, and the last one: the work, end to end, of what has been running
    for a while."""
    marks = sorted(marks, key=lambda mark: mark[0])[skip:]
    if len(marks) < 3:
        raise ValueError(f"{len(marks)} shards are too few for a rate between the first and the last")
    seconds = marks[-1][0] - marks[0][0]
    total = lambda value: sum(value(marker) for _, marker in marks[1:])
    tokens, samples = total(lambda m: m.num_tokens), total(lambda m: len(m.sample_ids))
    return {"tokens_per_s": tokens / seconds, "samples_per_s": samples / seconds, "tokens": tokens, "seconds": seconds,
            "upload_mb_per_s": total(lambda m: m.bytes) / seconds / 1e6}  # fmt: skip


def through(setup: Setup, rows: RenderedRows, shards: list[ShardPlan], work: Callable[[Order, Watched], object],
            parent: str | None = None, skip: int = 0) -> dict:  # fmt: skip
    """Let `work` take these shards all the way -> rates, paused share, and what is in the store afterwards."""
    started = monotonic()
    with folders(parent) as (store, staging):
        with open_path(setup, store, rows, shards, staging) as (order, desk):
            work(order, desk)
        return steady(desk.marks, skip) | {
            "paused_share": desk.uploader.paused_share, "whole_s": monotonic() - started,
            "padding_waste": padding_waste(shards, setup.run.extract.batch_tokens), "shards": len(shards),
            "largest_shard_tokens": order.capacity, **accounts(store, desk.handed_out),
        }  # fmt: skip


def accounts(store: DrainedStore, shards: list[ShardPlan]) -> dict:
    """What was handed out against the store's markers: shards lost, objects too many, samples not there just once."""
    markers = store.marked()
    there = Counter(sample_id for marker in markers for sample_id in marker["sample_ids"])
    want = Counter(sample_id for shard in shards for sample_id in shard.sample_ids)
    return {
        "lost_shards": len({shard.shard_id for shard in shards} - {marker["shard_id"] for marker in markers}),
        "duplicated_shards": sum(count - 1 for count in store.puts.values()),
        "wrong_samples": len((there - want) + (want - there)),
    }  # fmt: skip
