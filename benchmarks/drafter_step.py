"""How fast one GPU trains the Qwen3.6-27B drafter: forward + backward of a packed row, beside the matrix rate.

    python benchmarks/drafter_step.py            one H200 or another GPU of 48 GB or more; a minute after compiling
    python benchmarks/drafter_step.py --tiny     the same script at tiny shapes on a CPU, in seconds; no result

True shapes, random weights and data: 5 layers of width 5,120, a frozen head of 248,320 rows, bfloat16; B=16 with 512
anchors in 3,072 tokens, B=8 with 512 in 4,096. Rows, anchors, masks, loss and the step are training's own
(`RowReader`, `next_window`, `train_window`); DeepSpeed and the optimizer are left out. Each step draws new anchors.

Useful work per valid block: three passes over the drafter's matrices for its B slots and two over the head for B-1 (it
is frozen); 230 GFLOP at B=16, 112 at B=8. Context rows, padding, recomputation and invalid blocks do not count.
`fraction` is that work over the time and over the best rate of an 8192^3 bfloat16 product in the same run.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn

from dflash_train import cli
from dflash_train.config import DrafterConfig, TrainRun
from dflash_train.drafter.dflash import DFlashDrafter, resolve_attention
from dflash_train.engine import inputs
from dflash_train.engine.window import Window, next_window, train_window
from dflash_train.records import DraftBatch, HiddenShard, TargetHead
from dflash_train.store.loader import RowReader
from dflash_train.store.order import Row
from dflash_train.util.device import device_name, pick_device
from dflash_train.util.errors import UserError
from dflash_train.util.log import say
from dflash_train.util.provenance import code_version

DOCUMENTS = 3  # samples packed in the row; the first quarter of each is its prompt
CASES = ((16, 3072), (8, 4096))  # block size, tokens of the row
TINY_CASES = ((16, 96), (8, 128))
TINY = ["hardware=cpu", "train.dtype=float32", "train.num_anchors=12", "train.head_chunk_blocks=4",
        "drafter.hidden_size=64", "drafter.target_hidden_size=64", "drafter.intermediate_size=96",
        "drafter.num_heads=4", "drafter.num_kv_heads=2", "drafter.head_dim=16", "drafter.sliding_window=16",
        "drafter.vocab_size=128", "drafter.mask_token_id=127"]  # fmt: skip
COLUMNS = ["hardware", "code", "case", "forward + backward, ms [min, max]", "blocks/s", "matrix rate, TFLOP/s",
           "fraction", "peak memory, GiB", "row and anchors on the CPU, ms"]  # fmt: skip


def build_run(block_size: int, row_tokens: int, tiny: bool) -> TrainRun:
    """The training run whose step is measured: `drafter=qwen3_6_27b`, everything else as training defaults to."""
    words = ["drafter=qwen3_6_27b", f"drafter.block_size={block_size}", f"train.row_tokens={row_tokens}"]
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        return cli.build_run("train", compose("train", [*words, *(TINY if tiny else [])]))


# ---------------------------------------------------------------- random weights and data


def random_head(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> TargetHead:
    """An untied embedding and head, as the 27B target has."""
    draw = lambda: torch.randn(config.vocab_size, config.target_hidden_size, dtype=dtype, device=device).mul_(0.02)
    return TargetHead(draw(), draw(), torch.ones(config.target_hidden_size, dtype=dtype, device=device), 1.0, 1e-6)


def random_drafter(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> DFlashDrafter:
    with torch.device(device):
        model = DFlashDrafter(config).to(dtype)
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.ndim == 2):
            matrix.normal_(0, config.initializer_range)
    return model


def random_shard(config: DrafterConfig, row_tokens: int, dtype: torch.dtype) -> HiddenShard:
    """DOCUMENTS samples that fill one row."""
    length = row_tokens // DOCUMENTS
    lengths = [length] * (DOCUMENTS - 1) + [row_tokens - length * (DOCUMENTS - 1)]
    width = len(config.target_layer_ids) * config.target_hidden_size
    generator = torch.Generator().manual_seed(0)
    return HiddenShard(
        [f"s{j}" for j in range(DOCUMENTS)],
        torch.randint(0, config.mask_token_id, (row_tokens,), generator=generator, dtype=torch.int32),
        torch.cat([torch.arange(n) >= n // 4 for n in lengths]),
        torch.tensor([0, *lengths]).cumsum(0),
        torch.randn(row_tokens, width, generator=generator).to(dtype),
        None,
        {},
    )


def read_rows(shard: HiddenShard, row_tokens: int, pin: bool) -> Iterator[tuple[list[Row], DraftBatch]]:
    """The same row for ever, packed by training's reader, each time as that of another epoch (other anchors)."""
    marker = SimpleNamespace(sample_ids=shard.sample_ids)
    reader = RowReader(SimpleNamespace(get=lambda _: shard), [marker], row_tokens)
    rows = [Row(0, tuple((0, j) for j in range(len(shard.sample_ids))))]
    batch = reader.read(rows)
    if pin:  # as the prefetcher does
        batch = DraftBatch(**{k: v.pin_memory() if isinstance(v, Tensor) else v for k, v in vars(batch).items()})
    epoch = 0
    while True:
        yield [Row(epoch, rows[0].samples)], batch
        epoch += 1


