"""Both sides of a stream without models: a maker of shards in a thread, and batches as training reads them."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from helpers_store import make_run
from helpers_train import LAUNCH_VARIABLES, ROOT, make_shard

from dflash_train.capture.stream import file_bytes
from dflash_train.config import ExtractRun, StoreConfig
from dflash_train.records import DraftBatch, Sample
from dflash_train.store.loader import Prefetcher, RowReader, ShardCache
from dflash_train.store.local import LocalStore
from dflash_train.store.markers import ShardFacts
from dflash_train.store.order import RowOrder
from dflash_train.store.shard import list_markers, publish_shard, put_manifest, write_shard
from dflash_train.store.slices import ShardPlan
from dflash_train.store.stream import Options, StreamStore
from dflash_train.store.stream_line import StreamShard
from dflash_train.store.stream_reader import Feed, plan_stream
from dflash_train.store.stream_writer import Ring
from dflash_train.util.io import write_json, write_jsonl

TOKEN_BYTES = 2 * 64 * 2 + 5  # of helpers_train's shards: two taps of width 64 in bfloat16, id and mask
ORDER = {"seed": 3, "row_tokens": 48, "global_batch": 4}


def plan_of(lengths: list[list[int]]) -> list[StreamShard]:
    """helpers_train's shards before they are made."""
    plans = [ShardPlan(f"train-{i:05d}", tuple(f"train-{i:05d}/s{j}" for j in range(len(row))), tuple(row))
             for i, row in enumerate(lengths)]  # fmt: skip
    return [StreamShard(*vars(plan).values(), num_bytes=file_bytes(plan, TOKEN_BYTES, {"seed": 0})) for plan in plans]


def lengths_of(num_shards: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, 45, (6,), generator=generator).tolist() for _ in range(num_shards)]


def make(shard: ShardPlan, folder: Path) -> tuple[Path, ShardFacts]:
    """The shard as a staged file."""
    content = make_shard(shard.shard_id, list(shard.lengths), seed=int(shard.shard_id[-5:]))
    path = Path(folder, f"{shard.shard_id}.safetensors")
    write_shard(path, content)
    return path, ShardFacts.of(shard.shard_id, content)


class Maker(threading.Thread):
    """Extraction in a thread. `kill`: as SIGKILL would, it does and says nothing more; peak_bytes: of the ring's folder
    and what is staged beside it, as they lie there."""

    def __init__(self, store: StreamStore, shards: list[StreamShard], pause_s: float = 0.0):
        super().__init__(daemon=True)
        self.store, self.pause_s, self.killed, self.problem, self.peak_bytes = store, pause_s, False, None, 0
        self.ring = Ring(store, shards, [], self._stop_check)
        self.staging = Path(store.folder, "ring", "staging")
        self.start()

    def _stop_check(self) -> None:
        files = Path(self.store.folder, "ring").rglob("*.safetensors")
        self.peak_bytes = max(self.peak_bytes, sum(map(size_of, files)))
        if self.killed:
            raise SystemExit

    def run(self) -> None:
        self.staging.mkdir(parents=True, exist_ok=True)
        self.store.write_plan(self.ring.shards)
        try:
            with self.ring:
                for shard in self.ring.take():
                    time.sleep(self.pause_s)
                    self.ring.submit(*make(shard, self.staging), 0)
        except BaseException as problem:
            self.problem = problem

    def kill(self) -> None:
        self.killed = True
        self.join(10)
        assert not self.is_alive()


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def stream_store(folder: Path, max_bytes: int, wait_s: float = 20.0) -> StreamStore:
    store = StreamStore(Path(folder, "stream"), max_bytes, Options(wait_s=wait_s))
    store.make_folder()
    return store


def order_of(shards: list[StreamShard], epochs: float, **changes) -> RowOrder:
    return RowOrder([shard.shard_id for shard in shards], [shard.lengths for shard in shards], epochs=epochs,
                    **ORDER | changes)  # fmt: skip


