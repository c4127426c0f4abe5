"""How extraction and drafter training scale over the GPUs of one host, at Qwen3.6-27B's sizes.

    python benchmarks/scale.py [--out runs/scale] [--gpus 1,2,4,8] [--parts extract,train]     about nine minutes
    python benchmarks/scale.py --tiny             toy sizes, processes on a CPU (gloo): about a minute on a free machine

It covers extraction and training, each by itself; the streaming of rows from one to the other is not part of it.

    extract   one supervisor, a worker a GPU with random weights of its own, into /dev/shm with an uploader into a store
              that drains; workers are killed until as many are left as the next number says (scale_extract.py)
    train     training's own loop on a store of random rows under ZeRO 1, 2, 3, with as many rows a rank and step
              whatever the number of GPUs (scale_train.py)

Efficiency is the rate a GPU over that of one GPU, or of the smallest number there is. NVLink multicast stays off. Each
part is on file when it is done; one that fails is named, the others still run, and the exit code is 1.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import scale_train
import torch
from drafter_step_ours import block_flops
from extract_path import SHM, Lengths, build_run, random_rows
from run_parts import Run
from scale_extract import extraction
from yardstick import yardstick

from dflash_train.capture.setup import resolve
from dflash_train.capture.supervisor import visible_gpus
from dflash_train.target import random_weights
from dflash_train.util.device import pick_device
from dflash_train.util.io import human_bytes, write_bytes
from dflash_train.util.log import say

PARTS = ("extract", "train")
AIMS = {"extract": 0.95, "train": 0.90}
MASK = ["target.mask_token_id=248070", "drafter=qwen3_6_27b"]
TRAIN_WORDS = ["target=random_27b", "train.log_every=1", "train.save_every=100000", "train.eval_every=100000",
               "train.epochs=60", "train.keep_checkpoints=1", "train.resume=never", "train.prefetch_rows=4",
               "train.wandb.mode=disabled", "train.micro_batch=1"]  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much is measured. seconds: of extraction with each number of GPUs; rows: of a rank in a training step, as the
    default of 64 gives on eight."""

    lengths: Lengths = Lengths("b", 550, 0.8, num_samples=20480)  # noqa: RUF009 (frozen)
    shard_bytes: int = 1 << 30
    uploads_a_gpu: int = 2
    seconds: float = 16.0
    warm_shards: int = 5
    stages: tuple[int, ...] = (1, 2, 3)
    rows: int = 8
    warm_up: int = 2
    steps: int = 5
    num_shards: int = 6
    shard_samples: int = 20
    matrix: int = 8192
    copy_bytes: int = 4 << 30


TINY = Sizes(Lengths("b", 30, 0.8, 4, 128, 4000), 250 * 773, seconds=3.0, warm_shards=1, rows=2, warm_up=1, steps=2,
             num_shards=2, shard_samples=8, matrix=256, copy_bytes=1 << 20)  # fmt: skip


def measure(run: Run, sizes: Sizes, parts: list[str], counts: list[int], *, tiny: bool, folder: Path, until: float,
            parent: str | None = None) -> None:  # fmt: skip
    """Everything that was asked for. folder: for rows and the training store; until: training is ended then."""
    config = build_run(tiny)
    device = pick_device(config.hardware.device)
    gpus = visible_gpus(torch.cuda.device_count()) if device.type == "cuda" else []
    dtype = getattr(torch, config.target.dtype)
    run.keep("machine", lambda: {"num_gpus": len(gpus), **yardstick(device, dtype, sizes.matrix, sizes.copy_bytes)})
    if "extract" in parts:
        run.keep("extract", lambda: measure_extraction(sizes, counts, gpus, tiny, folder, parent))
    if "train" in parts:
        run.keep("train", lambda: measure_training(sizes, counts, gpus, tiny, folder, device, until))


def measure_extraction(sizes: Sizes, counts: list[int], gpus: list[str], tiny: bool, folder: Path,
                       parent: str | None) -> dict:  # fmt: skip
    config = build_run(tiny, f"store.shard_bytes={sizes.shard_bytes}",
                       f"store.upload_threads={sizes.uploads_a_gpu * max(counts)}")  # fmt: skip
    setup = resolve(config, random_weights.prepare(config.target))
    rows = random_rows(Path(folder, "rows"), sizes.lengths.draw(), config.target.vocab_size)
    return extraction(setup, rows, gpus[: max(counts)], counts, sizes.seconds, sizes.warm_shards, parent)