# ---------------------------------------------------------------- the measurement


@dataclass
class PlainEngine:
    """What `train_window` needs of an engine, without DeepSpeed: gradients in the parameters, and no optimizer."""

    model: nn.Module
    device: torch.device

    def __call__(self, *args) -> Tensor:
        return self.model(*args)

    def backward(self, numerator: Tensor, denominator: float) -> None:
        (numerator / denominator).backward()

    def gradient_norm(self) -> float:
        return 0.0


def block_flops(config: DrafterConfig) -> float:
    """Floating-point operations that training on one block needs at least; see the head of this file."""
    shapes = {name: shape for name, shape in inputs.parameter_shapes(config).items() if len(shape) == 2}
    body = sum(rows * columns for name, (rows, columns) in shapes.items() if name != "fc.weight")
    head = config.vocab_size * config.target_hidden_size
    return 2.0 * (3 * body * config.block_size + 2 * head * (config.block_size - 1))


def time_ms(action: Callable[[], object], device: torch.device) -> float:
    """One call, by CUDA events on a GPU (all it queued is done when this returns)."""
    if device.type != "cuda":
        start = time.perf_counter()
        action()
        return 1000 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    action()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def matrix_rate(device: torch.device, size: int, dtype: torch.dtype, repeats: int = 30) -> float:
    """Best TFLOP/s of a size^3 product, after warm-up."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    times = [time_ms(lambda: torch.mm(a, b, out=out), device) for _ in range(10 + repeats)]
    return 2 * size**3 / (min(times[10:]) * 1e-3) / 1e12


@dataclass
class Step:
    """Of one case: milliseconds of every measured step and of its preparation, valid blocks a step, peak bytes."""

    step_ms: list[float]
    prepare_ms: list[float]
    num_blocks: float
    peak_bytes: int
    values: dict


def measure(run: TrainRun, head: TargetHead, device: torch.device, warmup: int, steps: int) -> Step:
    """Forward and backward as `train_window` does them: copy to the device, masks, drafter, chunked head, gradients."""
    train, config, dtype = run.train, run.drafter, inputs.DTYPES[run.train.dtype]
    engine = PlainEngine(random_drafter(config, device, dtype), device)
    objective = inputs.make_objective(run, config)
    attention = resolve_attention(train.attention, device, training=True)
    batches = read_rows(random_shard(config, train.row_tokens, dtype), train.row_tokens, device.type == "cuda")
    result = Step([], [], 0.0, 0, {})

    def step(window: Window) -> None:
        result.values = train_window(engine, window, config, head, objective, attention)

    for number in range(warmup + steps):
        engine.model.zero_grad(set_to_none=True)
        if number == warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        window = next_window(batches, 1, config, objective, num_anchors=train.num_anchors, seed=train.seed,
                             device=device, elapsed_s=0.0, stop=False)  # fmt: skip
        prepare_ms = 1000 * (time.perf_counter() - start)
        step_ms = time_ms(partial(step, window), device)
        if number >= warmup:
            result.step_ms.append(step_ms)
            result.prepare_ms.append(prepare_ms)
    result.num_blocks = window.num_blocks
    result.peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    assert all(parameter.grad is not None for parameter in engine.model.parameters())
    return result


def table_row(run: TrainRun, step: Step, rate: float, device: torch.device) -> str:
    """One Markdown row under COLUMNS."""
    median, config = statistics.median(step.step_ms), run.drafter
    blocks_per_s = step.num_blocks / (median * 1e-3)
    fraction = blocks_per_s * block_flops(config) / (rate * 1e12)
    version = f"torch {torch.__version__}"
    cells = [
        f"1x {device_name(device)}, {version}", f"`{code_version()}`",
        f"B={config.block_size}, {step.num_blocks:,.0f} valid anchors, {run.train.row_tokens:,} tokens, "
        f"{run.train.dtype}, {len(step.step_ms)} steps",
        f"{median:.1f} [{min(step.step_ms):.1f}, {max(step.step_ms):.1f}]", f"{blocks_per_s:,.0f}", f"{rate:.3g}",
        f"{fraction:.2f}", f"{step.peak_bytes / 2**30:.1f}", f"{statistics.median(step.prepare_ms):.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--steps", type=int, default=20, help="measured steps a case, after --warmup")
    parser.add_argument("--warmup", type=int, default=5)
    args = parser.parse_args(argv)
    device = pick_device("cpu" if args.tiny else "cuda")
    torch.manual_seed(0)
    rate = matrix_rate(device, 256, torch.float32) if args.tiny else matrix_rate(device, 8192, torch.bfloat16)
    say(f"matrix rate: {rate:.3g} TFLOP/s, best of 30")
    rows, head = [], None
    for block_size, row_tokens in TINY_CASES if args.tiny else CASES:
        run = build_run(block_size, row_tokens, args.tiny)
        head = head or random_head(run.drafter, device, inputs.DTYPES[run.train.dtype])
        step = measure(run, head, device, args.warmup, args.steps)
        say(f"B={block_size}: loss {step.values['loss']:.3f}, {block_flops(run.drafter) / 1e9:,.4g} GFLOP a block")
        rows.append(table_row(run, step, rate, device))
    print("\n".join([f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *rows]), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"\n{error}")
