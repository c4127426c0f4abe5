"""Bytes: by hand from the published figures, and against the tensors of real sessions, optimizers and passes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers_plan import live_bytes, new_bytes, run_27b, toy_drafter
from helpers_target import random_ids, tiny
from helpers_train import one_rank
from helpers_train_ranks import toy_settings

from dflash_train.config import TargetConfig, ZeroConfig
from dflash_train.drafter import dflash, kernels
from dflash_train.drafter.dflash import DFlashDrafter
from dflash_train.engine import zero
from dflash_train.planning import memory
from dflash_train.planning.shapes import TargetSizes, sizes_from_files, target_parameters, target_sizes
from dflash_train.records import FeatureSpec, Tree

MB, GB = 1e6, 1e9


def sizes_of(target) -> TargetSizes:
    config = sizes_from_files(TargetConfig(name="x", kind="hf"), target.text_config.to_dict())
    return target_sizes(config)[0]


# ---------------------------------------------------------------- by hand


def test_a_forked_state_of_the_27b_is_151_megabytes_and_a_stash_is_a_hundredth_of_it():
    _, sizes = run_27b()
    assert memory.recurrent_bytes(sizes) == 48 * 48 * 128 * 128 * 4 == pytest.approx(151 * MB, rel=1e-3)
    for nodes, stash, forked in ((16, 25, 2.4), (64, 102, 9.7), (128, 204, 19), (256, 407, 39), (512, 815, 77)):
        assert memory.stash_bytes(sizes, nodes) == pytest.approx(stash * MB, rel=0.02)
        assert nodes * memory.recurrent_bytes(sizes) == pytest.approx(forked * GB, rel=0.02)
    per_node_and_layer = (16 * 128 + 48 * 128) * 4 + 48 * 8
    assert memory.stash_bytes(sizes, 1) == 48 * per_node_and_layer


def test_keys_and_values_of_the_27b_are_64_kib_a_token():
    _, sizes = run_27b()
    assert memory.kv_bytes(sizes, 1, 2) == 16 * 2 * 4 * 256 * 2 == 65_536
    assert memory.kv_bytes(sizes, 4096, 2) == pytest.approx(268 * MB, rel=2e-3)


def test_the_loss_of_512_anchors_at_once_would_hold_four_gigabytes_of_logits():
    run, _ = run_27b()
    rows = 512 * 16
    assert rows * run.drafter.vocab_size * 2 == pytest.approx(4.07 * GB, rel=1e-3)
    chunk = memory.logits_chunk_bytes(run.drafter, 128, 2)
    assert chunk == 128 * 15 * 248_320 * (2 + 4 + 2)
    assert memory.logits_chunk_bytes(run.drafter, 128, 2, kl=True) > chunk
    assert memory.logits_chunk_bytes(run.drafter, 512, 2, fused=True) == chunk  # four times the blocks
    assert memory.draft_cache_bytes(run.drafter, 1, 2) == 5 * 4096


def test_zero_divides_what_its_stage_says():
    count = 1000
    one, four = (memory.zero_states(count, 1, world, 2) for world in (1, 4))
    assert (one.weights, one.gradients, one.optimizer) == (2000, 6000, 12_000)
    assert (four.weights, four.gradients, four.optimizer) == (2000, 6000, 3000)
    second = memory.zero_states(count, 2, 4, 2, bucket=10)
    assert (second.weights, second.gradients, second.optimizer, second.step) == (2000, 1000 + 20, 3000, 1000)
    third = memory.zero_states(count, 3, 4, 2, bucket=10)
    assert (third.weights, third.gradients, third.optimizer) == (500 + 2000, 1000 + 20, 3000)
    away = memory.zero_states(count, 2, 4, 2, bucket=10, offload=True)
    assert (away.weights, away.gradients, away.optimizer, away.host) == (2000, 20, 0, 4000)


# ---------------------------------------------------------------- against sessions


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_5", "qwen3_next"])
def test_planned_cache_and_stash_are_the_sessions_own_bytes(arch):
    target, nodes, capacity = tiny(arch), 12, 48
    sizes, item = sizes_of(target), 4
    session = target.session(capacity, FeatureSpec((1,)))
    session.prefill(random_ids(20, seed=0))
    parents = torch.tensor([-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 6, 9])
    depths = [0]
    for parent in parents[1:].tolist():
        depths.append(depths[parent] + 1)
    session.forward(Tree(random_ids(nodes, seed=1), parents, torch.tensor(depths)))
    nbytes = lambda *tensors: sum(t.numel() * t.element_size() for t in tensors)
    cache = nbytes(*session.cache.keys.values(), *session.cache.values.values())
    layers = session.delta_layers if sizes.shape.num_linear_layers else []
    states = sum(nbytes(layer.rows, layer.state) for layer in layers)
    stash = sum(nbytes(s.keys, s.updates, s.gates) for layer in layers for s in [layer.pending[2]])
    rows = sum(nbytes(layer.pending[0]) for layer in layers)
    assert cache == memory.kv_bytes(sizes, capacity, item) > 0
    assert cache + states == memory.session_bytes(sizes, capacity, item)
    assert stash == memory.stash_bytes(sizes, nodes)
    assert stash + rows == memory.pending_bytes(sizes, nodes, item)
    assert (stash > 0) == (arch != "qwen3")


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe"])
def test_planned_weights_are_the_models_own_bytes(arch):
    target = tiny(arch)
    parameters = {p.data_ptr(): p.numel() * p.element_size() for p in target.model.parameters()}
    assert sum(parameters.values()) == 4 * target_parameters(sizes_of(target))


# ---------------------------------------------------------------- against DeepSpeed


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_planned_states_are_what_deepspeed_holds(stage):
    """bfloat16 on one rank, in the middle of a window: weights, gradients, masters and moments, by dtype."""
    drafter = toy_drafter()
    with one_rank():
        before = live_bytes()
        model = DFlashDrafter(drafter)
        count = sum(p.numel() for p in model.parameters())
        settings = toy_settings(dtype="bfloat16", global_batch=2, micro_batch=1)
        engine = zero.ZeroEngine(model, settings, ZeroConfig(stage), 2, torch.device("cpu"))
        del model
        for _ in range(3):  # a whole window, so that the moments are there, and half of the next
            rows = torch.randn(1, 6, 512), torch.arange(6)[None], torch.arange(8)[None]
            hidden = engine(torch.randn(1, 8, 256), *rows, {"full_attention": None})
            engine.backward(hidden.float().sum(), 10.0)
            del hidden, rows
        got = new_bytes(before)
    buckets = zero_buckets(got)
    planned = memory.zero_states(count, stage, 1, 2, bucket=buckets)
    floats = got[torch.float32]
    assert floats == pytest.approx(planned.optimizer + 4 * count, rel=0.01)  # masters, moments, summed gradients
    halves = got[torch.bfloat16] - 2 * buckets
    if stage == 1:
        assert halves == pytest.approx(planned.weights + 2 * count, rel=0.01)
        assert planned.gradients == 6 * count
    else:  # stage 3 gathers parameters only for the passes; the pass's last gradient may still be held somewhere
        largest = 2 * drafter.hidden_size * drafter.intermediate_size
        assert 1.99 * count < halves < 2.01 * count + largest
        assert planned.gradients == 4 * count + 2 * buckets
        assert planned.step == (4 * count if stage == 2 else 0)


def zero_buckets(got: dict) -> int:
    """Elements of DeepSpeed's reduce bucket, where it stays allocated between passes (ZeRO-3)."""
    return memory.REDUCE_BUCKET if got[torch.bfloat16] > 2 * memory.REDUCE_BUCKET else 0


