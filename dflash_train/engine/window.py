"""One optimizer step: a window of micro-batches, its denominator over all ranks, forward, loss and backward."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_train.config import DrafterConfig
from dflash_train.drafter.anchors import draw_anchors
from dflash_train.drafter.dflash import block_hidden
from dflash_train.drafter.loss import Objective, draft_loss, window_denominator
from dflash_train.engine.agree import together
from dflash_train.engine.zero import ZeroEngine
from dflash_train.records import Blocks, DraftBatch, TargetHead
from dflash_train.store.order import Row
from dflash_train.store.stream import StopAsked
from dflash_train.util import dist
from dflash_train.util.errors import UserError


@dataclass(frozen=True)
class Window:
    """parts: this rank's micro-batches with their blocks. The rest: sums over all ranks, so that all decide alike.

    elapsed_s: rank 0's clock. stop: some rank was asked to stop.
    """

    parts: list[tuple[DraftBatch, Blocks]]
    denominator: float
    num_blocks: float
    num_samples: float
    num_tokens: float
    elapsed_s: float
    stop: bool


def draw_blocks(rows: list[Row], batch: DraftBatch, config: DrafterConfig, num_anchors: int, seed: int) -> Blocks:
    """Anchors of each row's own epoch: a micro-batch may hold the end of one epoch and the start of the next."""
    drawn = []
    for b, row in enumerate(rows):
        cut = lambda value, b=b: None if value is None else value[b : b + 1]
        one = DraftBatch(**{name: cut(value) for name, value in vars(batch).items()})
        drawn.append(draw_anchors(one, num_anchors=num_anchors, block_size=config.block_size,
                                  mask_token_id=config.mask_token_id, seed=seed, epoch=row.epoch))  # fmt: skip
    return Blocks(**{name: torch.cat([getattr(blocks, name) for blocks in drawn]) for name in vars(drawn[0])})


def next_window(
    batches: Iterator[tuple[list[Row], DraftBatch]], accumulation: int, config: DrafterConfig, objective: Objective,
    *, num_anchors: int, seed: int, device: torch.device, elapsed_s: float, stop: bool,
) -> Window:  # fmt: skip
    """Take `accumulation` micro-batches. A collective: a rank that cannot read its rows makes every rank raise, one
    that is asked to stop while it waits for them makes every rank stop."""
    parts = []
    with together(device):
        try:
            for _ in range(accumulation):
                rows, batch = next(batches)
                parts.append((batch, draw_blocks(rows, batch, config, num_anchors, seed)))
        except StopAsked:
            parts, stop = [], True
    sums = dist.all_reduce_sum([
        sum(window_denominator(blocks, objective) for _, blocks in parts),
        sum(int(blocks.valid.sum()) for _, blocks in parts),
        sum(len(ids) for batch, _ in parts for ids in batch.sample_ids),
        sum(int((batch.document_ids >= 0).sum()) for batch, _ in parts),
        elapsed_s if dist.is_main() else 0.0,
        float(stop),
    ], device)  # fmt: skip
    return Window(parts, *sums[:5], stop=sums[5] > 0)


def train_window(
    engine: ZeroEngine, window: Window, config: DrafterConfig, head: TargetHead, objective: Objective, attention: str
) -> dict:
    """Forward and backward of every micro-batch, one optimizer step -> loss, grad_norm, accuracy (per slot from 1).

    Every rank does the same number of passes; an empty row's loss is 0 and its backward real. Raises UserError on
    every rank when the loss is not finite."""
    denominator = max(window.denominator, 1e-9)  # 0 when no row of the window has an anchor
    total: Tensor | float = 0.0
    for batch, blocks in uploaded(window.parts, engine.device):
        hidden_BNSD = block_hidden(engine, config, head, batch, blocks, attention)
        terms = draft_loss(hidden_BNSD, blocks, head, objective, batch)
        engine.backward(terms.numerator, denominator)
        parts = [terms.numerator.detach().double()[None], terms.correct.double(), terms.supervised.double()]
        total = total + torch.cat(parts)
    sums = dist.all_reduce_sum(total.tolist(), engine.device)
    slots = config.block_size - 1
    loss, correct, supervised = sums[0] / denominator, sums[1 : 1 + slots], sums[1 + slots :]
    if not math.isfinite(loss):
        raise UserError("training loss", got=loss, want="a finite number",
                        fix="a lower train.lr; the last checkpoint is from before")  # fmt: skip
    accuracy = [hits / max(count, 1) for hits, count in zip(correct, supervised)]
    return {"loss": loss, "grad_norm": engine.gradient_norm(), "accuracy": accuracy}


def uploaded(parts: list[tuple[DraftBatch, Blocks]], device: torch.device) -> Iterator[tuple[DraftBatch, Blocks]]:
    """The micro-batches on the device. On a GPU each is copied while the one before is computed, by a stream of its
    own: behind the computing they would take 2 to 4 % of it (3 ms of a row of 3,072 tokens at five taps)."""
    if device.type != "cuda":
        yield from ((batch.to(device), to_device(blocks, device)) for batch, blocks in parts)
        return
    computing, copying = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def upload(part: tuple[DraftBatch, Blocks]) -> tuple[DraftBatch, Blocks, torch.cuda.Event]:
        batch, blocks = part
        with torch.cuda.stream(copying):
            return batch.to(device), to_device(blocks, device), copying.record_event()

    ahead = upload(parts[0]) if parts else None
    for number in range(len(parts)):
        batch, blocks, copied = ahead
        computing.wait_event(copied)
        for value in (*vars(batch).values(), *vars(blocks).values()):
            if isinstance(value, Tensor):  # its memory must not be given to the next copy before this is computed
                value.record_stream(computing)
        ahead = upload(parts[number + 1]) if number + 1 < len(parts) else None
        yield batch, blocks


def to_device(blocks: Blocks, device: torch.device) -> Blocks:
    return Blocks(**{name: value.to(device, non_blocking=True) for name, value in vars(blocks).items()})