def measure_training(sizes: Sizes, counts: list[int], gpus: list[str], tiny: bool, folder: Path,
                     device: torch.device, until: float) -> dict:  # fmt: skip
    work = Path(folder, "train")
    words = [*TRAIN_WORDS, *MASK, *(TINY_WORDS if tiny else []), f"store.root={work}/store", f"work_dir={work}",
             f"store.cache_dir={work}/cache"]  # fmt: skip
    run = scale_train.build_run(words)
    scale_train.make_store(run, sizes.num_shards, sizes.shard_samples, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    plan = scale_train.Plan(str(work), words, list(sizes.stages), sizes.rows, sizes.warm_up, sizes.steps)
    figures = scale_train.training(plan, gpus, counts, until)
    return figures | {"flops_per_block": block_flops(run.drafter), "rows": sizes.rows}


TINY_WORDS = [
    *scale_train.TINY,
    "target.num_layers=8", "target.hidden_size=64", "target.vocab_size=128", "target.num_parameters=null",
    "target.shape.num_linear_layers=6", "target.mask_token_id=127", "drafter.mask_token_id=127",
]  # fmt: skip


# ---------------------------------------------------------------- the table


def markdown(figures: dict, failed: dict[str, str]) -> str:
    """Machine, one table a part, what went wrong."""
    lines = []
    if "machine" in figures:
        machine = figures["machine"]
        where = f"{machine['num_gpus']} x {machine['device']}, torch {machine['torch']}, {machine['code']}"
        lines += [f"{where}: matrix rate {machine['matrix_tflops']:.3g} TFLOP/s{', VOID' * machine['void']}", ""]
    if "extract" in figures:
        lines += [*extract_lines(figures["extract"]), ""]
    if "train" in figures:
        lines += [*train_lines(figures["train"], figures.get("machine")), ""]
    lines += [f"FAILED {name}: {reason}" for name, reason in failed.items()]
    return "\n".join([*lines, *wrong(figures)])


def wrong(figures: dict) -> list[str]:
    """What must not be, in words; empty when all is well."""
    extract, train = figures.get("extract", {}), figures.get("train", {})
    keys = ("lost_shards", "duplicated_shards", "wrong_samples")
    said = [f"WRONG extract: {key} {extract[key]}" for key in keys if extract.get(key)]
    return said + [f"FAILED train on {count} GPUs" for count in train.get("failed", [])]


def extract_lines(part: dict) -> Iterator[str]:
    found = {int(count): values for count, values in part["gpus"].items()}
    first = min(found)
    base = found[first]["tokens_per_s"] / first
    yield "| GPUs | extraction, tokens/s | slowest and fastest | efficiency | uploads, GB/s |"
    yield "| --- | --- | --- | --- | --- |"
    for count, values in sorted(found.items()):
        efficiency = values["tokens_per_s"] / count / base
        yield (f"| {count} | {values['tokens_per_s']:,.0f} | {values['slowest']:,.0f} and {values['fastest']:,.0f} | "
               f"{efficiency:.3f}{aim('extract', efficiency)} | {values['upload_mb_per_s'] / 1000:.2f} |")  # fmt: skip
    yield ""
    yield f"ready after {part['ready_s']:.0f} s; paused {part['paused_share']:.1%}"
    for kill in part["kills"]:
        yield (f"{kill['killed']} killed with {kill['shards_in_hand']} shards in hand, {kill['left']} left: done again "
               f"after {kill['recovered_s']:.1f} s")  # fmt: skip
    yield (f"{part['shards']:,} shards, {part['samples']:,} samples handed out; lost {part['lost_shards']}, twice "
           f"{part['duplicated_shards']}, samples not there once {part['wrong_samples']}")  # fmt: skip


def train_lines(part: dict, machine: dict | None) -> Iterator[str]:
    sizes = {(int(name.split()[1].removeprefix("zero")), int(name.split()[0])): values
             for name, values in part["sizes"].items()}  # fmt: skip
    yield "| ZeRO | GPUs | samples/s | ms a step | efficiency | peak a GPU | of the matrix rate |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for (stage, count), values in sorted(sizes.items()):
        first = min(other for found, other in sizes if found == stage)
        efficiency = values["samples_per_s"] / count / (sizes[stage, first]["samples_per_s"] / first)
        tflops = values["blocks_per_s"] / count * part["flops_per_block"] / 1e12
        share = f"{tflops / machine['matrix_tflops']:.2f}" if machine else ""
        cells = [stage, count, f"{values['samples_per_s']:,.1f}", f"{1000 / values['steps_per_s']:,.0f}",
                 f"{efficiency:.3f}{aim('train', efficiency)}", human_bytes(values["peak_bytes"]), share]  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    yield f"{part['rows']} rows a rank and step; the optimizer's step is part of it"


def aim(part: str, efficiency: float) -> str:
    return "" if efficiency >= AIMS[part] else f" (aim {AIMS[part]})"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", default="runs/scale", help="folder for the figures (JSON) and the table")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--gpus", help="numbers of them; default: 1, 2, 4, ... as many as there are")
    parser.add_argument("--minutes", type=float, default=9.0, help="training is ended after so long")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU, with 2 processes and with 1")
    args = parser.parse_args(argv)
    parts, num_gpus = args.parts.split(","), 2 if args.tiny else torch.cuda.device_count()
    if set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(PARTS)}")
    counts = list(map(int, args.gpus.split(","))) if args.gpus else [n for n in (1, 2, 4, 8) if n <= num_gpus]
    if not counts or max(counts) > num_gpus:
        parser.error(f"--gpus: {num_gpus} are here")
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # before any process of a group starts
    run, until = Run(Path(args.out, "scale.json")), time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory(prefix="dflash_train-scale-", dir=roomiest(SHM, tempfile.gettempdir())) as folder:
        measure(run, TINY if args.tiny else Sizes(), parts, counts, tiny=args.tiny, folder=Path(folder), until=until)
        for log in Path(folder).rglob("*.log"):
            shutil.copy(log, Path(args.out, log.name))  # what the ranks said
    text = markdown(run.figures, run.failed)
    write_bytes(Path(args.out, "scale.md"), text.encode() + b"\n")
    say(f"\n{text}\n")
    return 1 if run.failed or wrong(run.figures) else 0


def roomiest(*folders: str) -> str:
    """The one with the most room: training wants to see room for its checkpoints."""
    return max(folders, key=lambda folder: shutil.disk_usage(folder).free)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