# ---------------------------------------------------------------- against autograd


class FusedNorm(torch.autograd.Function):
    """Keeps its input alone, as the norm of a GPU does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return F.rms_norm(x, (x.shape[-1],), weight)


class FusedAttention(torch.autograd.Function):
    """Keeps q, k, v and the output, as every fused attention does."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = q.new_empty(q.shape)
        ctx.save_for_backward(q, k, v, out)
        return out


class FusedNormRope(torch.autograd.Function):
    """Keeps its input alone, as drafter/kernels_triton.py does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return torch.empty_like(x)


class FusedSwiGLU(torch.autograd.Function):
    """Keeps both inputs, as drafter/kernels_triton.py does."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)


KERNELS = {
    False: replace(kernels.TORCH, norm_rope=lambda x, weight, eps, rope: kernels.rotate(
        FusedNorm.apply(x, weight).transpose(1, 2), rope)),
    True: replace(kernels.TORCH, norm_rope=lambda x, weight, eps, rope: FusedNormRope.apply(x, weight).transpose(1, 2),
                  swiglu=FusedSwiGLU.apply),
}  # fmt: skip


@pytest.mark.parametrize("fused, checkpointing", [(False, False), (True, False), (True, True)])
def test_planned_activations_are_what_autograd_keeps_at_the_27bs_true_shapes(monkeypatch, fused, checkpointing):
    """On meta tensors: no memory is needed to see what would be kept."""
    run, _ = run_27b()
    drafter, num_rows, anchors = run.drafter, 4096, 512
    monkeypatch.setattr(torch.nn.RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight))
    monkeypatch.setattr(dflash, "attend", lambda q, k, v, mask: FusedAttention.apply(q, k, v))
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter):
            kept[storage._cdata] = storage
        return tensor

    with torch.device("meta"):
        model = DFlashDrafter(drafter).to(torch.bfloat16).use(KERNELS[fused], checkpointing)
        slots = anchors * drafter.block_size
        noise, context = (torch.empty(1, *shape, dtype=torch.bfloat16) for shape in
                          ((slots, drafter.hidden_size), (num_rows, 5 * drafter.target_hidden_size)))  # fmt: skip
        positions = torch.zeros(1, num_rows, dtype=torch.long), torch.zeros(1, slots, dtype=torch.long)
        masks = dict.fromkeys(("full_attention", "sliding_attention"))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model(noise, context, *positions, masks)
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    real = sum(storage.nbytes() for key, storage in kept.items() if key not in parameters)
    loss = 2 * hidden.numel() * hidden.element_size()  # the hidden rows themselves, and their gradient
    planned = lambda anchors: memory.activation_bytes(drafter, num_rows, anchors, 2, fused=fused,
                                                      checkpointing=checkpointing)  # fmt: skip
    if checkpointing:  # the context's keys and values are an argument, which no hook sees; one layer comes back whole
        real += drafter.num_layers * num_rows * 2 * drafter.num_kv_heads * drafter.head_dim * 2
        whole = memory.activation_bytes(drafter, num_rows, anchors, 2, fused=True)
        real += (whole - planned(anchors)) // (drafter.num_layers - 1)
    assert real + loss == pytest.approx(planned(anchors), rel=0.01)
    assert planned(2 * anchors) > 1.8 * planned(anchors) or checkpointing
