"""What `drafter_step.py` measures of this project: training's own step and head, on random weights and data.

Rows, anchors, masks, loss and the step are training's (`RowReader`, `next_window`, `train_window`). A step is timed
from when its row lies on the device to when its last gradient is there; each draws new anchors.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor, nn
from yardstick import Peak

from dflash_train import cli
from dflash_train.config import DrafterConfig, TrainRun
from dflash_train.drafter.dflash import DFlashDrafter, resolve_attention
from dflash_train.drafter.kernels import resolve_kernels
from dflash_train.drafter.loss import draft_loss
from dflash_train.engine import inputs, zero
from dflash_train.engine.window import Window, draw_blocks, next_window, to_device, train_window
from dflash_train.records import Blocks, DraftBatch, HiddenShard, TargetHead
from dflash_train.store.loader import RowReader
from dflash_train.store.order import Row
from dflash_train.util import dist

DOCUMENTS = 3  # samples packed in a row; the first quarter of each is its prompt
TINY = ["hardware=cpu", "train.dtype=float32", "train.num_anchors=12", "train.head_chunk_blocks=4",
        "drafter.hidden_size=64", "drafter.target_hidden_size=64", "drafter.intermediate_size=96",
        "drafter.num_heads=4", "drafter.num_kv_heads=2", "drafter.head_dim=16", "drafter.sliding_window=16",
        "drafter.vocab_size=128", "drafter.mask_token_id=127"]  # fmt: skip


def build_run(block_size: int, row_tokens: int, tiny: bool, *words: str) -> TrainRun:
    """The training run whose step is measured: `drafter=qwen3_6_27b`, and what else training defaults to or `words`
    say."""
    given = ["drafter=qwen3_6_27b", f"drafter.block_size={block_size}", f"train.row_tokens={row_tokens}"]
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        return cli.build_run("train", compose("train", [*given, *(TINY if tiny else []), *words]))


# ---------------------------------------------------------------- random weights and data


def random_head(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> TargetHead:
    """An untied embedding and head, as the 27B target has."""
    draw = lambda: torch.randn(config.vocab_size, config.target_hidden_size, dtype=dtype, device=device).mul_(0.02)
    return TargetHead(draw(), draw(), torch.ones(config.target_hidden_size, dtype=dtype, device=device), 1.0, 1e-6)


def draw_matrices(model: nn.Module, std: float) -> None:
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.ndim == 2):
            matrix.normal_(0, std)


def random_drafter(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> DFlashDrafter:
    with torch.device(device):
        model = DFlashDrafter(config).to(dtype)
    draw_matrices(model, config.initializer_range)
    return model


def random_shard(config: DrafterConfig, row_tokens: int, dtype: torch.dtype, documents: int = DOCUMENTS) -> HiddenShard:
    """`documents` samples that fill one row."""
    length = row_tokens // documents
    lengths = [length] * (documents - 1) + [row_tokens - length * (documents - 1)]
    width = len(config.target_layer_ids) * config.target_hidden_size
    generator = torch.Generator().manual_seed(0)
    return HiddenShard(
        [f"s{j}" for j in range(documents)],
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


def one_row(run: TrainRun, device: torch.device, documents: int = 1) -> tuple[DraftBatch, Blocks]:
    """A row and the blocks of its first epoch, on the device."""
    dtype = inputs.DTYPES[run.train.dtype]
    shard = random_shard(run.drafter, run.train.row_tokens, dtype, documents)
    rows, batch = next(read_rows(shard, run.train.row_tokens, pin=False))
    blocks = draw_blocks(rows, batch, run.drafter, run.train.num_anchors, run.train.seed)
    return batch.to(device), to_device(blocks, device)


# ---------------------------------------------------------------- work and time


def block_flops(config: DrafterConfig) -> float:
    """Floating-point operations that training on one block needs at least; see the head of `drafter_step.py`."""
    shapes = {name: shape for name, shape in inputs.parameter_shapes(config).items() if len(shape) == 2}
    body = sum(rows * columns for name, (rows, columns) in shapes.items() if name != "fc.weight")
    return 2.0 * 3 * body * config.block_size + head_flops(config)


def head_flops(config: DrafterConfig) -> float:
    """The head's part of that: two passes over a frozen matrix."""
    return 2.0 * 2 * config.vocab_size * config.target_hidden_size * (config.block_size - 1)


