"""The objective, with the target's frozen head applied in chunks of whole blocks: full [rows, V] logits never exist.

    ce_decay   cross-entropy on token(anchor+k), weighted exp(-(k-1)/gamma)
    dpace      weighted by how much slot k matters for what gets accepted, from the drafter's own (detached) confidence
    kl         KL(target || drafter) with ce_decay's weights; the target's row for slot k is anchor+k-1

Each returns a numerator and a denominator: the division is done once over all micro-batches and ranks of a step.
The gradient to hidden is computed beside the forward, while a chunk's logits exist: two matrix products, no recompute,
and no second tensor of a chunk's size with the fused kernels (`kernels.py`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_train.drafter.kernels import TORCH, Kernels
from dflash_train.records import Blocks, DraftBatch, TargetHead

KINDS = ("ce_decay", "dpace", "kl")


@dataclass(frozen=True)
class Objective:
    """kind: one of KINDS. gamma: of ce_decay and kl. alpha: of dpace. chunk_blocks: whole blocks per chunk, at most.
    kernels: what works on the logits (`kernels.resolve_kernels`)."""

    kind: str = "ce_decay"
    gamma: float = 7.0
    alpha: float = 0.5
    chunk_blocks: int = 128
    kernels: Kernels = TORCH


@dataclass(frozen=True)
class LossTerms:
    """numerator: scalar with a gradient to hidden. denominator: scalar. correct, supervised: i64[S-1], per slot from 1.
    accepted: i64[B,N], leading slots of each block whose argmax is the label."""

    numerator: Tensor
    denominator: Tensor
    correct: Tensor
    supervised: Tensor
    accepted: Tensor


def default_gamma(block_size: int) -> float:
    """7 / 5 / 4 for blocks of 16 / 10 / 8, as published; else half the block."""
    return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)


def decay_weights(block_size: int, gamma: float, device: torch.device | str = "cpu") -> Tensor:
    """float32 [S-1]: exp(-(k-1)/gamma) of slots 1..S-1."""
    return torch.exp(-torch.arange(block_size - 1, device=device, dtype=torch.float32) / gamma)


def window_denominator(blocks: Blocks, objective: Objective) -> float:
    """What these blocks add to the step's denominator, from masks alone, before any forward."""
    supervised = blocks.loss_mask[..., 1:].sum(dim=(0, 1)).double()
    if objective.kind == "dpace":
        return float(supervised.sum())
    return float(supervised @ decay_weights(blocks.block_size, objective.gamma, supervised.device).double())


