"""A store of very many small shards on a real S3 server: listed, resumed, verified; seconds, requests, peak memory.

    python benchmarks/store_soak.py --shards 20000

Starts SeaweedFS on a throwaway folder, fills it (object, its checksum confirmed, then marker, as extraction does),
damages a few shards, and runs each step in a process of its own, whose peak memory is counted from when its modules
were loaded. Steps: `finish` ends an extraction (reads each marker once, leaves catalogues), `complete` is a run that
finds nothing to do, `train` reads the markers as training does, `resume` lists what is missing. With --fast-fill the
same bytes are put through the server's own file interface, which takes a third of the time; every step uses S3.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers_store import make_shard
from helpers_weed import BUCKET, CREDENTIALS, Weed

from dflash_train.config import StoreConfig
from dflash_train.records import TargetHead
from dflash_train.store import s3
from dflash_train.store.catalog import list_markers, tally
from dflash_train.store.markers import ShardFacts, marker_bytes, marker_for, marker_key
from dflash_train.store.resume import is_complete, missing_shards
from dflash_train.store.shard import put_manifest, write_shard
from dflash_train.store.slices import ShardPlan
from dflash_train.store.target_files import write_target_files
from dflash_train.store.verify import verify_store
from dflash_train.util.log import duration
from dflash_train.util.provenance import code_version

LENGTHS, NUM_DAMAGED, NUM_GONE, INPUTS = (3, 5, 2), 3, 2, "soak"


def open_store(endpoint: str) -> s3.S3Store:
    options = {"endpoint_url": endpoint, "addressing": "path"}
    return s3.open_store(StoreConfig(kind="s3", root=f"s3://{BUCKET}/soak", options=options), "store")


def counted(store: s3.S3Store) -> list[int]:
    """A counter of the requests that the store sends."""
    count = [0]

    def before_send(**_):
        count[0] += 1

    store._client.meta.events.register("before-send.s3", before_send)
    return count


class FilerPut(threading.local):
    """Objects of the bucket through the server's file interface, over one connection a thread."""

    def __init__(self, port: int):
        self.connection = http.client.HTTPConnection("127.0.0.1", port)

    def __call__(self, key: str, data: bytes) -> None:
        self.connection.request("PUT", f"/buckets/{BUCKET}/soak/store/{key}", data)
        answer = self.connection.getresponse()
        answer.read()
        assert answer.status in (200, 201), answer.status


def fill(endpoint: str, filer_port: int | None, numbers: range, folder: str) -> None:
    """Shards of these numbers, each with samples of its own; through S3, or the file interface at filer_port."""
    template = make_shard(LENGTHS)
    put = open_store(endpoint).put_bytes if filer_port is None else FilerPut(filer_port)

    def publish(number: int) -> None:
        shard_id = f"train-{number:05d}"
        ids = [f"{shard_id}/{i}" for i in range(len(LENGTHS))]
        hidden = template.hidden + torch.tensor(number % 251, dtype=template.hidden.dtype)
        content = type(template)(ids, template.token_ids, template.loss_mask, template.offsets, hidden, None,
                                 template.provenance)  # fmt: skip
        path = Path(folder, f"{shard_id}.safetensors")
        write_shard(path, content)
        marker = marker_for(path, ShardFacts.of(shard_id, content))
        put(marker.key, path.read_bytes())
        put(marker_key(shard_id), marker_bytes(marker))
        path.unlink()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(publish, numbers))


def finish_filling(endpoint: str, num_shards: int) -> None:
    store = open_store(endpoint)
    put_manifest(store, {"layer_ids": [1, 2], "hidden_size": 4, "dtype": "bfloat16", "last_hidden": False,
                         "inputs_hash": INPUTS, "shards": {"train": num_shards, "heldout": 0}}, ())  # fmt: skip
    embedding = torch.ones(8, 4)
    write_target_files(store, TargetHead(embedding, embedding, torch.ones(4), 0.0, 1e-6), {"config.json": b"{}"})


