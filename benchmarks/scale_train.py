"""Drafter training on 1, 2, 4, ... GPUs under ZeRO 1, 2 and 3: training's own loop on a store of random rows.

    python benchmarks/scale_train.py JOB.json        one rank; started by `training` alone

The ranks of one number of GPUs start once and train under each stage in turn. Numbers that fit beside each other on the
host's GPUs are trained at the same time. Every rank has as many rows a step whatever their number, so the step should
take no longer. Nothing is kept: writing a checkpoint of 28 GB is the disk's time.
"""

import gc
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from drafter_step_ours import random_head
from hydra import compose, initialize_config_dir

from dflash_train import cli, train
from dflash_train.config import DrafterConfig, TrainRun
from dflash_train.engine import zero
from dflash_train.engine.inputs import DTYPES
from dflash_train.records import HiddenShard
from dflash_train.store.local import LocalStore
from dflash_train.store.shard import ShardFacts, publish_shard, put_manifest, write_shard
from dflash_train.store.target_files import write_target_files
from dflash_train.target import random_weights
from dflash_train.util import dist
from dflash_train.util.device import pick_device
from dflash_train.util.io import read_json, write_json
from dflash_train.util.log import say

TINY = ["hardware=cpu", "hardware.num_threads=1", "train.dtype=float32", "train.num_anchors=8", "train.row_tokens=64",
        "train.head_chunk_blocks=4", "drafter.hidden_size=64", "drafter.target_hidden_size=64",
        "drafter.intermediate_size=96", "drafter.num_heads=4", "drafter.num_kv_heads=2", "drafter.head_dim=16",
        "drafter.sliding_window=16", "drafter.vocab_size=128", "drafter.num_target_layers=8",
        "drafter.target_layer_ids=[1,3,6]", "drafter.num_layers=2",
        "drafter.layer_types=[sliding_attention,full_attention]"]  # fmt: skip
PER_ROW = 4
"""Samples in a packed row: they fill it."""


@dataclass(frozen=True)
class Plan:
    """What is trained. rows: of a rank in a step; warm_up: steps that compile; words: of the command line."""

    folder: str
    words: list[str]
    stages: list[int]
    rows: int
    warm_up: int
    steps: int


# ---------------------------------------------------------------- one rank


