"""The model: z-lab's tensors, the loop twin in values and gradients, RoPE and norms in float32, cached drafting."""

import pytest
import torch

from dflash_train.drafter import dflash
from dflash_train.drafter.anchors import draw_anchors
from dflash_train.drafter.dflash import DFlashDrafter, DraftCache, block_hidden, draft, extend, init_weights
from dflash_train.drafter.files import parameter_shapes
from dflash_train.drafter.naive import naive_block
from dflash_train.util.errors import UserError
from tests.helpers_drafter import (
    FULL,
    MASK_ID,
    SLIDING,
    load_preset,
    packed_batch,
    tiny_config,
    tiny_drafter,
    tiny_head,
)

LAYOUTS = [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL, SLIDING)]


def test_the_27b_preset_has_58_tensors_and_1730213120_parameters():
    shapes = parameter_shapes(load_preset("qwen3_6_27b"))
    assert len(shapes) == 58
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 1_730_213_120
    per_layer = ["input_layernorm", "post_attention_layernorm"]
    per_layer += [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    per_layer += [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    names = {f"layers.{i}.{name}.weight" for i in range(5) for name in per_layer}
    assert set(shapes) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert shapes["fc.weight"] == (5120, 25600) and shapes["layers.4.self_attn.k_proj.weight"] == (1024, 5120)


@pytest.mark.parametrize(
    "shape, count",
    [
        ((5, 5, 2560, 9728, 32, 8, 128), 537_427_200),
        ((5, 5, 4096, 12288, 32, 8, 128), 1_048_626_432),
        ((6, 8, 5120, 17408, 32, 8, 128), 2_128_682_496),
        ((1, 5, 5120, 17408, 32, 8, 128), 450_908_416),
    ],
)
def test_parameter_counts_equal_the_published_files(shape, count):
    layers, taps, hidden, width, heads, kv, head_dim = shape
    config = tiny_config(
        [FULL] * layers,
        taps=taps,
        hidden_size=hidden,
        intermediate_size=width,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=head_dim,
        target_hidden_size=hidden,
        num_target_layers=9,
    )
    assert sum(torch.Size(s).numel() for s in parameter_shapes(config).values()) == count


def test_attention_bias_adds_a_bias_to_all_four_projections():
    names = set(parameter_shapes(tiny_config((FULL,), attention_bias=True)))
    assert {f"layers.0.self_attn.{p}_proj.bias" for p in "qkvo"} == {name for name in names if name.endswith("bias")}


@pytest.mark.parametrize(
    "layers, is_causal, bias",
    [*((layout, None, False) for layout in LAYOUTS), ((SLIDING, FULL), False, True), ((FULL, FULL), True, False)],
)
def test_the_packed_forward_equals_the_loop_twin_in_values_and_gradients(layers, is_causal, bias):
    """Trap 23: packed rows with two documents, W=5 shorter than the context, float64 against one block at a time."""
    config = tiny_config(layers, window=5, is_causal=is_causal, attention_bias=bias, block_size=3)
    model, head = tiny_drafter(config, dtype=torch.float64), tiny_head(dtype=torch.float64)
    batch = packed_batch([[(9, 3, 9), (12, 3, 12)]], 23, dtype=torch.float64)
    batch.hidden.requires_grad_()
    blocks = draw_anchors(batch, num_anchors=4, block_size=3, mask_token_id=MASK_ID, seed=0, epoch=0)
    assert blocks.valid.all() and set(blocks.document_ids[0].tolist()) == {0, 1}
    weights = torch.randn(1, 4, 3, 64, dtype=torch.float64)

    fast = block_hidden(model, config, head, batch, blocks, "sdpa")
    inputs = [batch.hidden, *model.parameters()]
    fast_gradients = torch.autograd.grad((fast * weights).sum(), inputs)
    slow = []
    for n, start in enumerate([0, 9][d] for d in blocks.document_ids[0].tolist()):
        a = int(blocks.position_ids[0, n, 0])
        slow.append(naive_block(model, head.embed(blocks.token_ids[0, n]), batch.hidden[0, start : start + a], a))
    slow = torch.stack(slow)[None]
    slow_gradients = torch.autograd.grad((slow * weights).sum(), inputs)

    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)  # float32 RoPE frequencies against exact ones
    for got, want in zip(fast_gradients, slow_gradients):
        assert want.abs().max() > 0
        torch.testing.assert_close(got, want, atol=1e-5 * max(1.0, float(want.abs().max())), rtol=0)


@pytest.mark.parametrize("layers", LAYOUTS)
@pytest.mark.parametrize("calls", [1, 2, 5])
def test_cached_drafting_equals_the_packed_forward_at_the_same_anchor(layers, calls):
    """Trap 18: rows 0..a-1 given in one, two or five calls, a cache that has to grow, and windows shorter than the
    context; float32 to 1e-5 of the logits' scale."""
    config = tiny_config(layers, window=6)
    model, head = tiny_drafter(config), tiny_head()
    batch = packed_batch([[(40, 5, 40)]], 44)
    blocks = draw_anchors(batch, num_anchors=12, block_size=4, mask_token_id=MASK_ID, seed=3, epoch=0)
    with torch.no_grad():
        packed = head.logits(block_hidden(model, config, head, batch, blocks, "sdpa"))
    assert int(blocks.anchors[0, -1]) > 20
    for n, a in enumerate(blocks.anchors[0].tolist()):
        cache = DraftCache(model, capacity=4)
        for part in torch.arange(a).tensor_split(calls):
            extend(model, cache, batch.hidden[0, part], part)
        logits = draft(model, head, cache, int(batch.token_ids[0, a]), a, 4)
        assert logits.shape == (3, 128) and logits.dtype == torch.float32 and cache.length == a
        torch.testing.assert_close(logits, packed[0, n, 1:], atol=1e-5 * float(packed.abs().max()), rtol=0)
        again = draft(model, head, cache, int(batch.token_ids[0, a]), a, 4)
        assert torch.equal(logits, again), "drafting keeps nothing"


def test_a_window_of_one_and_a_causal_full_layer_draft_like_the_packed_forward():
    """Trap 23: the smallest window sees no context row at all, and is_causal=true reaches full layers too."""
    for config in (tiny_config((SLIDING, FULL), window=1), tiny_config((FULL, SLIDING), window=3, is_causal=True)):
        model, head, batch = tiny_drafter(config), tiny_head(), packed_batch([[(20, 5, 20)]], 20)
        blocks = draw_anchors(batch, num_anchors=3, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=0)
        with torch.no_grad():
            packed = head.logits(block_hidden(model, config, head, batch, blocks, "sdpa"))
        a = int(blocks.anchors[0, 1])
        cache = DraftCache(model)
        extend(model, cache, batch.hidden[0, :a], torch.arange(a))
        logits = draft(model, head, cache, int(batch.token_ids[0, a]), a, 4)
        torch.testing.assert_close(logits, packed[0, 1, 1:], atol=1e-4, rtol=0)


def test_a_smaller_block_drafts_and_a_larger_one_is_refused():
    """Trap 24: block_size counts the anchor: 4 drafts 3 tokens, 3 drafts 2, 5 is refused."""
    config = tiny_config((SLIDING, FULL), window=6)
    model, head, rows = tiny_drafter(config), tiny_head(), torch.randn(9, 128)
    cache = DraftCache(model)
    extend(model, cache, rows, torch.arange(9))
    assert draft(model, head, cache, 3, 9, 3).shape == (2, 128)
    with pytest.raises(UserError, match=r"eval.block_size(.|\n)*got:  5(.|\n)*2\.\.4"):
        draft(model, head, cache, 3, 9, 5)
    with pytest.raises(AssertionError, match="10"):
        draft(model, head, cache, 3, 10, 4)
    with pytest.raises(AssertionError, match="continue"):
        extend(model, cache, rows, torch.arange(9))


def test_rope_frequencies_stay_float32_in_a_bfloat16_model():
    """Trap 19: no buffer that a cast could round; the phases of a bf16 model are the float32 model's, rounded once."""
    config = tiny_config((FULL,), rope_theta=1e7, head_dim=128, num_heads=1, num_kv_heads=1)
    model = tiny_drafter(config)
    before = model.rope(torch.tensor([[2048]]))
    half = tiny_drafter(config).to(torch.bfloat16)
    assert not list(half.buffers())
    assert dflash.inverse_frequencies(128, 1e7).dtype == torch.float32
    for full, cast in zip(before, half.rope(torch.tensor([[2048]]))):
        assert cast.dtype == torch.bfloat16 and torch.equal(cast, full.bfloat16())
    rounded = dflash.inverse_frequencies(128, 1e7).bfloat16().float() * 2048
    error = (rounded - dflash.inverse_frequencies(128, 1e7) * 2048).abs().max()
    assert error > 1.0, "what a rounded buffer would cost"


def test_rope_equals_hugging_faces():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    from dflash_train.util.hf import transformers

    raw = transformers.Qwen3Config(head_dim=16, max_position_embeddings=4096,
                                   rope_parameters={"rope_type": "default", "rope_theta": 1e6})  # fmt: skip
    positions = torch.tensor([[0, 1, 77, 4000]])
    theirs = Qwen3RotaryEmbedding(raw)(torch.zeros(1), positions)
    for ours, want in zip(dflash.rope_tables(positions, 16, 1e6, torch.float32), theirs):
        torch.testing.assert_close(ours[:, 0], want, atol=1e-6, rtol=0)


def test_norms_are_plain_and_compute_in_float32():
    """Trap 2: x*w, never x*(1+w); a bf16 norm of large values is the float32 one, rounded once."""
    model = tiny_drafter(tiny_config((FULL,)))
    x = 300 * torch.randn(2, 64)
    norm = model.hidden_norm
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), want, atol=1e-5, rtol=1e-5)
    half = norm.to(torch.bfloat16)
    x = x.bfloat16().float()
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * half.weight.float()
    assert ((half(x.bfloat16()).float() - want).abs() <= want.abs() * 2**-7).all()