def damage(endpoint: str, num_shards: int) -> list[str]:
    """Change a byte of some shards and remove the markers of others; returns the ids of the first."""
    store, numbers = open_store(endpoint), random.Random(0).sample(range(num_shards), NUM_DAMAGED + NUM_GONE)
    ids = [f"train-{number:05d}" for number in numbers]
    for shard_id in ids[:NUM_DAMAGED]:
        key = json.loads(store.get_bytes(marker_key(shard_id)))["key"]
        content = bytearray(store.get_bytes(key))
        content[-1] ^= 1
        store.put_bytes(key, bytes(content))
    store.delete_many([marker_key(shard_id) for shard_id in ids[NUM_DAMAGED:]])
    return ids[:NUM_DAMAGED]


def step(name: str, endpoint: str, num_shards: int, damaged: list[str], queue) -> None:
    """One step of a run; puts (seconds, CPU seconds, requests, MB of peak memory, found)."""
    store, plans = open_store(endpoint), []
    if name == "resume":
        plans = [ShardPlan(f"train-{i:05d}", (), ()) for i in range(num_shards)]
    requests, before, start, cpu = counted(store), peak_mb(), time.monotonic(), time.process_time()
    if name == "complete":
        assert is_complete(store, INPUTS)
        found = "complete"
    elif name == "finish":
        found = f"{tally(store, update_catalog=True).num_shards:,} shards"
    elif name == "train":
        found = f"{len(list_markers(store, 'train')):,} markers"
    elif name == "verify":
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            report = verify_store(store, folder, reopen=True)
        assert sorted(report.reopened) == sorted(damaged), report.reopened
        assert len(report.problems) == NUM_DAMAGED + 1, report.problems
        assert len(report.orphans) == NUM_DAMAGED + NUM_GONE, report.orphans  # a re-opened shard's bad object goes, too
        found = f"{NUM_DAMAGED} bad shards re-opened, {NUM_GONE} missing named, {len(report.orphans)} orphans swept"
    else:
        todo = missing_shards(store, plans)
        assert len(todo) == NUM_DAMAGED + NUM_GONE, todo
        found = f"{len(todo)} shards to do"
    queue.put((time.monotonic() - start, time.process_time() - cpu, requests[0], peak_mb() - before, found))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def apart(name: str, endpoint: str, num_shards: int, damaged: list[str] = ()) -> None:
    """A step in a fresh process, printed as a row of the table."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=step, args=(name, endpoint, num_shards, list(damaged), queue))
    process.start()
    process.join()
    assert process.exitcode == 0, f"{name} failed"
    seconds, cpu, requests, megabytes, found = queue.get()
    rate = f"{num_shards / seconds:,.0f}"
    print(f"| {name} | {duration(seconds)} | {duration(cpu)} | {rate} | {requests:,} | {megabytes:,.0f} MB | {found} |",
          flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fast-fill", action="store_true")
    options = parser.parse_args()
    os.environ.update(CREDENTIALS)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as staging:
        weed = Weed(Path(folder))
        try:
            filer_port = weed.ports["filer"] if options.fast_fill else None
            soak(weed.endpoint, filer_port, options.shards, options.processes, staging)
        finally:
            weed.kill()


def soak(endpoint: str, filer_port: int | None, num_shards: int, processes: int, staging: str) -> None:
    start, context = time.monotonic(), multiprocessing.get_context("spawn")
    each = -(-num_shards // processes)
    parts = [range(i * each, min(num_shards, (i + 1) * each)) for i in range(processes)]
    workers = [context.Process(target=fill, args=(endpoint, filer_port, part, staging)) for part in parts]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    assert not any(worker.exitcode for worker in workers)
    finish_filling(endpoint, num_shards)
    seconds = time.monotonic() - start
    print(f"commit {code_version()}: {num_shards:,} shards, {processes} processes that fill", flush=True)
    print("| step | time | CPU of the step | shards/s | requests | peak memory beyond start | found |")
    print(
        f"|---|---|---|---|---|---|---|\n| fill | {duration(seconds)} | | {num_shards / seconds:,.0f} | | | |",
        flush=True,
    )
    for name in ("finish", "complete", "train"):
        apart(name, endpoint, num_shards)
    damaged = damage(endpoint, num_shards)
    apart("verify", endpoint, num_shards, damaged)
    apart("resume", endpoint, num_shards)


if __name__ == "__main__":
    main()
