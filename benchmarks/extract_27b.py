"""Extraction at Qwen3.6-27B's sizes on one GPU, end to end: tokens/s, idle time, padding, beside two other ways.

    python benchmarks/extract_27b.py [--out runs/extract_27b] [--parts ours,naive]     one H200, eight to nine minutes
    python benchmarks/extract_27b.py --tiny                                            toy sizes on a CPU: a minute

Three lengths: (a) all 60 tokens, (b) log-normal of mean 550, (c) log-normal of mean 4,000, cut to 16..8192. The weights
are random, drawn once. Parts:

    ours     capture into /dev/shm with an uploader into a store that drains (extract_path.py), in bfloat16; the
             uploader's threads are in this process, the worse case; rates from the first marker to the last
    naive    one sample at a time, every hidden state, .cpu() per layer, a file a sample (extract_naive.py)
    plain    Hugging Face's own layers with the same kernels of flash-linear-attention, through the same loop
    fp8      as ours, in eight bits
    idle     as ours and fp8, under the profiler (extract_idle.py)
    batch    (b) in batches of 32,768 tokens instead of 16,384
    worker   (b) by a worker process under the supervisor, as the stage does it: this process then only uploads
    split    where there are two GPUs: the target over both, and its rows against one GPU's

Kernels are compiled and tuned before each part, which is timed and not counted. The matrix rate is measured first and
last. Each part is on file when it is done; one that fails is named, the others still run, and the exit code is 1.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from extract_idle import idle_share
from extract_naive import naive
from extract_path import SHM, Lengths, build_run, random_rows, spread, through, with_changes
from extract_split import layers_of, row_agreement
from extract_table import markdown, wrong
from run_parts import Run
from yardstick import Peak, num_bytes, yardstick

from dflash_train.capture.desk import Here
from dflash_train.capture.rows import RenderedRows
from dflash_train.capture.setup import Setup, resolve
from dflash_train.capture.supervisor import Supervisor, visible_gpus
from dflash_train.capture.worker import capture_jobs
from dflash_train.store.slices import ShardPlan, plan_batches
from dflash_train.target import random_weights, tensor_parallel
from dflash_train.target.base import TargetModel
from dflash_train.target.hf import HFTarget
from dflash_train.util.device import pick_device
from dflash_train.util.io import write_bytes
from dflash_train.util.log import say
from dflash_train.util.timing import now_s

PARTS = ("ours", "naive", "plain", "fp8", "idle", "batch", "worker", "split")
"""In this order: what matters most is done first, should the time run out."""
WAYS = 2  # of the split target


@dataclass(frozen=True)
class Sizes:
    """How much is measured. tokens: of each rate of ours; few_tokens: of what is slower, or profiled; naive: samples of
    each length; agreement: the batch whose rows are compared."""

    lengths: tuple[Lengths, ...] = (Lengths("a", 60, num_samples=16384), Lengths("b", 550, 0.8),
                                    Lengths("c", 4000, 0.8))  # fmt: skip
    tokens: int = 260_000
    few_tokens: int = 84_000
    naive: tuple[int, ...] = (64, 24, 8)
    agreement: tuple[int, int] = (8, 512)
    shard_bytes: int = 1 << 30
    other_batch: int = 32768
    matrix: int = 8192
    copy_bytes: int = 4 << 30


TINY = Sizes(lengths=(Lengths("a", 12, 0.0, 4, 128, 300), Lengths("b", 30, 0.8, 4, 128, 120),
                      Lengths("c", 60, 0.8, 4, 128, 60)), tokens=1200, few_tokens=900, naive=(3, 2, 2),
             agreement=(2, 24), shard_bytes=250 * 773, other_batch=512, matrix=256, copy_bytes=1 << 20)  # fmt: skip


@dataclass
class Bench:
    """What every part works with. rows: by name of their lengths; gpus: as CUDA_VISIBLE_DEVICES calls them."""

    sizes: Sizes
    setup: Setup
    target: HFTarget
    rows: dict[str, RenderedRows]
    gpus: list[str]
    parent: str | None = None  # of the folders for staging and store; None = /dev/shm
    warmed: dict[str, set] = field(default_factory=dict)  # by way: what its kernels were compiled and tuned for

    def case(self, dtype: str, batch_tokens: int | None = None) -> Setup:
        """Shards of eight-bit rows hold as many tokens as the others here, so that as many can be measured."""
        shard_bytes = self.sizes.shard_bytes // (2 if dtype == "fp8" else 1)
        return with_changes(self.setup, batch_tokens=batch_tokens, dtype=dtype, shard_bytes=shard_bytes)

    def end_to_end(self, name: str, setup: Setup, num_tokens: int, target: TargetModel, way: str) -> dict:
        """Capture through this process's own loop: what the stage does where there are no workers."""
        shards = spread(setup, self.rows[name], num_tokens)
        warm_up_s = warm_up(target, setup, shards, self.warmed.setdefault(way, set()), every=way == "plain")
        loop = lambda order, desk: capture_jobs(target, order, desk.jobs(), Here(desk), desk.check)
        with Peak(target.device) as peak:
            figures = through(setup, self.rows[name], shards, loop, self.parent)
        return figures | {"warm_up_s": warm_up_s, "peak_bytes": peak.bytes}

    def ours(self, name: str, dtype: str, batch_tokens: int | None = None) -> dict:
        return self.end_to_end(name, self.case(dtype, batch_tokens), self.sizes.tokens, self.target, "ours")

    def idle(self, name: str, dtype: str) -> dict:
        work = lambda: self.end_to_end(name, self.case(dtype), self.sizes.few_tokens, self.target, "ours")
        return idle_share(work, self.target.device)

    def plain(self, name: str) -> dict:
        with library_layers(self.target):
            return self.end_to_end(name, self.case("bfloat16"), self.sizes.few_tokens, self.target, "plain")

    def naive(self, name: str, count: int) -> dict:
        """Samples from all over the lengths; each shape was seen before."""
        rows, layer_ids = self.rows[name], self.setup.layer_ids
        by_length = sorted(range(len(rows)), key=rows.length)
        chosen = [by_length[int((i + 0.5) * len(rows) / count)] for i in range(count)]
        with tempfile.TemporaryDirectory(dir=self.parent or SHM) as folder, library_layers(self.target):
            naive(self.target.model, rows, chosen, layer_ids, Path(folder))
            start = now_s(self.target.device)
            naive(self.target.model, rows, chosen, layer_ids, Path(folder))
            seconds = now_s(self.target.device) - start
        tokens = sum(map(rows.length, chosen))
        return {"tokens_per_s": tokens / seconds, "samples_per_s": count / seconds, "tokens": tokens,
                "seconds": seconds}  # fmt: skip

    def worker(self, name: str) -> dict:
        """The worker draws the target for itself; its first shards are left out, since it loads its kernels then."""
        setup = self.case("bfloat16")
        shards = spread(setup, self.rows[name], self.sizes.tokens, at_least=6)

        def work(order, desk) -> None:
            with Supervisor(order, desk, setup.run.extract, self.gpus, 1, lambda: None) as supervisor:
                supervisor.run()

        return through(setup, self.rows[name], shards, work, self.parent, skip=2)

    def split(self, name: str) -> dict:
        """The target over two devices: its rate, and its rows beside those of one."""
        ids = torch.randint(self.setup.files.spec.vocab_size, self.sizes.agreement,
                            generator=torch.Generator().manual_seed(0))  # fmt: skip
        layer_ids, config = self.setup.layer_ids, self.setup.run.target
        one = layers_of(self.target, ids, layer_ids)
        with library_layers(self.target):
            by_library = layers_of(self.target, ids, layer_ids)
        devices = [f"cuda:{i}" if self.gpus else "cpu" for i in range(WAYS)]
        with tensor_parallel.start_group(self.setup.files, self.target.dtype, devices, kernels=config.kernels,
                                         random_seed=config.options["seed"]) as target:  # fmt: skip
            rows = layers_of(target, ids, layer_ids)
            figures = self.end_to_end(name, self.case("bfloat16"), self.sizes.tokens, target, "split")
        return figures | {"gpus": WAYS, "agreement": {
            "rows of one device": row_agreement(rows, one),
            "rows of one device by the library's layers, against its own": row_agreement(by_library, one),
        }}  # fmt: skip


