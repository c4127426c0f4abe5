"""Who sees whom: the loop twin, worked counts, and no leak between blocks on any backend."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from dflash_train.drafter.anchors import draw_anchors, make_blocks
from dflash_train.drafter.dflash import block_hidden, resolve_attention
from dflash_train.drafter.mask import MaskKind, block_rule, build_masks, dense_mask, flex_mask, mask_kind
from dflash_train.drafter.naive import naive_visible
from dflash_train.util.errors import UserError
from tests.helpers_drafter import FULL, MASK_ID, SLIDING, packed_batch, tiny_config, tiny_drafter, tiny_head

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def blocks_at(batch, anchors, block_size=4):
    index = torch.tensor([anchors])
    return make_blocks(batch, index, index >= 0, block_size=block_size, mask_token_id=MASK_ID)


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize("window", [1, 3, 9])
def test_the_dense_mask_equals_the_loop_twin_key_by_key(is_causal, window):
    """Trap 16: packed documents, padding and invalid blocks; every query against every key."""
    config = tiny_config((FULL, SLIDING), window=window, is_causal=is_causal)
    batch = packed_batch([[(11, 3, 11), (9, 2, 9)], [(16, 4, 14)]], 22)
    blocks = draw_anchors(batch, num_anchors=13, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=0)
    assert blocks.valid.any() and not blocks.valid.all()
    num_tokens, S = 22, 4
    for layer, layer_type in enumerate((FULL, SLIDING)):
        mask = dense_mask(blocks, batch.document_ids, mask_kind(config, layer_type))
        assert mask.shape == (2, 13 * S, num_tokens + 13 * S)
        expected = torch.zeros_like(mask)
        for b in range(2):
            for q in range(13 * S):
                n, k = divmod(q, S)
                a, position = int(blocks.anchors[b, n]), int(blocks.anchors[b, n]) + k
                for t in range(num_tokens):
                    same = bool(blocks.valid[b, n]) and batch.document_ids[b, t] == blocks.document_ids[b, n]
                    expected[b, q, t] = bool(same) and naive_visible(config, layer, position, t, False, a)
                for j in range(S):
                    expected[b, q, num_tokens + n * S + j] = naive_visible(config, layer, position, a + j, True, a)
        assert torch.equal(mask, expected)
        assert mask.any(dim=-1).all(), "Trap 21: no query sees nothing, fillers included"


def test_rows_of_overlapping_blocks_see_6_7_and_10_keys():
    """Trap 16: S=10, B=4, anchors 2, 3, 6."""
    batch = packed_batch([[(10, 1, 10)]], 10)
    mask = dense_mask(blocks_at(batch, [2, 3, 6]), batch.document_ids, MaskKind(None, causal=False))
    assert mask.sum(-1)[0].tolist() == [6] * 4 + [7] * 4 + [10] * 4


def test_a_sliding_window_counts_true_positions():
    """Trap 23: [sliding, full, sliding], W=4, B=4, anchor 10: slot 0 sees context 7..9 and itself."""
    config = tiny_config((SLIDING, FULL, SLIDING), window=4)
    batch = packed_batch([[(20, 1, 20)]], 20)
    masks = build_masks(config, blocks_at(batch, [10]), batch.document_ids, "sdpa")
    seen = masks[SLIDING][0].nonzero().tolist()
    assert [k for q, k in seen if q == 0] == [7, 8, 9, 20]
    assert [k for q, k in seen if q == 3] == [20, 21, 22, 23], "slot 3 sits at 13: positions 10..13"
    assert masks[FULL][0].sum(-1).tolist() == [14] * 4


@pytest.mark.parametrize("kind", [MaskKind(None, False), MaskKind(None, True), MaskKind(3, True), MaskKind(3, False)])
def test_flex_asks_the_same_rule(kind):
    batch = packed_batch([[(11, 3, 11), (9, 2, 9)], [(16, 4, 14)]], 22)
    blocks = draw_anchors(batch, num_anchors=13, block_size=4, mask_token_id=MASK_ID, seed=1, epoch=0)
    rule = block_rule(blocks.anchors, blocks.valid, blocks.document_ids, batch.document_ids, 4, kind)
    as_flex = create_mask(lambda b, h, q, k: rule(b, q, k), 2, 1, 52, 74, device="cpu")[:, 0]
    assert torch.equal(as_flex, dense_mask(blocks, batch.document_ids, kind))


@pytest.mark.parametrize("kind", [MaskKind(None, False), MaskKind(None, True), MaskKind(90, True), MaskKind(3, False)])
@pytest.mark.parametrize("num_anchors, num_tokens", [(60, 500), (96, 640)])
def test_flex_tiles_are_those_that_evaluating_every_pair_gives(kind, num_anchors, num_tokens):
    """Tile lists come from intervals; torch's own construction asks the rule for every pair: the same tiles."""
    batch = packed_batch([[(150, 3, 150), (300, 2, 290)], [(450, 40, 440)]], num_tokens)
    blocks = draw_anchors(batch, num_anchors=num_anchors, block_size=4, mask_token_id=MASK_ID, seed=1, epoch=0)
    ours = flex_mask(blocks, batch.document_ids, kind)
    Q = num_anchors * 4
    theirs = create_block_mask(ours.mask_mod, 2, None, Q, num_tokens + Q, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense()) and ours.shape == theirs.shape
    for name in ("kv_num_blocks", "q_num_blocks", "full_kv_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert 0 < ours.kv_num_blocks.sum() < ours.to_dense().numel()
    if kind.window is None and num_anchors == 96:
        assert ours.full_kv_num_blocks.sum() > 0


def eager_attention(q, k, v, mask):
    """Softmax over explicit scores, as Hugging Face's eager path does it."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("backend", ["eager", "sdpa", "flex"])
@pytest.mark.parametrize("layers", [(FULL, FULL), (SLIDING, SLIDING), (SLIDING, FULL, SLIDING)])
def test_a_context_row_reaches_only_later_blocks_and_blocks_never_each_other(backend, layers, monkeypatch):
    """Traps 16, 21: perturb context row 3 and only the third block changes; perturb another block's token and nothing
    does, bit for bit; the anchor's own row stays unseen and the row before it is seen; fillers are finite."""
    if backend == "eager":
        monkeypatch.setattr("dflash_train.drafter.dflash.attend", eager_attention)
    attention = "flex" if backend == "flex" else "sdpa"
    config = tiny_config(layers, window=5)
    model, head, batch = tiny_drafter(config), tiny_head(), packed_batch([[(10, 1, 10)]], 10)
    blocks = blocks_at(batch, [2, 3, 6, -1])
    run = lambda: block_hidden(model, config, head, batch, blocks, attention)[0]
    with torch.no_grad():
        before = run()
        assert before.isfinite().all()
        for row, changed in ((3, [2]), (2, [1, 2]), (6, []), (5, [2])):
            kept = batch.hidden[0, row].clone()
            batch.hidden[0, row] += 1.0
            after = run()
            batch.hidden[0, row] = kept
            assert [n for n in range(3) if not torch.equal(after[n], before[n])] == changed
            assert (after - before).abs().amax(dim=(1, 2))[changed].gt(1e-3).all()
        blocks.token_ids[0, 1, 0] += 1
        after = run()
        assert [n for n in range(3) if not torch.equal(after[n], before[n])] == [1]


def test_slots_of_a_causal_layer_ignore_later_slots_and_full_layers_do_not():
    batch, head = packed_batch([[(20, 1, 20)]], 20), tiny_head()
    blocks = blocks_at(batch, [10])
    for layers, is_causal, blind in (
        ((SLIDING,), None, True), ((SLIDING,), False, False), ((FULL,), None, False), ((FULL,), True, True),
        ((SLIDING, FULL), None, False),
    ):  # fmt: skip
        config = tiny_config(layers, window=6, is_causal=is_causal)
        model = tiny_drafter(config)
        with torch.no_grad():
            before = block_hidden(model, config, head, batch, blocks, "sdpa")[0, 0]
            blocks.token_ids[0, 0, 3] -= 1
            after = block_hidden(model, config, head, batch, blocks, "sdpa")[0, 0]
            blocks.token_ids[0, 0, 3] += 1
        assert torch.equal(before[:3], after[:3]) == blind
        assert not torch.equal(before[3], after[3])


@pytest.mark.parametrize("layers", [(FULL, FULL), (SLIDING, FULL, SLIDING)])
def test_every_backend_gives_the_same_hidden_states(layers, monkeypatch):
    """Trap 21: eager, sdpa and flex agree, with invalid blocks in the row."""
    config = tiny_config(layers, window=5)
    model, head = tiny_drafter(config), tiny_head()
    batch = packed_batch([[(11, 3, 11), (9, 2, 9)], [(16, 4, 14)]], 22)
    blocks = draw_anchors(batch, num_anchors=13, block_size=4, mask_token_id=MASK_ID, seed=1, epoch=0)
    assert not blocks.valid.all()
    with torch.no_grad():
        sdpa = block_hidden(model, config, head, batch, blocks, "sdpa")
        flex = block_hidden(model, config, head, batch, blocks, "flex")
        monkeypatch.setattr("dflash_train.drafter.dflash.attend", eager_attention)
        eager = block_hidden(model, config, head, batch, blocks, "sdpa")
    assert sdpa.std() > 0.1
    torch.testing.assert_close(flex, sdpa, atol=1e-5, rtol=0)
    torch.testing.assert_close(eager, sdpa, atol=1e-5, rtol=0)


def test_flex_is_refused_for_training_on_a_cpu_and_auto_says_what_it_took(capsys):
    """Trap 22: flex_attention has no CPU backward; the choice is printed once, and never silent."""
    with pytest.raises(UserError, match=r"train\.attention"):
        resolve_attention("flex", "cpu", training=True)
    assert resolve_attention("auto", "cpu", training=True) == "sdpa"
    assert len(capsys.readouterr().out.strip().splitlines()) == 1
    assert resolve_attention("auto", "cuda", training=True) == "flex"
    assert resolve_attention("sdpa", "cuda", training=True) == "sdpa"
