"""Activation checkpointing changes memory, never numbers: alone, and inside DeepSpeed at every stage."""

import pytest
import torch
from helpers_train import one_rank
from helpers_train_ranks import toy_settings

from dflash_train.config import ZeroConfig
from dflash_train.drafter.anchors import draw_anchors
from dflash_train.drafter.dflash import block_hidden
from dflash_train.drafter.kernels import TORCH
from dflash_train.drafter.loss import Objective, draft_loss
from dflash_train.engine import zero
from tests.helpers_drafter import FULL, MASK_ID, SLIDING, packed_batch, tiny_config, tiny_drafter, tiny_head

CPU = torch.device("cpu")


def example(**changes):
    config = tiny_config((SLIDING, FULL, SLIDING), window=5, **changes)
    batch = packed_batch([[(20, 3, 20), (12, 3, 12)]], 34)
    return config, batch, draw_anchors(batch, num_anchors=16, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=0)


def test_gradients_are_equal_bit_for_bit_and_each_layer_runs_twice():
    config, batch, blocks = example()
    results, calls = [], []
    for checkpointing in (False, True):
        model, head = tiny_drafter(config).use(TORCH, checkpointing), tiny_head()
        model.layers[1].register_forward_pre_hook(lambda *_: calls.append(1))
        terms = draft_loss(block_hidden(model, config, head, batch, blocks, "sdpa"), blocks, head, Objective(gamma=2.0))
        terms.numerator.backward()
        results.append([terms.numerator.detach(), *(parameter.grad for parameter in model.parameters())])
    assert len(calls) == 1 + 2
    assert all(torch.equal(a, b) and b.abs().max() > 0 for a, b in zip(*results))
    with torch.no_grad():  # nothing is kept then, so nothing is computed twice
        block_hidden(model, config, tiny_head(), batch, blocks, "sdpa")
    assert len(calls) == 1 + 2 + 1


@pytest.fixture(scope="module")
def _process_group():
    with one_rank():
        yield


def train(stage: int, checkpointing: bool, dtype: str) -> list[float]:
    """Losses of three steps of two micro-batches. The MLP is large enough to be given up between passes by stage 3."""
    config, batch, _ = example(intermediate_size=2048)
    model = tiny_drafter(config).use(TORCH, checkpointing)
    settings = toy_settings(dtype=dtype, global_batch=2, micro_batch=1)
    engine = zero.ZeroEngine(model, settings, ZeroConfig(stage), 2, CPU)
    head, losses = tiny_head(dtype=model.dtype), []
    for step in range(6):
        blocks = draw_anchors(batch, num_anchors=16, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=step)
        hidden = block_hidden(engine, config, head, batch, blocks, "sdpa")
        terms = draft_loss(hidden, blocks, head, Objective(gamma=2.0))
        engine.backward(terms.numerator, float(2 * terms.denominator))
        losses.append(float(terms.numerator.detach()))
        assert (model.layers[0].mlp.up_proj.weight.numel() == 0) == (stage == 3)
    return losses


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_in_deepspeed_is_the_same_at_every_stage(_process_group, stage, dtype):
    """Stage 3 gathers a layer's weights a second time for its second forward."""
    with_it, without = (train(stage, checkpointing, dtype) for checkpointing in (True, False))
    assert with_it == without and without[-1] < without[0]