# ---------------------------------------------------------------- what is made ready


@contextmanager
def library_layers(target: HFTarget) -> Iterator[None]:
    """The same weights through Hugging Face's own layers."""
    before, target.fused_capture = target.fused_capture, None
    try:
        yield
    finally:
        target.fused_capture = before


@torch.inference_mode()
def warm_up(target: TargetModel, setup: Setup, shards: list[ShardPlan], seen: set, every: bool = False) -> float:
    """Seconds of a pass over one batch of each kind for which a kernel may be compiled or tuned anew and that is not in
    `seen`; with `every`, each shape is a kind."""
    heads, start = setup.run.target.shape.linear_value_heads, now_s(target.device)
    for shard in shards:
        for samples in plan_batches(shard.lengths, setup.run.extract.batch_tokens):
            count, length = len(shard.lengths[samples]), max(shard.lengths[samples])
            # Triton has code of its own for 1 and for multiples of 16; norms are tuned by every 65,536 rows of heads.
            kind = (count == 1, count % 16 == 0, length % 16 == 0, -(-count * length * heads // 65536))
            kind = (count, length) if every else kind
            if kind not in seen:
                seen.add(kind)
                target.capture(torch.zeros(count, length, dtype=torch.int64), setup.layer_ids)
    return now_s(target.device) - start


def build(setup: Setup) -> tuple[HFTarget, dict]:
    """The target, and what it weighs. FLOPs count the matrix products of the layers up to the last captured one."""
    start = now_s()
    target = random_weights.load(setup.run.target, setup.run.hardware)
    used = [p for layer in target.layers[: max(setup.layer_ids) + 1] for p in layer.parameters()]
    return target, {"build_s": now_s(target.device) - start, "weight_bytes": num_bytes(*target.model.parameters()),
                    "flops_per_token": 2 * sum(p.numel() for p in used)}  # fmt: skip


def measure(run: Run, sizes: Sizes, parts: list[str], *, tiny: bool, folder: Path, parent: str | None = None) -> None:
    """Everything that was asked for, in order."""
    config = build_run(tiny)
    setup = resolve(config, random_weights.prepare(config.target))
    device = pick_device(config.hardware.device)
    gpus = visible_gpus(torch.cuda.device_count()) if device.type == "cuda" else []
    yard = partial(yardstick, device, getattr(torch, config.target.dtype), sizes.matrix, sizes.copy_bytes)
    run.keep("machine", yard)
    built = run.part("build", lambda: build(setup))
    if built is None:
        return
    target, run.figures["build"] = built
    rows = {lengths.name: random_rows(folder / lengths.name, lengths.draw(), config.target.vocab_size)
            for lengths in sizes.lengths}  # fmt: skip
    bench = Bench(sizes, setup, target, rows, gpus, parent)
    for part in (part for part in PARTS if part in parts):
        for name, work in works(part, bench):
            run.keep(name, work)
    run.keep("machine again", yard)


def works(part: str, bench: Bench) -> Iterator[tuple[str, object]]:
    """The named measurements of a part."""
    names = list(bench.rows)
    by_name = {
        "ours": [(f"ours {n} bfloat16", partial(bench.ours, n, "bfloat16")) for n in names],
        "naive": [(f"naive {n}", partial(bench.naive, n, count)) for n, count in zip(names, bench.sizes.naive)],
        "plain": [(f"plain {n}", partial(bench.plain, n)) for n in names],
        "fp8": [(f"ours {n} fp8", partial(bench.ours, n, "fp8")) for n in names],
        "idle": [(f"idle {n} {dtype}", partial(bench.idle, n, dtype))
                 for n, dtype in [(n, "bfloat16") for n in names] + [("b", "fp8")]],
        "batch": [(f"batch b bfloat16 {bench.sizes.other_batch}",
                   partial(bench.ours, "b", "bfloat16", bench.sizes.other_batch))],
        "worker": [("worker b", partial(bench.worker, "b"))],
        "split": [("split b", partial(bench.split, "b"))],
    }  # fmt: skip
    if part == "split" and len(bench.gpus) == 1:
        say("split: one GPU here, so it is left out")
        return
    yield from by_name[part]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", default="runs/extract_27b", help="folder for the figures (JSON) and the table")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, help="begin no part after so long")
    parser.add_argument("--tiny", action="store_true", help="toy sizes in float32: a minute on a CPU")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(PARTS)}")
    run = Run(Path(args.out, "extract_27b.json"), minutes=args.minutes)
    with tempfile.TemporaryDirectory() as folder:
        measure(run, TINY if args.tiny else Sizes(), parts, tiny=args.tiny, folder=Path(folder))
    text = markdown(run.figures, run.failed)
    write_bytes(Path(args.out, "extract_27b.md"), text.encode() + b"\n")
    say(f"\n{text}\n")
    return 1 if run.failed or wrong(run.figures) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