class Reader:
    """Training without a model: the batches of its steps from `step` on."""

    def __init__(self, store: StreamStore, order: RowOrder, num_steps: int, step: int = 0, seed: int = ORDER["seed"]):
        stream = plan_stream(store, order, seed, num_steps)
        self.step, self.num_steps, self.feed = step, num_steps, Feed(store, stream, order, step)
        rows = (self.feed.step_rows(step) for step in range(step, num_steps))
        self.prefetcher = Prefetcher(RowReader(self.feed.cache, self.feed.markers, ORDER["row_tokens"]), rows, ahead=3)
        self.batches = iter(self.prefetcher)

    def steps(self, count: int | None = None, pause_s: float = 0.0) -> list[DraftBatch]:
        read = []
        for _ in range(self.num_steps - self.step if count is None else count):
            read.append(next(self.batches)[1])
            time.sleep(pause_s)
            self.step += 1
            self.feed.advance(self.step)
        return read

    def close(self, done: bool = True) -> None:
        self.feed.close(done)
        self.prefetcher.close()


def local_batches(folder: Path, shards: list[StreamShard], order: RowOrder, num_steps: int) -> list[DraftBatch]:
    """The same from a store on disk."""
    store = LocalStore(Path(folder, "local"))
    put_manifest(store, {}, ())
    for shard in shards:
        publish_shard(store, *make(shard, folder))
    reader = RowReader(ShardCache(store, Path(folder, "cache"), 1 << 40), list_markers(store), ORDER["row_tokens"])
    return [reader.read(order.step_rows(step)) for step in range(num_steps)]


def assert_same(got: list[DraftBatch], want: list[DraftBatch]) -> None:
    """Byte for byte."""
    assert len(got) == len(want)
    for one, other in zip(got, want):
        for name, value in vars(other).items():
            mine = getattr(one, name)
            assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, name


# ---------------------------------------------------------------- the real stages, on a tiny target

EXTRACT = """
import sys
sys.path.insert(0, "tests")
from helpers_stream import extraction
from dflash_train import extract, regenerate
from dflash_train.util import provenance
from dflash_train.util.errors import UserError
regenerate.ensure_answers = lambda run: run.answers_dir
provenance.code_version = lambda: "test"
try:
    sys.exit(extract.main(extraction(sys.argv[1], **dict(word.split("=") for word in sys.argv[2:]))))
except UserError as error:
    sys.exit(f"{error}")
"""


def extraction(folder: str, kind: str = "stream", max_bytes: str = "2000000", wait_s: str = "60", workers: str = "0",
               samples: str = "130") -> ExtractRun:  # fmt: skip
    """Extraction of the tiny target for helpers_train's runs: one or two samples a shard, eight of them held out."""
    run = make_run(Path(folder))
    run.data.name, run.extract.num_workers = "demo", int(workers)
    run.store = StoreConfig(kind=kind, root=f"{folder}/store", dtype="float32", shard_bytes=80 * 517, options={
        "wait_s": float(wait_s), "heldout_samples": 8} if kind == "stream" else {},
        max_bytes=int(max_bytes) if kind == "stream" else None, staging_dir=f"{folder}/staging")  # fmt: skip
    rng = random.Random(5)
    text = lambda n: "".join(rng.choice("abcdefgh ijklm") for _ in range(n)).strip() or "x"
    run.answers_dir.mkdir(parents=True, exist_ok=True)
    for split, name, count in (("train", "samples.jsonl", int(samples)), ("heldout", "heldout.jsonl", 8)):
        turns = ([("user", text(3 + i % 7)), ("assistant", text(8 + i % 12))] for i in range(count))
        rows = [Sample(f"{split}-{i}", "toy", "MIT", "chat", split, "off",
                       [{"role": role, "content": content} for role, content in turn]).to_json()
                for i, turn in enumerate(turns)]  # fmt: skip
        write_jsonl(run.answers_dir / name, rows)
    write_json(run.answers_dir / "manifest.json", {})
    return run


def start_extraction(folder: Path, **words: object) -> subprocess.Popen:
    """In a process of its own; its lines are in folder/extract.log."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in LAUNCH_VARIABLES:
        environment.pop(name, None)
    with open(Path(folder, "extract.log"), "a") as log:
        command = [sys.executable, "-c", EXTRACT, str(folder), *(f"{key}={value}" for key, value in words.items())]
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
