"""How fast one GPU trains the Qwen3.6-27B drafter: forward + backward of a row beside the matrix rate and the peers.

    python benchmarks/drafter_step.py            one H200 or another GPU of 80 GB; about five minutes
    python benchmarks/drafter_step.py --tiny     the same script at tiny shapes on a CPU, in half a minute; no result

True shapes, random weights and data: 5 layers of width 5,120, a frozen head of 248,320 rows, bfloat16; B=16 with 512
anchors in 3,072 tokens, B=8 with 512 in 4,096. The row is one sample, as the peers' are, except where `packed` says
that three share it; it lies on the device before a step's clock starts. Parts:

    rate        of products: 8192^3, and the drafter's own
    step        ours and specforge's, forward + backward, at both block sizes (drafter_step_ours.py, _peers.py)
    torch       ours with train.kernels=torch
    head        the objective alone, with its gradient to the hidden states
    optimizer   ours through DeepSpeed ZeRO-2, optimizer and all
    profile     of our step, by kernel
    variants    ours: windows of rows in host memory, three samples a row, all layers causal, no sliding window, three
                layers; specforge's with Liger's kernels
    speculators step and head of speculators, as far as they compile in time

Useful work per valid block: three passes over the drafter's matrices for its B slots and two over the head for B-1 (it
is frozen); 230 GFLOP at B=16, 112 at B=8. Context rows, padding, recomputation and invalid blocks do not count.
`fraction` is that work over the time and over the best product of the same run.

Each part is on file when it is done; one that fails is named, the others still run, and the exit code is 1.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import drafter_step_peers as peer
import torch
from drafter_step_ours import (
    Pace,
    build_run,
    measure,
    measure_head,
    measure_optimizer,
    plain_step,
    random_head,
    time_ms,
)
from drafter_step_profile import kernel_times
from drafter_step_table import markdown
from run_parts import Run
from yardstick import VOID_TFLOPS

from dflash_train.config import TrainRun
from dflash_train.engine import inputs
from dflash_train.records import TargetHead
from dflash_train.util.device import device_name, pick_device
from dflash_train.util.errors import UserError
from dflash_train.util.io import write_bytes
from dflash_train.util.log import say
from dflash_train.util.provenance import code_version

PARTS = ("rate", "step", "torch", "head", "optimizer", "profile", "variants", "speculators")
"""In this order: what matters most is done first, should the time run out."""
CASES = {16: 3072, 8: 4096}  # block size: tokens of the row
TINY_CASES = {16: 96, 8: 128}
FED = 4  # rows of a window that lies in host memory when its step begins, as training's windows do
FULL_LAYERS = "drafter.layer_types=[full_attention,full_attention,full_attention,full_attention,full_attention]"
VARIANTS = {
    "causal": ["drafter.is_causal=true"],
    "no window": [FULL_LAYERS],
    "three layers": ["drafter.num_layers=3",
                     "drafter.layer_types=[sliding_attention,sliding_attention,full_attention]"],
}  # fmt: skip


@dataclass
class Bench:
    """What every part works with. until: of the monotonic clock; what may compile for long must be done by then."""

    tiny: bool
    device: torch.device
    pace: Pace
    head: TargetHead
    until: float

    def run(self, block_size: int, *words: str) -> TrainRun:
        return build_run(block_size, (TINY_CASES if self.tiny else CASES)[block_size], self.tiny, *words)

    @property
    def few(self) -> Pace:
        return Pace(min(self.pace.warmup, 3), min(self.pace.steps, 8))

    def ours(self, block_size: int, *words: str, documents: int = 1) -> dict:
        return measure(self.run(block_size, *words), self.head, self.device, self.pace, documents)

    def fed(self, block_size: int) -> dict:
        return measure(self.run(block_size), self.head, self.device, self.few, fed=FED)

    def profile(self) -> dict:
        ours = plain_step(self.run(16), self.head, self.device)

        def prepare() -> None:
            ours.engine.model.zero_grad(set_to_none=True)
            ours.prepare()

        for _ in range(self.few.warmup):
            prepare()
            ours.step()
        return kernel_times(ours.step, prepare, self.device)

    def variant(self, words: list[str]) -> dict:
        return measure(self.run(16, *words), self.head, self.device, self.few)

    def by_peer(self, measured, *more, block_size: int = 16, pace: Pace | None = None) -> dict:
        return measured(self.run(block_size), self.head, self.device, pace or self.pace, *more)

    def in_time(self, measured, last: bool) -> dict:
        left_s = self.until - time.monotonic()
        return self.by_peer(measured, left_s if last else left_s / 2, pace=self.few)


def products(run: TrainRun, size: int) -> dict[str, tuple[int, int, int]]:
    """name -> M, K, N of [M,K] @ [K,N]: a square one, and what a step of the drafter spends its time in."""
    config, train = run.drafter, run.train
    slots, width, inner = train.num_anchors * config.block_size, config.hidden_size, config.intermediate_size
    rows = min(train.head_chunk_blocks, train.num_anchors) * (config.block_size - 1)
    queries = config.num_heads * config.head_dim
    return {
        f"{size}^3": (size, size, size), "MLP up": (slots, width, inner), "MLP down": (slots, inner, width),
        "MLP weight's gradient": (inner, slots, width), "queries": (slots, width, queries),
        "head": (rows, width, config.vocab_size), "head's gradient": (rows, config.vocab_size, width),
        "context": (train.row_tokens, len(config.target_layer_ids) * config.target_hidden_size, width),
    }  # fmt: skip


def matrix_rates(run: TrainRun, device: torch.device, size: int, repeats: int = 20) -> dict:
    """Best TFLOP/s of each product, after warm-up, and the best of all."""
    dtype, rates = inputs.DTYPES[run.train.dtype], {}
    for name, (m, k, n) in products(run, size).items():
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype).t()
        out = torch.empty(m, n, device=device, dtype=dtype)
        times = [time_ms(partial(torch.mm, a, b, out=out), device) for _ in range(5 + repeats)]
        rates[name] = 2 * m * k * n / (min(times[5:]) * 1e-3) / 1e12
    best = max(rates.values())
    return {"best_tflops": best, "tflops": rates, "device": device_name(device), "torch": torch.__version__,
            "code": code_version(), "void": "H200" in device_name(device) and best < VOID_TFLOPS}  # fmt: skip


def works(part: str, bench: Bench) -> Iterator[tuple[str, object]]:
    """The named measurements of a part."""
    names = list(CASES)
    by_name = {
        "rate": [("rate", partial(matrix_rates, bench.run(16), bench.device, 256 if bench.tiny else 8192))],
        "step": [(f"step B={B} {who}", work) for B in names for who, work in (
            ("ours", partial(bench.ours, B)), ("specforge", partial(bench.by_peer, peer.specforge, block_size=B)))],
        "torch": [("step B=16 ours, kernels=torch", partial(bench.ours, 16, "train.kernels=torch"))],
        "head": [("head B=16 ours", partial(bench.by_peer, measure_head)),
                 ("head B=16 specforge", partial(bench.by_peer, peer.specforge_head))],
        "optimizer": [("optimizer B=16 ours, ZeRO-2", lambda: measure_optimizer(
            bench.run(16, "zero=zero2", "train.global_batch=1"), bench.head, bench.device, bench.few))],
        "profile": [("profile B=16 ours", bench.profile)],
        "variants": [*((f"step B={B} ours, fed {FED} rows from the host", partial(bench.fed, B)) for B in names),
                     ("step B=16 ours, packed", partial(bench.ours, 16, documents=3)),
                     *((f"step B=16 ours, {name}", partial(bench.variant, words)) for name, words in VARIANTS.items()),
                     *([] if bench.tiny else [("step B=16 specforge, Liger",
                                               partial(bench.by_peer, peer.specforge, True, pace=bench.few))])],
        "speculators": [("head B=16 speculators", partial(bench.in_time, peer.speculators_head, last=False)),
                        ("step B=16 speculators", partial(bench.in_time, peer.speculators, last=True))],
    }  # fmt: skip
    yield from by_name[part]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", default="runs/drafter_step", help="folder for the figures (JSON) and the table")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no part after so long")
    parser.add_argument("--steps", type=int, default=20, help="measured steps a case, after --warmup")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    args = parser.parse_args(argv)
    parts = args.parts.split(",")
    if set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(PARTS)}")
    device = pick_device("cpu" if args.tiny else "cuda")
    torch.manual_seed(0)
    run = Run(Path(args.out, "drafter_step.json"), minutes=args.minutes)
    shape = build_run(16, 96 if args.tiny else 3072, args.tiny)
    head = random_head(shape.drafter, device, inputs.DTYPES[shape.train.dtype])
    bench = Bench(args.tiny, device, Pace(args.warmup, args.steps), head, run.until)
    for part in (part for part in PARTS if part in parts):
        for name, work in works(part, bench):
            run.keep(name, work)
            text = markdown(run.figures, run.failed)  # written each time, since a run may be cut
            write_bytes(Path(args.out, "drafter_step.md"), text.encode() + b"\n")
    say(f"\n{text}\n")
    return 1 if run.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"\n{error}")
