"""Offline acceptance on held-out samples: every answer position as an anchor, then the walk decoding would take.

An average over all positions is not an acceptance length: decoding visits hard regions more often. So the walk
a <- a + accepted + 1 is simulated, as it goes on answers that the target gave greedily.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from dflash_train.config import DrafterConfig
from dflash_train.drafter.anchors import make_blocks
from dflash_train.drafter.dflash import block_hidden
from dflash_train.drafter.loss import Objective, draft_loss
from dflash_train.records import DraftBatch, HiddenShard, TargetHead


@dataclass
class WalkStats:
    """Sums over samples. round_lengths: one list per sample, tokens per round with the bonus token. The others are over
    every position as an anchor: loss terms, and per slot (from 1) how often the argmax was the token."""

    round_lengths: list[list[int]] = field(default_factory=list)
    numerator: float = 0.0
    denominator: float = 0.0
    correct: list[int] = field(default_factory=list)
    supervised: list[int] = field(default_factory=list)

    @property
    def pooled(self) -> float:
        """Tokens per round over all rounds; 0.0 without rounds."""
        rounds = [length for sample in self.round_lengths for length in sample]
        return sum(rounds) / len(rounds) if rounds else 0.0

    @property
    def macro(self) -> float:
        """Mean over samples of their own tokens per round; 0.0 without rounds."""
        means = [sum(sample) / len(sample) for sample in self.round_lengths if sample]
        return sum(means) / len(means) if means else 0.0

    @property
    def loss(self) -> float:
        return self.numerator / self.denominator if self.denominator else 0.0

    @property
    def slot_accuracy(self) -> list[float]:
        return [hits / max(total, 1) for hits, total in zip(self.correct, self.supervised)]


def walk_acceptance(accepted_at: Sequence[int], start: int, end: int, block_size: int, *, stopped: bool) -> list[int]:
    """Round lengths of decoding tokens start+1 .. end-1 when the block at position a gets accepted_at[a - start] slots.

    start: the first answer token, which the prefill gave. stopped: token end-1 is a stop token, so the round that
    reaches it counts up to and including it; otherwise the answer was cut there and that round is left out."""
    rounds, anchor = [], start
    while anchor < end - 1:
        accepted = min(accepted_at[anchor - start], block_size - 1)
        left = end - 1 - anchor
        if accepted >= left:  # the block reaches the end, and its bonus token is not in the data
            if stopped:
                rounds.append(left)
            break
        rounds.append(accepted + 1)
        anchor += accepted + 1
    return rounds


def sample_batch(shard: HiddenShard, index: int) -> DraftBatch:
    """Sample `index` of a shard as a batch of one row with one document."""
    rows = slice(int(shard.offsets[index]), int(shard.offsets[index + 1]))
    count = rows.stop - rows.start
    return DraftBatch(
        token_ids=shard.token_ids[rows].long()[None],
        loss_mask=shard.loss_mask[rows].bool()[None],
        document_ids=torch.zeros(1, count, dtype=torch.long),
        position_ids=torch.arange(count)[None],
        hidden=shard.hidden[rows][None],
        last_hidden=None if shard.last_hidden is None else shard.last_hidden[rows][None],
        sample_ids=[[shard.sample_ids[index]]],
    )


def answer_span(loss_mask: torch.Tensor) -> tuple[int, int]:
    """First supervised run of bool[T] as (start, end); (0, 0) without one."""
    where = loss_mask.nonzero()[:, 0].tolist()
    if not where:
        return 0, 0
    end = where[0]
    while end < len(loss_mask) and loss_mask[end]:
        end += 1
    return where[0], end


def pad_row(batch: DraftBatch) -> DraftBatch:
    """A one-row batch padded to a power of two tokens (256 at least): flex compiles once per length."""
    count = batch.token_ids.shape[1]
    more = max(256, 1 << (count - 1).bit_length()) - count
    pad = lambda t, value: torch.nn.functional.pad(t, (0, 0) * (t.ndim - 2) + (0, more), value=value)
    return DraftBatch(
        token_ids=pad(batch.token_ids, 0), loss_mask=pad(batch.loss_mask, False),
        document_ids=pad(batch.document_ids, -1), position_ids=pad(batch.position_ids, 0), hidden=pad(batch.hidden, 0),
        last_hidden=None if batch.last_hidden is None else pad(batch.last_hidden, 0), sample_ids=batch.sample_ids,
    )  # fmt: skip


@torch.no_grad()
def evaluate_samples(
    model: nn.Module, config: DrafterConfig, head: TargetHead, samples: Iterable[DraftBatch], *, objective: Objective,
    stop_ids: Collection[int], attention: str, device: torch.device | str = "cpu",
) -> WalkStats:  # fmt: skip
    """Evaluate every answer position of every sample (`sample_batch`), objective.chunk_blocks anchors per forward.

    The model's train/eval mode does not matter (no dropout). head must already be on `device`."""
    stats = WalkStats(correct=[0] * (config.block_size - 1), supervised=[0] * (config.block_size - 1))
    for sample in samples:
        assert sample.token_ids.shape[0] == 1, "one sample per row"
        start, end = answer_span(sample.loss_mask[0].cpu())
        stopped = end > 0 and int(sample.token_ids[0, end - 1]) in stop_ids
        batch = (pad_row(sample) if attention == "flex" else sample).to(device)
        accepted_at: list[int] = []
        for first in range(start, end - 1, objective.chunk_blocks):
            anchors = torch.arange(first, first + objective.chunk_blocks, device=device)[None]
            valid = anchors < end - 1
            blocks = make_blocks(
                batch, anchors, valid, block_size=config.block_size, mask_token_id=config.mask_token_id
            )
            hidden_BNSD = block_hidden(model, config, head, batch, blocks, attention)
            terms = draft_loss(hidden_BNSD, blocks, head, objective, batch)
            accepted_at += terms.accepted[valid].tolist()
            stats.numerator += float(terms.numerator)
            stats.denominator += float(terms.denominator)
            stats.correct = [a + b for a, b in zip(stats.correct, terms.correct.tolist())]
            stats.supervised = [a + b for a, b in zip(stats.supervised, terms.supervised.tolist())]
        stats.round_lengths.append(walk_acceptance(accepted_at, start, end, config.block_size, stopped=stopped))
    return stats
