"""What `drafter_step.py` measures of the peers: their own models, masks and objectives, as their trainers call them.

    specforge 0.2.0     OnlineDFlashModel around its DFlashDraftModel, flex_attention compiled by transformers, the head
                        in its default chunks of 128 blocks; with its optional Liger kernels too, where they are
    speculators 0.9.0   its DFlashDraftModel, whose whole forward is compiled; cross-entropy by its fused loss, with the
                        target's own argmax as label, for which it computes the head a second time

Each gets our random row, embedding and head, on the device before the clock starts. Like theirs, the row is one sample.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from drafter_step_ours import (
    Pace,
    block_flops,
    clear,
    draw_matrices,
    head_facts,
    one_row,
    random_hidden,
    timed,
)
from peers_code import peers
from torch import Tensor, nn

from dflash_train.config import TrainRun
from dflash_train.drafter.loss import default_gamma
from dflash_train.drafter.zlab import to_zlab
from dflash_train.engine import inputs
from dflash_train.export import to_speculators
from dflash_train.records import TargetHead
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread, also out of a compilation, once the time is over."""

    def over(*_) -> None:
        raise TimeoutError(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def measure_model(model: nn.Module, step: Callable[[], Tensor], run: TrainRun, device: torch.device,
                  pace: Pace) -> dict:  # fmt: skip
    """step: a loss with its backward done. Blocks are as many as anchors: the row has more eligible positions."""
    losses = []
    figures = timed(lambda: losses.append(step()), partial(model.zero_grad, set_to_none=True), device, pace)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    return figures | {"blocks": float(run.train.num_anchors), "block_flops": block_flops(run.drafter),
                      "loss": float(losses[-1])}  # fmt: skip


# ---------------------------------------------------------------- specforge


def specforge_model(run: TrainRun, head: TargetHead, draft_model: nn.Module | None, attention: str) -> nn.Module:
    """Its training model with its defaults, our gamma, and our embedding and head."""
    with peers():
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    config = run.drafter
    lm_head = nn.Linear(*reversed(head.head.shape), bias=False, device="meta")
    embedding = nn.Embedding(*head.embedding.shape, device="meta")
    lm_head.weight, embedding.weight = frozen(head.head), frozen(head.embedding)
    return OnlineDFlashModel(
        draft_model, lm_head, embedding, config.mask_token_id, config.block_size, attention, run.train.num_anchors,
        default_gamma(config.block_size),
    )  # fmt: skip


def specforge_drafter(run: TrainRun, device: torch.device, attention: str, liger: bool) -> nn.Module:
    """Its draft model, made as `AutoDraftModel.from_config` makes it."""
    with peers():
        from specforge.modeling.draft.dflash import DFlashDraftModel
        from specforge.modeling.draft.dflash_kernels import load_liger_dflash_kernels

        kernels = load_liger_dflash_kernels() if liger else None
    config = transformers.Qwen3Config(**to_zlab(run.drafter, run.train.dtype))
    config._attn_implementation = attention
    with torch.device(device):
        model = DFlashDraftModel(config, kernels).to(inputs.DTYPES[run.train.dtype])
    draw_matrices(model, run.drafter.initializer_range)
    return model.train()


def specforge(run: TrainRun, head: TargetHead, device: torch.device, pace: Pace, liger: bool = False) -> dict:
    """Forward and backward of a row."""
    attention = "flex_attention" if device.type == "cuda" else "sdpa"
    batch, _ = one_row(run, device)
    model = specforge_model(run, head, specforge_drafter(run, device, attention, liger), attention)
    mask = batch.loss_mask.float()

    def step() -> Tensor:
        loss, _, _ = model(batch.token_ids, batch.hidden, mask)
        loss.backward()
        return loss.detach()

    return measure_model(model, step, run, device, pace)


def specforge_head(run: TrainRun, head: TargetHead, device: torch.device, pace: Pace) -> dict:
    """Its forward with hidden states and anchors that are given; its draft model is not asked."""
    batch, blocks = one_row(run, device)
    model = specforge_model(run, head, None, "sdpa")
    hidden_BNSD = random_hidden(run, blocks)
    mask = batch.loss_mask.float()
    model._forward_draft_blocks = lambda **_: (blocks.anchors, blocks.valid, hidden_BNSD.flatten(1, 2))

    def step() -> None:
        loss, _, _ = model(batch.token_ids, None, mask)
        loss.backward()

    figures = timed(step, partial(clear, hidden_BNSD), device, pace)
    assert hidden_BNSD.grad.isfinite().all()
    return figures | head_facts(run, blocks)


# ---------------------------------------------------------------- speculators


def speculators_model(run: TrainRun, head: TargetHead, device: torch.device) -> nn.Module:
    with peers():
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    raw = to_speculators(run.drafter, to_zlab(run.drafter, run.train.dtype), "", [])
    config = DFlashSpeculatorConfig(**raw)
    attention = "simple_flex_attention" if device.type == "cuda" else "eager"
    config.transformer_layer_config._attn_implementation = attention
    with torch.device(device):
        model = DFlashDraftModel(config).to(inputs.DTYPES[run.train.dtype])
    draw_matrices(model, run.drafter.initializer_range)
    for name, weight in (("embed_tokens", head.embedding), ("lm_head", head.head), ("verifier_lm_head", head.head)):
        getattr(model, name).weight = frozen(weight)
    return model.train()


def speculators_settings(run: TrainRun, device: torch.device) -> dict:
    """Options of its trainer; its fused losses need Triton."""
    with peers():
        from speculators.losses import resolve_loss_config
    loss = resolve_loss_config("ce", "fused" if device.type == "cuda" else "eager")
    return {"loss_config": loss, "gamma": default_gamma(run.drafter.block_size)}


def speculators(run: TrainRun, head: TargetHead, device: torch.device, pace: Pace, seconds: float) -> dict:
    """Forward and backward of a row. Raises TimeoutError when it is not compiled and done in `seconds`."""
    batch, _ = one_row(run, device)
    with time_limit(seconds):
        model = speculators_model(run, head, device)
        settings = speculators_settings(run, device)
        last_hidden = random_last_hidden(run, device)
        mask = batch.loss_mask.float()

        def step() -> Tensor:
            _, loss, _ = model(
                batch.hidden, batch.token_ids, mask, last_hidden, batch.document_ids, batch.position_ids,
                max_anchors=run.train.num_anchors, **settings,
            )  # fmt: skip
            loss.backward()
            return loss.detach()

        return measure_model(model, step, run, device, pace)


def speculators_head(run: TrainRun, head: TargetHead, device: torch.device, pace: Pace, seconds: float) -> dict:
    """Head, target's head and loss as in its forward, compiled as that is."""
    with peers():
        from speculators.models.dflash.metrics import compute_metrics
        from speculators.models.utils import conditional_torch_compile
    _, blocks = one_row(run, device)
    block_size, settings = run.drafter.block_size, speculators_settings(run, device)
    if not blocks.valid.all():
        raise UserError("blocks", got="invalid ones", want=f"{run.train.num_anchors} valid anchors in the row")
    hidden_BNSD = random_hidden(run, blocks)
    target_hidden = random_last_hidden(run, device)[:, blocks.anchors[0].repeat_interleave(block_size)]
    mask = blocks.loss_mask.flatten(1).float()

    @conditional_torch_compile
    def objective(hidden: Tensor) -> Tensor:
        with torch.no_grad():
            targets = head.logits(target_hidden)
        loss, _ = compute_metrics(head.logits(hidden), targets, mask, block_size, **settings)
        return loss

    with time_limit(seconds):
        step = lambda: objective(hidden_BNSD.flatten(1, 2)).backward()
        figures = timed(step, partial(clear, hidden_BNSD), device, pace)
    assert hidden_BNSD.grad.isfinite().all()
    return figures | head_facts(run, blocks)


def random_last_hidden(run: TrainRun, device: torch.device) -> Tensor:
    """[1,T,D], which its labels come from."""
    shape = (1, run.train.row_tokens, run.drafter.target_hidden_size)
    return torch.randn(shape, dtype=inputs.DTYPES[run.train.dtype], device=device)