def test_float32_masters_train_on_bfloat16_features_and_bfloat16_drafts():
    """Trap 42: bf16 rows into a float32 model and float32 rows into a bf16 one both run; only the dtype differs."""
    config = tiny_config((SLIDING, FULL), window=6)
    batch = packed_batch([[(20, 5, 20)]], 20, dtype=torch.bfloat16)
    blocks = draw_anchors(batch, num_anchors=3, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=0)
    model, head = tiny_drafter(config), tiny_head(dtype=torch.bfloat16)
    hidden = block_hidden(model, config, head, batch, blocks, "sdpa")
    assert hidden.dtype == torch.float32
    hidden.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    half = tiny_drafter(config, dtype=torch.bfloat16)
    cache = DraftCache(half)
    extend(half, cache, batch.hidden[0, :9].float(), torch.arange(9))
    assert draft(half, tiny_head(), cache, 3, 9, 4).dtype == torch.float32
    assert cache.keys[0].dtype == torch.bfloat16


def test_initial_weights_are_seeded_normal_with_unit_norms():
    config = tiny_config((FULL, FULL), initializer_range=0.02)
    first, again, other = (init_weights(DFlashDrafter(config), seed) for seed in (0, 0, 1))
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b)
        if a.ndim == 2:
            assert not torch.equal(a, c) and abs(float(a.detach().std()) - 0.02) < 0.002, name
        else:
            assert (a == 1).all(), name