def dpace_weights(cross_entropy: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """[N,S-1] -> weight of slot k = sum over supervised j >= k of prod_{i<=j} s_i, with s = (1-alpha) q + alpha and
    s = 1 at unsupervised slots; 0 at those. No gradient."""
    confidence = (1 - alpha) * torch.exp(-cross_entropy.detach()) + alpha
    reach = torch.where(mask, confidence, 1.0).cumprod(dim=-1) * mask
    return reach.flip(-1).cumsum(-1).flip(-1) * mask


def _chunk(hidden: Tensor, head: TargetHead, labels: Tensor, mask: Tensor, objective: Objective, teacher: Tensor | None,
           gradient: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows of whole blocks: hidden, teacher [n*(S-1), D]; labels, mask [n,S-1] -> numerator, correct bool[n,S-1].

    gradient [n*(S-1), D] in the head's dtype, unless None, is filled with the numerator's."""
    kernels, flat_labels = objective.kernels, labels.flatten()
    logits = head.logits(hidden)
    teacher_logits = None if teacher is None else head.logits(teacher)
    terms = kernels.row_terms(logits, flat_labels, teacher_logits)
    correct = (terms.best.view_as(labels) == labels) & mask
    cross_entropy = terms.cross_entropy.view_as(labels)
    if objective.kind == "dpace":
        weights = dpace_weights(cross_entropy, mask, objective.alpha)
    else:
        weights = decay_weights(labels.shape[-1] + 1, objective.gamma, mask.device).to(cross_entropy.dtype) * mask
    loss = cross_entropy if teacher is None else terms.divergence.view_as(labels)
    numerator = (loss * weights).sum()
    if gradient is not None:
        slope = kernels.slope_(logits, flat_labels, weights.flatten(), terms, teacher_logits)
        torch.mm(slope, head.head, out=gradient)
    return numerator, correct


class _ChunkedHead(torch.autograd.Function):
    """Numerator of the blocks that carry loss, chunk by chunk. hidden_NSD has slot 0, which is skipped; labels and mask
    [N,S-1] do not. The head gets no gradient."""

    @staticmethod
    def forward(ctx, hidden_NSD, head, labels, mask, objective, teacher, with_gradient):
        numerator = hidden_NSD.new_zeros((), dtype=torch.promote_types(hidden_NSD.dtype, torch.float32))
        correct = torch.zeros_like(mask)
        live = mask[:, 0].nonzero()[:, 0]  # the mask is cumulative: without slot 1 a block has nothing
        slots, done, gradient = mask.shape[1], 0, None
        if with_gradient:
            gradient = torch.empty(len(live) * slots, hidden_NSD.shape[-1], dtype=head.head.dtype, device=mask.device)
        # Pieces of one size: a small last one would leave the GPU idle in its products.
        for chunk in live.tensor_split(-(-len(live) // objective.chunk_blocks)) if len(live) else ():
            end = done + len(chunk) * slots
            part, correct[chunk] = _chunk(
                hidden_NSD[:, 1:][chunk].flatten(0, 1), head, labels[chunk], mask[chunk], objective,
                teacher and teacher(chunk).flatten(0, 1), gradient[done:end] if with_gradient else None,
            )  # fmt: skip
            numerator, done = numerator + part, end
        ctx.save_for_backward(gradient, live)
        ctx.like = hidden_NSD.shape, hidden_NSD.dtype
        ctx.mark_non_differentiable(correct)
        return numerator, correct

    @staticmethod
    def backward(ctx, grad_numerator, _):
        gradient, live = ctx.saved_tensors
        shape, dtype = ctx.like
        whole = torch.zeros(shape, dtype=dtype, device=live.device)
        scaled = gradient.to(dtype) * grad_numerator.to(dtype)
        whole[:, 1:].index_copy_(0, live, scaled.view(len(live), shape[1] - 1, shape[2]))
        return whole, None, None, None, None, None, None


def draft_loss(hidden_BNSD: Tensor, blocks: Blocks, head: TargetHead, objective: Objective,
               batch: DraftBatch | None = None) -> LossTerms:  # fmt: skip
    """Loss terms of a packed forward. hidden_BNSD: `dflash.block_hidden`. batch: needed by kl, with last_hidden.

    Rows without any supervised slot give a zero numerator that still has a (zero) backward."""
    if objective.kind == "kl":
        assert batch is not None and batch.last_hidden is not None, "loss=kl needs the stored last hidden state"
    slots = blocks.block_size - 1
    hidden_NSD = hidden_BNSD.flatten(0, 1)
    labels, mask = blocks.labels[..., 1:].flatten(0, 1), blocks.loss_mask[..., 1:].flatten(0, 1)

    def teacher(chunk: Tensor) -> Tensor:
        rows = torch.div(chunk, blocks.anchors.shape[1], rounding_mode="floor")
        index = blocks.anchors.flatten()[chunk][:, None] + torch.arange(slots, device=chunk.device)  # anchor + k - 1
        return batch.last_hidden[rows[:, None], index.clamp(max=batch.last_hidden.shape[1] - 1)]

    with_gradient = torch.is_grad_enabled() and hidden_NSD.requires_grad
    numerator, correct = _ChunkedHead.apply(hidden_NSD, head, labels, mask, objective,
                                            teacher if objective.kind == "kl" else None, with_gradient)  # fmt: skip
    supervised = mask.sum(dim=0)
    weights = torch.ones(slots, device=mask.device)
    if objective.kind != "dpace":
        weights = decay_weights(blocks.block_size, objective.gamma, mask.device)
    return LossTerms(
        numerator=numerator,
        denominator=(supervised * weights).sum(),
        correct=correct.sum(dim=0),
        supervised=supervised,
        accepted=correct.long().cumprod(dim=-1).sum(dim=-1).view(blocks.anchors.shape),
    )
