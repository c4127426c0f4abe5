"""The objectives of `objectives.py` behind one face: which positions become blocks, and a step's loss terms.

Of the peers their own code runs (`peers_code.py`): the draw of anchors, labels, masks, weights, reduction and
normalisation. Ours under every objective are the packed rows, the drafter with its masks, the frozen head's weights,
and the optimizer.

    specforge 0.2.0    OnlineDFlashModel: _sample_anchor_positions and forward, fed with our drafter's hidden states;
                       a step is summed terms over summed weights, as its trainer accumulates them
    speculators 0.9.0  select_anchors, get_base_indices_for_anchored_blocks, compute_metrics (whose labels are the
                       target's own argmax or law, from the stored last state); a step is the mean over rows

Both draw among all positions of a row alike, so a long answer gives more blocks; ours shares them out by document.
"""

from typing import Protocol

import torch
from objectives_plan import Arm, gamma_of
from peers_code import peers
from torch import Tensor, nn

from dflash_train.config import DrafterConfig, TrainRun
from dflash_train.drafter.anchors import make_blocks
from dflash_train.drafter.loss import draft_loss
from dflash_train.engine import inputs
from dflash_train.engine.window import draw_blocks
from dflash_train.records import Blocks, DraftBatch, TargetHead
from dflash_train.store.order import Row
from dflash_train.util.errors import UserError


class TrainedBy(Protocol):
    """An objective. `draw` works on the CPU; `terms` gives a step's numerator (with a gradient) and denominator, which
    are summed over its micro-batches before they are divided."""

    def draw(self, rows: list[Row], batch: DraftBatch) -> Blocks: ...

    def terms(self, hidden_BNSD: Tensor, batch: DraftBatch, blocks: Blocks) -> tuple[Tensor, Tensor]: ...


class Ours:
    """This project's objective `train.loss` and its anchors."""

    def __init__(self, run: TrainRun, config: DrafterConfig, head: TargetHead, loss: str = "ce_decay"):
        assert run.train.loss == loss
        self.run, self.config, self.head, self.objective = run, config, head, inputs.make_objective(run, config)

    def draw(self, rows: list[Row], batch: DraftBatch) -> Blocks:
        return draw_blocks(rows, batch, self.config, self.run.train.num_anchors, self.run.train.seed)

    def terms(self, hidden_BNSD: Tensor, batch: DraftBatch, blocks: Blocks) -> tuple[Tensor, Tensor]:
        terms = draft_loss(hidden_BNSD, blocks, self.head, self.objective, batch)
        return terms.numerator, terms.denominator


class SpecForge:
    """decay: with our gamma; otherwise all slots weigh the same, as where its `loss_decay_gamma` is not set."""

    def __init__(self, run: TrainRun, config: DrafterConfig, head: TargetHead, decay: bool):
        with peers():
            from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        self.config, self.num_anchors = config, run.train.num_anchors
        lm_head = nn.Linear(*reversed(head.head.shape), bias=False, device="meta")
        lm_head.weight = nn.Parameter(head.head, requires_grad=False)
        self.model = OnlineDFlashModel(
            None, lm_head, None, config.mask_token_id, config.block_size, "sdpa", self.num_anchors,
            gamma_of(run, config.block_size) if decay else None, run.train.head_chunk_blocks,
        )  # fmt: skip

    def draw(self, rows: list[Row], batch: DraftBatch) -> Blocks:
        check_prompts(batch, self.config.block_size)
        num_tokens = batch.loss_mask.shape[1]
        anchors, valid = self.model._sample_anchor_positions(num_tokens, batch.loss_mask.float(), torch.device("cpu"))
        wide = (0, self.num_anchors - anchors.shape[1])  # one shape a run, for compiled attention
        return blocks_at(batch, nn.functional.pad(anchors, wide), nn.functional.pad(valid, wide), self.config)

    def terms(self, hidden_BNSD: Tensor, batch: DraftBatch, blocks: Blocks) -> tuple[Tensor, Tensor]:
        drafted = (blocks.anchors, blocks.valid, hidden_BNSD.flatten(1, 2))
        self.model._forward_draft_blocks = lambda **_: drafted
        _, _, metrics = self.model(batch.token_ids, None, batch.loss_mask.float())
        return metrics["loss_terms"]