class Measured(train.Trainer):
    """The stage's trainer, which writes no weights."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.results.finish = lambda step, engine: None

    def save(self) -> None:
        self.saved_step = self.step


def build_run(words: list[str]) -> TrainRun:
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        return cli.build_run("train", compose("train", words))


def train_stage(plan: Plan, stage: int, device: torch.device) -> dict | None:
    """Figures of the measured steps on rank 0, None on the others. A collective."""
    world, on_gpu = dist.world_size(), device.type == "cuda"
    run = build_run([*plan.words, f"zero=zero{stage}", f"train.global_batch={plan.rows * world}",
                     f"train.max_steps={plan.warm_up + plan.steps}",
                     f"train.output_dir={plan.folder}/out-{world}-{stage}"])  # fmt: skip
    held = torch.cuda.memory_allocated(device) if on_gpu else 0  # what the stage before has left
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    trainer = Measured(run, train.check(run), device)
    trainer.train()
    peaks = [0] * world
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    torch.distributed.all_gather_object(peaks, peak)
    trainer.engine.engine.destroy()
    figures = None
    if dist.is_main():
        lines = Path(trainer.output_dir, "metrics.jsonl").read_text().splitlines()[plan.warm_up :]
        rates = {key: median(json.loads(line)[key] for line in lines)
                 for key in ("samples_per_s", "tokens_per_s", "blocks_per_s", "steps_per_s")}  # fmt: skip
        figures = rates | {"peak_bytes": max(peaks), "held_bytes": held, "loss": json.loads(lines[-1])["loss"]}
    del trainer
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return figures


def rank_main(job_path: str) -> int:
    """Every stage in turn; rank 0 writes what came out after each."""
    job = read_json(job_path)
    plan, result = Plan(**job["plan"]), {}
    device = pick_device("cpu" if job["cpu"] else "cuda")
    zero.start(device)
    for stage in plan.stages:
        figures = train_stage(plan, stage, device)
        if figures:
            result[str(stage)] = figures
            write_json(job["result"], result)
    dist.shutdown()
    return 0


# ---------------------------------------------------------------- all of them


def rounds(counts: list[int], num_gpus: int) -> list[list[int]]:
    """Which numbers of GPUs are used at the same time: the largest first, each beside what still fits."""
    left, out = sorted(counts, reverse=True), []
    while left:
        free, now = num_gpus, []
        for count in list(left):
            if count <= free:
                free -= count
                now.append(count)
                left.remove(count)
        if not now:
            raise ValueError(f"{left[0]} GPUs are wanted, {num_gpus} are here")
        out.append(now)
    return out


def training(plan: Plan, gpus: list[str], counts: list[int], until: float) -> dict:
    """{"sizes": {"<count> zero<stage>": figures}, "failed": counts}. until: on the monotonic clock; who is not done by
    then is ended, and has failed. What was found before counts."""
    figures, failed = {}, []
    for number, together in enumerate(rounds(counts, len(gpus) or sum(counts))):
        groups, free = [], list(gpus)
        for count in together:
            mine, free = free[:count], free[count:]
            groups.append(Group(plan, count, mine))
        for group in groups:
            failed += [] if group.wait(until) else [str(group.count)]
            found = read_json(group.result) if group.result.exists() else {}
            figures |= {f"{group.count} zero{stage}": values for stage, values in found.items()}
        say(f"training, round {number + 1}: {', '.join(map(str, together))} GPUs done")
    return {"sizes": figures, "failed": failed}


class Group:
    """The processes of one number of ranks, each with its launch variables; their lines go to a file."""

    def __init__(self, plan: Plan, count: int, gpus: list[str]):
        self.count, self.result = count, Path(plan.folder, f"result-{count}.json")
        job = Path(plan.folder, f"job-{count}.json")
        write_json(job, {"plan": asdict(plan), "cpu": not gpus, "result": str(self.result)})
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.log = open(Path(plan.folder, f"train-{count}.log"), "w")  # noqa: SIM115 (closed in wait)
        self.processes = []
        for rank in range(count):
            launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1",
                      "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}  # fmt: skip
            environment = os.environ | {name: str(value) for name, value in launch.items()}
            self.processes.append(subprocess.Popen([sys.executable, __file__, str(job)], env=environment,
                                                   stdout=self.log, stderr=self.log))  # fmt: skip

    def wait(self, until: float) -> bool:
        """True once all have ended well. One that fails, or the time, ends the others: they would wait for it."""
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > until or any(process.poll() for process in self.processes):
                for process in self.processes:
                    process.kill()
            time.sleep(0.1)
        self.log.close()
        return not any(process.returncode for process in self.processes)


# ---------------------------------------------------------------- the store


def make_store(run: TrainRun, num_shards: int, shard_samples: int, device: torch.device) -> LocalStore:
    """A store as extraction leaves it, of random ids and rows; PER_ROW samples fill a row of train.row_tokens."""
    config, dtype = run.drafter, DTYPES[run.train.dtype]
    store = LocalStore(Path(run.store.root, run.store_name))
    text = random_weights.text_config(run.target).to_dict()
    target = {"name": run.target.name, "fingerprint": "random", "config": text, "stop_ids": [text["eos_token_id"]]}
    put_manifest(store, {
        "target": target,
        "layer_ids": config.target_layer_ids, "hidden_size": config.target_hidden_size, "dtype": "bfloat16",
        "last_hidden": False, "mask_token_id": config.mask_token_id, "chat_template_hash": "random",
        "shards": {"train": num_shards, "heldout": 0}, "samples": {"train": num_shards * shard_samples, "heldout": 0},
    }, ())  # fmt: skip
    write_target_files(store, random_head(config, device, dtype), {"config.json": json.dumps(text).encode()},
                       run.store.root)  # fmt: skip
    for number in range(num_shards):
        shard_id = f"train-{number:05d}"
        shard = random_shard(config, shard_id, shard_samples, run.train.row_tokens // PER_ROW, device, seed=number)
        path = Path(run.store.root, f"{shard_id}.safetensors")
        write_shard(path, shard)
        publish_shard(store, path, ShardFacts.of(shard_id, shard))
        path.unlink()
    return store


def random_shard(config: DrafterConfig, shard_id: str, num_samples: int, length: int, device: torch.device,
                 seed: int) -> HiddenShard:  # fmt: skip
    """Samples of one length; the first quarter of each is its prompt."""
    generator, tokens = torch.Generator(device).manual_seed(seed), num_samples * length
    hidden = torch.randn(tokens, len(config.target_layer_ids) * config.target_hidden_size, generator=generator,
                         dtype=torch.bfloat16, device=device)  # fmt: skip
    ids = torch.randint(0, config.mask_token_id, (tokens,), generator=generator, dtype=torch.int32, device=device)
    mask = (torch.arange(length) >= length // 4).repeat(num_samples)
    offsets = torch.arange(num_samples + 1) * length
    names = [f"{shard_id}-{i}" for i in range(num_samples)]
    return HiddenShard(names, ids.cpu(), mask, offsets, hidden.cpu(), None, {})


if __name__ == "__main__":
    sys.exit(rank_main(sys.argv[1]))