def time_ms(action: Callable[[], object], device: torch.device) -> float:
    """One call, by CUDA events on a GPU (all it queued is done when this returns)."""
    if device.type != "cuda":
        start = time.perf_counter()
        action()
        return 1000 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    action()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def num_graphs() -> int:
    """Graphs that torch.compile has made so far in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@dataclass(frozen=True)
class Pace:
    """How often a step is done: `warmup` times (compiling comes first, so the clock has no part in it), then timed."""

    warmup: int = 5
    steps: int = 20


def timed(step: Callable[[], object], prepare: Callable[[], object], device: torch.device, pace: Pace) -> dict:
    """Median, least and most milliseconds of `step`; `prepare` comes before each, outside the clock but for its own.
    new_graphs: what was compiled during timed steps, which should be nothing."""
    torch._dynamo.reset()  # each case is compiled as in a process of its own, whatever shapes came before
    start, prepare_ms, step_ms = time.perf_counter(), [], []

    def once() -> None:
        begin = time.perf_counter()
        prepare()
        prepare_ms.append(1000 * (time.perf_counter() - begin))
        step_ms.append(time_ms(step, device))

    for _ in range(pace.warmup):
        once()
    warmup_s, graphs = time.perf_counter() - start, num_graphs()
    del prepare_ms[:], step_ms[:]
    with Peak(device) as peak:
        for _ in range(pace.steps):
            once()
    return {"ms": statistics.median(step_ms), "least_ms": min(step_ms), "most_ms": max(step_ms), "steps": pace.steps,
            "prepare_ms": statistics.median(prepare_ms), "peak_bytes": peak.bytes, "warmup_s": warmup_s,
            "new_graphs": num_graphs() - graphs}  # fmt: skip


# ---------------------------------------------------------------- the step, the head, the optimizer


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


class OurStep:
    """Training's step around an engine. documents: in its row. `prepare` draws a window and brings it to the device;
    `step` is all the rest. fed: windows are of so many rows, which stay in host memory until `step` takes them."""

    def __init__(self, run: TrainRun, head: TargetHead, engine, device: torch.device, documents: int = 1,
                 fed: int = 0):  # fmt: skip
        self.run, self.head, self.engine, self.device, self.fed = run, head, engine, device, fed
        self.kernels = resolve_kernels(run.train.kernels, device)
        self.objective = inputs.make_objective(run, run.drafter, self.kernels)
        self.attention = resolve_attention(run.train.attention, device, training=True)
        shard = random_shard(run.drafter, run.train.row_tokens, inputs.DTYPES[run.train.dtype], documents)
        self.batches = read_rows(shard, run.train.row_tokens, device.type == "cuda")
        self.window: Window | None = None
        self.values: dict = {}
        engine_module(engine).use(self.kernels, run.train.activation_checkpointing)

    def prepare(self) -> None:
        train = self.run.train
        self.window = next_window(self.batches, self.fed or 1, self.run.drafter, self.objective,
                                  num_anchors=train.num_anchors, seed=train.seed, device=self.device, elapsed_s=0.0,
                                  stop=False)  # fmt: skip
        if not self.fed:
            parts = self.window.parts
            parts[:] = [(batch.to(self.device), to_device(blocks, self.device)) for batch, blocks in parts]

    def step(self) -> None:
        self.values = train_window(
            self.engine, self.window, self.run.drafter, self.head, self.objective, self.attention
        )

    def facts(self) -> dict:
        return {"blocks": self.window.num_blocks, "loss": self.values["loss"], "kernels": self.kernels.name,
                "block_flops": block_flops(self.run.drafter)}  # fmt: skip


def engine_module(engine) -> DFlashDrafter:
    return engine.model if isinstance(engine, PlainEngine) else engine.engine.module


def plain_step(run: TrainRun, head: TargetHead, device: torch.device, documents: int = 1, fed: int = 0) -> OurStep:
    model = random_drafter(run.drafter, device, inputs.DTYPES[run.train.dtype])
    return OurStep(run, head, PlainEngine(model, device), device, documents, fed)


def measure(run: TrainRun, head: TargetHead, device: torch.device, pace: Pace, documents: int = 1,
            fed: int = 0) -> dict:  # fmt: skip
    """Forward and backward as `train_window` does them: masks, drafter, chunked head, gradients. copy_ms: of a row to
    the device, which is not in them."""
    ours = plain_step(run, head, device, documents, fed)

    def prepare() -> None:
        ours.engine.model.zero_grad(set_to_none=True)
        ours.prepare()

    figures = timed(ours.step, prepare, device, pace)
    assert all(parameter.grad is not None for parameter in ours.engine.model.parameters())
    figures["copy_ms"] = time_ms(lambda: next(ours.batches)[1].to(device), device)
    return figures | ours.facts()


def measure_head(run: TrainRun, head: TargetHead, device: torch.device, pace: Pace) -> dict:
    """Objective and gradient to the drafter's hidden states, from random ones."""
    batch, blocks = one_row(run, device)
    objective = inputs.make_objective(run, run.drafter, resolve_kernels(run.train.kernels, device))
    hidden_BNSD = random_hidden(run, blocks)

    def step() -> None:
        terms = draft_loss(hidden_BNSD, blocks, head, objective, batch)
        (terms.numerator / terms.denominator).backward()

    figures = timed(step, partial(clear, hidden_BNSD), device, pace)
    assert hidden_BNSD.grad.isfinite().all()
    return figures | head_facts(run, blocks)


def random_hidden(run: TrainRun, blocks: Blocks) -> Tensor:
    """[B,N,S,D], as after the final norm."""
    shape = (*blocks.token_ids.shape, run.drafter.hidden_size)
    return torch.randn(shape, dtype=inputs.DTYPES[run.train.dtype], device=blocks.anchors.device, requires_grad=True)


def clear(leaf: Tensor) -> None:
    leaf.grad = None


def head_facts(run: TrainRun, blocks: Blocks) -> dict:
    return {"blocks": float(blocks.valid.sum()), "block_flops": head_flops(run.drafter)}


def measure_optimizer(run: TrainRun, head: TargetHead, device: torch.device, pace: Pace) -> dict:
    """A whole step of one row through the DeepSpeed engine that training makes. Its peak counts the making too."""
    train = run.train
    train.global_batch = train.micro_batch = 1
    zero.start(device)
    try:
        with Peak(device) as made:
            model = random_drafter(run.drafter, device, torch.float32)
            engine = zero.ZeroEngine(model, train, run.zero, train.check_world(1), device)
            ours = OurStep(run, head, engine, device)
            ours.prepare()
            ours.step()  # the first one makes the moments
        figures = timed(ours.step, ours.prepare, device, pace) | ours.facts()
        figures["peak_bytes"] = max(made.bytes, figures["peak_bytes"])
        engine.engine.destroy()
    finally:
        dist.shutdown()
    return figures