class Speculators:
    """loss_fn, per_position_loss_weight, gamma, dpace_alpha: options of its trainer, by its names and defaults.

    Its fused losses need Triton; its eager ones do the same arithmetic in float32 where they get float32 logits."""

    def __init__(self, run: TrainRun, config: DrafterConfig, head: TargetHead, loss_fn: str,
                 per_position_loss_weight: str, gamma: float = 4.0, dpace_alpha: float = 0.5):  # fmt: skip
        with peers():
            from speculators.losses import resolve_loss_config
            from speculators.models.dflash.metrics import compute_metrics
            from speculators.models.dflash.utils import get_base_indices_for_anchored_blocks, select_anchors
        self.config, self.head, self.num_anchors = config, head, run.train.num_anchors
        self.compute_metrics, self.select_anchors = compute_metrics, select_anchors
        self.block_indices = get_base_indices_for_anchored_blocks
        self.settings = {"loss_config": resolve_loss_config(loss_fn, "eager"), "gamma": gamma,
                         "per_position_loss_weight": per_position_loss_weight, "dpace_alpha": dpace_alpha}  # fmt: skip

    def draw(self, rows: list[Row], batch: DraftBatch) -> Blocks:
        check_prompts(batch, self.config.block_size)
        drawn = [self.select_anchors(mask[None], self.num_anchors, self.config.block_size) for mask in batch.loss_mask]
        anchors, valid = (torch.stack(parts) for parts in zip(*drawn))
        return blocks_at(batch, anchors, valid, self.config)

    def terms(self, hidden_BNSD: Tensor, batch: DraftBatch, blocks: Blocks) -> tuple[Tensor, Tensor]:
        losses = [self.row_loss(hidden_BNSD[b], batch, blocks, b) for b in range(len(hidden_BNSD))]
        return torch.stack(losses).sum(), hidden_BNSD.new_tensor(float(len(losses)), dtype=torch.float32)

    def row_loss(self, hidden_NSD: Tensor, batch: DraftBatch, blocks: Blocks, b: int) -> Tensor:
        """Its loss of one packed row; logits, labels and mask are lined up as its model's forward does."""
        assert batch.last_hidden is not None, "speculators' labels need store.last_hidden=true"
        num_tokens, block_size = batch.loss_mask.shape[1], self.config.block_size
        at = self.block_indices(blocks.anchors[b], block_size).clamp(max=num_tokens - 1)  # over it: invalid blocks only
        logits = self.head.logits(hidden_NSD.flatten(0, 1))[None].float()
        with torch.no_grad():
            targets = self.head.logits(batch.last_hidden[b, (at - 1) % num_tokens])[None].float()
        mask = batch.loss_mask[b, at].float() * blocks.valid[b].repeat_interleave(block_size)
        mask[::block_size] = 0
        loss, _ = self.compute_metrics(logits, targets, mask[None], block_size, **self.settings)
        return loss


KINDS = {"ours": Ours, "specforge": SpecForge, "speculators": Speculators}


def make_objective(arm: Arm, run: TrainRun, config: DrafterConfig, head: TargetHead) -> TrainedBy:
    return KINDS[arm.kind](run, config, head, **arm.settings)


def blocks_at(batch: DraftBatch, anchors: Tensor, valid: Tensor, config: DrafterConfig) -> Blocks:
    return make_blocks(batch, anchors, valid, block_size=config.block_size, mask_token_id=config.mask_token_id)


def check_prompts(batch: DraftBatch, block_size: int) -> None:
    """The peers' masks know no documents: a block over the end of one may learn the next one's answer, unless a prompt
    is as long as a block. Raises UserError otherwise."""
    if (batch.loss_mask & (batch.position_ids < block_size)).any():
        raise UserError("prompts", got="one that is shorter than a block", want=f">= {block_size} tokens each")
