"""Is `plan` right about memory? Peaks of one GPU beside its figures, at Qwen3.6-27B shapes with random weights.

    python benchmarks/plan_check.py                  one H200, bfloat16, a few minutes
    python benchmarks/plan_check.py --tiny           the same script at tiny shapes on a CPU, in seconds; no result
    ... --out peaks.json                             also as JSON

    capture   one batch of extract.batch_tokens tokens up to the last captured layer
    verify    one tree of 64 nodes over a context of 4,096 tokens, with the session's cache
    session   the bytes of that session's own tensors: keys and values, states, what is pending before the commit
    train     two micro-batches and the optimizer's step, ZeRO-1 on one GPU with torch's fused AdamW

On a GPU the peak is the allocator's, on a CPU that of the storages alive. The aim is 10 % on a GPU. A CPU computes with
other kernels (its delta rule keeps more, its norms are not fused), so its ratios only show that the script works.
"""

import argparse
import gc
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from drafter_step_ours import build_run, random_drafter, random_head, random_shard, read_rows
from hybrid_27b import TINY, Sizes, build, random_ids
from hybrid_agreement import random_tree
from live_bytes import CudaBytes, LiveBytes, meter
from yardstick import num_bytes

from dflash_train.config import TargetConfig
from dflash_train.drafter.dflash import resolve_attention
from dflash_train.engine import inputs, zero
from dflash_train.engine.window import next_window, train_window
from dflash_train.planning import memory
from dflash_train.planning.shapes import TargetSizes, sizes_from_files, target_parameters, target_sizes
from dflash_train.records import FeatureSpec
from dflash_train.util import dist
from dflash_train.util.device import device_name, pick_device
from dflash_train.util.io import human_bytes, write_json
from dflash_train.util.log import say, table
from dflash_train.util.provenance import code_version

NODES, AIM = 64, 0.10


@dataclass(frozen=True)
class Figure:
    """One measured peak beside the planned one, in bytes."""

    name: str
    measured: int
    planned: int

    @property
    def ratio(self) -> float:
        return self.planned / self.measured


def planned_sizes(target) -> TargetSizes:
    """What `plan` would read from the model's config.json."""
    config = TargetConfig(name="random weights", kind="hf")
    return target_sizes(sizes_from_files(config, target.text_config.to_dict()))[0]


def check_target(sizes: Sizes, dtype: torch.dtype, device: torch.device, batch_tokens: int) -> list[Figure]:
    """capture, verify and session."""
    with meter(device) as count:
        target, _ = build(sizes, dtype, device)
        planned, item, taps = planned_sizes(target), dtype.itemsize, len(sizes.layer_ids)
        weights = target_parameters(planned) * item
        length = min(2048, batch_tokens)
        ids = random_ids(sizes.vocab, batch_tokens // length, length)
        target.capture(ids, sizes.layer_ids)  # the first one compiles
        count.reset()
        target.capture(ids, sizes.layer_ids)
        peak = memory.capture_bytes(planned, ids.numel(), taps, False, item)
        figures = [Figure("capture", count.peak, weights + peak)]
        return figures + check_session(target, sizes, planned, count)


def check_session(target, sizes: Sizes, planned: TargetSizes, count: LiveBytes | CudaBytes) -> list[Figure]:
    """One verify pass, and the tensors that the session then owns."""
    item, taps, nodes = target.dtype.itemsize, len(sizes.layer_ids), NODES
    capacity = sizes.context + nodes
    session = target.session(capacity, FeatureSpec(sizes.layer_ids))
    session.prefill(random_ids(sizes.vocab, sizes.context))
    tree = random_tree(nodes, sizes.vocab, seed=0)
    session.forward(tree)
    count.reset()
    session.forward(tree)
    owned = [*session.cache.keys.values(), *session.cache.values.values()]
    for layer in session.delta_layers:
        rows, _, stash = layer.pending
        owned += [layer.rows, layer.state, rows, stash.keys, stash.updates, stash.gates]
    own = memory.session_bytes(planned, capacity, item) + memory.pending_bytes(planned, nodes, item)
    whole = target_parameters(planned) * item + own + memory.verify_bytes(planned, nodes, taps, item)
    return [Figure("verify", count.peak, whole), Figure("session", num_bytes(*owned), own)]


def check_training(tiny: bool, device: torch.device) -> list[Figure]:
    """Two micro-batches and a step as training does them, DeepSpeed included."""
    run = build_run(16, 96 if tiny else 4096, tiny)
    train, config, dtype = run.train, run.drafter, torch.bfloat16
    train.dtype, train.global_batch, train.micro_batch = "bfloat16", 2, 1
    attention, objective = resolve_attention(train.attention, device, training=True), inputs.make_objective(run, config)
    zero.start(device)
    with meter(device) as count:
        head = random_head(config, device, dtype)
        engine = zero.ZeroEngine(random_drafter(config, device, torch.float32), train, run.zero, 2, device)
        batches = read_rows(random_shard(config, train.row_tokens, dtype), train.row_tokens, device.type == "cuda")
        for number in range(3):
            if number == 2:  # by then everything that lasts is there
                gc.collect()
                count.reset()
            window = next_window(batches, 2, config, objective, num_anchors=train.num_anchors, seed=train.seed,
                                 device=device, elapsed_s=0.0, stop=False)  # fmt: skip
            train_window(engine, window, config, head, objective, attention)
        measured = count.peak
    parts = memory.training_parts(config, train, run.zero.stage, 1, tied=False, on_gpu=device.type == "cuda")
    dist.shutdown()
    return [Figure(f"train zero{run.zero.stage}", measured, sum(parts.values()))]


def main(argv: list[str]) -> int:
    """Print the table; exit 1 when a figure of a GPU misses the aim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=("target", "train"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    device = pick_device("cpu" if options.tiny else "cuda")
    figures = []
    if options.only != "train":
        sizes, dtype = (TINY, torch.float32) if options.tiny else (Sizes(), torch.bfloat16)
        figures += check_target(sizes, dtype, device, 256 if options.tiny else 16384)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if options.only != "target":
        figures += check_training(options.tiny, device)
    rows = [[f.name, human_bytes(f.measured), human_bytes(f.planned), f"{f.ratio:.3f}"] for f in figures]
    table(f"plan against {device_name(device)}, torch {torch.__version__}", ["", "measured", "planned", "ratio"], rows)
    if options.out:
        write_json(options.out, {"device": device_name(device), "torch": torch.__version__, "code": code_version(),
                                 "figures": [asdict(f) | {"ratio": f.ratio} for f in figures]})  # fmt: skip
    missed = [f.name for f in figures if abs(f.ratio - 1) > AIM]
    if missed:
        say(f"more than {AIM:.0%} off: {', '.join(missed)}")
    return 1 if missed and device.type == "cuda" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
