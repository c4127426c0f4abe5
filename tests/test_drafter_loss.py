"""The chunked objectives against full-logit loops, their denominators, and the walk on scripted and learnt blocks."""

import math
from dataclasses import replace

import pytest
import torch

from dflash_train.drafter.anchors import draw_anchors
from dflash_train.drafter.dflash import DFlashDrafter, DraftCache, block_hidden, draft, extend, init_weights
from dflash_train.drafter.loss import (
    KINDS,
    Objective,
    decay_weights,
    default_gamma,
    dpace_weights,
    draft_loss,
    window_denominator,
)
from dflash_train.drafter.naive import naive_loss
from dflash_train.drafter.walk import WalkStats, answer_span, evaluate_samples, sample_batch, walk_acceptance
from dflash_train.records import HiddenShard, TargetHead
from tests.helpers_drafter import FULL, HIDDEN, MASK_ID, SLIDING, VOCAB, packed_batch, tiny_config, tiny_head

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def example(dtype=torch.float64, num_anchors=12, block_size=5):
    batch = packed_batch([[(11, 3, 11), (9, 2, 6)], [(16, 4, 14)]], 22, dtype=dtype)
    blocks = draw_anchors(batch, num_anchors=num_anchors, block_size=block_size, mask_token_id=MASK_ID, seed=0, epoch=0)
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(2, num_anchors, block_size, HIDDEN, generator=generator).to(dtype)
    return batch, blocks, hidden.requires_grad_()


class CountingHead(TargetHead):
    """Remembers the rows of every call."""

    def logits(self, hidden):
        self.rows.append(hidden.flatten(0, -2).shape[0])
        return super().logits(hidden)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_blocks", [1, 4, 100])
def test_chunked_losses_equal_full_logit_loops_in_values_and_gradients(kind, chunk_blocks):
    """Trap 17: labels are token(anchor+k), and the teacher row of kl for slot k is anchor+k-1."""
    batch, blocks, hidden = example()
    head, gamma = tiny_head(dtype=torch.float64), 3.0
    assert not blocks.valid.all() and blocks.loss_mask.any(-1).sum() > 8
    terms = draft_loss(hidden, blocks, head, Objective(kind, gamma, 0.4, chunk_blocks), batch)
    numerator, denominator = naive_loss(
        hidden, blocks.labels, blocks.loss_mask, blocks.anchors, head, kind, gamma, 0.4, batch.last_hidden
    )
    assert float(numerator.detach()) > 1
    torch.testing.assert_close(terms.numerator, numerator, atol=1e-5, rtol=1e-6)  # decay weights are float32
    assert abs(float(terms.denominator) - denominator) < 1e-5
    assert abs(window_denominator(blocks, Objective(kind, gamma)) - denominator) < 1e-5
    got, want = (torch.autograd.grad(3.0 * x, hidden)[0] for x in (terms.numerator, numerator))
    assert want.abs().max() > 1e-2
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert (got[:, :, 0] == 0).all() and (got[~blocks.valid] == 0).all(), "slot 0 and fillers get no gradient"


def test_the_gradient_reaches_hidden_only_and_full_logits_never_exist():
    batch, blocks, hidden = example(torch.float32)
    plain = tiny_head()
    head = CountingHead(plain.embedding, plain.head.clone().requires_grad_(), plain.final_norm, 0.0, 1e-6)
    object.__setattr__(head, "rows", [])
    draft_loss(hidden, blocks, head, Objective(chunk_blocks=2), batch).numerator.backward()
    assert hidden.grad.abs().sum() > 0 and head.head.grad is None
    live = int(blocks.loss_mask.any(-1).sum())
    assert len(head.rows) == math.ceil(live / 2) and max(head.rows) == 2 * 4, "two blocks of four slots at a time"


def test_per_slot_counts_and_accepted_prefixes_come_from_the_same_logits():
    _, blocks, _ = example(torch.float32)
    head = tiny_head()
    unit = head.head / head.head.norm(dim=-1, keepdim=True)
    right = torch.rand(blocks.labels.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    hidden = torch.where(right, blocks.labels, (blocks.labels + 1) % VOCAB)
    hidden = 50 * unit[hidden]
    hits = head.logits(hidden).argmax(-1) == blocks.labels
    hits &= blocks.loss_mask
    terms = draft_loss(hidden, blocks, head, Objective(chunk_blocks=3))
    assert terms.correct.tolist() == hits[..., 1:].sum((0, 1)).tolist() and terms.correct.sum() > 5
    assert terms.supervised.tolist() == blocks.loss_mask[..., 1:].sum((0, 1)).tolist()
    for b in range(2):
        for n in range(12):
            run = 0
            while run < 4 and hits[b, n, run + 1]:
                run += 1
            assert int(terms.accepted[b, n]) == run
    assert terms.accepted.max() >= 2


def test_a_row_without_anchors_gives_zero_with_a_real_backward():
    """Traps 21, 39: no supervised slot: numerator 0, denominator 0, zero gradients, no NaN, in every objective."""
    batch = packed_batch([[(10, 10, 10)]], 12)
    blocks = draw_anchors(batch, num_anchors=3, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=0)
    config = tiny_config((SLIDING, FULL), window=3)
    model = init_weights(DFlashDrafter(config), 0)
    for kind in KINDS:
        model.zero_grad()
        hidden = block_hidden(model, config, tiny_head(), batch, blocks, "sdpa")
        terms = draft_loss(hidden, blocks, tiny_head(), Objective(kind), batch)
        terms.numerator.backward()
        assert float(terms.numerator.detach()) == float(terms.denominator) == 0
        assert window_denominator(blocks, Objective(kind)) == 0
        assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_invalid_blocks_change_neither_loss_nor_gradients():
    """Trap 21: the same anchors with and without fillers, on packed rows and in every objective."""
    batch = packed_batch([[(20, 5, 20)]], 24)
    config = tiny_config((SLIDING, FULL), window=3)
    model, head = init_weights(DFlashDrafter(config), 0), tiny_head()
    results = []
    for num_anchors in (14, 30):
        blocks = draw_anchors(batch, num_anchors=num_anchors, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=0)
        assert int(blocks.valid.sum()) == 14
        model.zero_grad()
        terms = draft_loss(block_hidden(model, config, head, batch, blocks, "sdpa"), blocks, head, Objective("dpace"))
        terms.numerator.backward()
        results.append((terms.numerator.detach(), [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-4, rtol=1e-5)
    for a, b in zip(*(gradients for _, gradients in results)):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b, atol=1e-4 * float(a.abs().max()), rtol=0)


def test_decay_weights_have_the_published_sums():
    for block_size, gamma, total, last in ((16, 7, 6.631, 0.135), (10, 5, 4.605, 0.202), (8, 4, 3.735, 0.223)):
        weights = decay_weights(block_size, gamma)
        assert default_gamma(block_size) == gamma and weights[0] == 1
        assert abs(float(weights.sum()) - total) < 1e-3 and abs(float(weights[-1]) - last) < 1e-3
    assert default_gamma(4) == 2.0


def test_dpace_weighs_a_slot_by_what_depends_on_it():
    """q = 1/2 everywhere, alpha 1/2: s = 3/4; weights are suffix sums of its powers, over supervised slots only."""
    cross_entropy = torch.full((2, 4), math.log(2.0))
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    s = 0.75
    powers = [s, s**2, s**3, s**4]
    want = [[sum(powers[k:]) for k in range(4)], [s + s**2, s**2, 0, 0]]
    torch.testing.assert_close(dpace_weights(cross_entropy, mask, 0.5), torch.tensor(want))


def test_bfloat16_losses_are_computed_in_float32():
    _, blocks, hidden = example(torch.float32)
    head = tiny_head()
    exact = draft_loss(hidden, blocks, head, Objective()).numerator.detach()
    half = hidden.detach().bfloat16().requires_grad_()
    terms = draft_loss(half, blocks, head.to("cpu", torch.bfloat16), Objective())
    assert terms.numerator.dtype == torch.float32
    assert abs(float(terms.numerator.detach() / exact) - 1) < 0.02
    terms.numerator.backward()
    assert half.grad.dtype == torch.bfloat16 and half.grad.isfinite().all()


def test_after_overfitting_one_sequence_whole_blocks_are_accepted():
    """Trap 18: trained on one answer, the walk and cached drafting accept every slot: block_size tokens a round."""
    torch.manual_seed(0)
    config = tiny_config((SLIDING, FULL), window=6)
    model, head = init_weights(DFlashDrafter(config), 0), tiny_head()
    batch = packed_batch([[(29, 4, 29)]], 29)
    objective = Objective(gamma=2.0, chunk_blocks=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(120):
        blocks = draw_anchors(batch, num_anchors=24, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=step)
        terms = draft_loss(block_hidden(model, config, head, batch, blocks, "sdpa"), blocks, head, objective)
        optimizer.zero_grad()
        (terms.numerator / terms.denominator).backward()
        optimizer.step()
    stats = evaluate_samples(model, config, head, [batch], objective=objective, stop_ids=(), attention="sdpa")
    assert stats.round_lengths == [[4] * 6] and stats.pooled == stats.macro == 4.0
    assert stats.slot_accuracy == [1.0] * 3 and stats.loss < 0.2
    for a in (4, 11, 25):
        cache = DraftCache(model)
        extend(model, cache, batch.hidden[0, :a], torch.arange(a))
        logits = draft(model, head, cache, int(batch.token_ids[0, a]), a, 4)
        assert logits.argmax(-1).tolist() == batch.token_ids[0, a + 1 : a + 4].tolist()


def test_evaluation_equals_drafting_at_every_position_and_does_not_depend_on_chunks():
    config = tiny_config((SLIDING, FULL), window=6)
    model, head = init_weights(DFlashDrafter(replace(config, initializer_range=0.15)), 3), tiny_head()
    batch = packed_batch([[(40, 4, 37)]], 40)
    with torch.no_grad():  # let the model be right now and then: the data follows its own drafts
        for a in range(4, 36):
            cache = DraftCache(model)
            extend(model, cache, batch.hidden[0, :a], torch.arange(a))
            batch.token_ids[0, a + 1] = draft(model, head, cache, int(batch.token_ids[0, a]), a, 4)[0].argmax()
    results = [
        evaluate_samples(
            model, config, head, [batch], objective=Objective(chunk_blocks=n), stop_ids=(), attention="sdpa"
        )
        for n in (5, 64)
    ]
    results.append(evaluate_samples(
        model, config, head, [batch], objective=Objective(), stop_ids=(), attention="flex"
    ))  # fmt: skip
    assert results[2].round_lengths == results[0].round_lengths and abs(results[2].loss - results[0].loss) < 1e-5
    assert results[0].round_lengths == results[1].round_lengths and results[0].correct == results[1].correct
    assert abs(results[0].loss - results[1].loss) < 1e-5
    assert results[0].slot_accuracy[0] == 1.0 and results[0].slot_accuracy[2] < 0.9
    assert all(length >= 2 for length in results[0].round_lengths[0]) and len(results[0].round_lengths[0]) > 5


def test_the_walk_moves_by_what_was_accepted_and_leaves_the_cut_round_out():
    """Trap 30: rounds count the bonus token; a perfect drafter gives exactly B, an always-wrong one exactly 1."""
    walk = lambda accepted, stopped=False: walk_acceptance(accepted, 10, 10 + len(accepted), 4, stopped=stopped)
    assert walk([0] * 7) == [1] * 6
    assert walk([3] * 9) == [4, 4], "positions 10, 14 and 18; nothing follows token 18"
    assert walk([3] * 11) == [4, 4] and walk([3] * 11, stopped=True) == [4, 4, 2], "cut, or ended by a stop token"
    assert walk([3, 9, 9, 9, 0, 2, 9, 9, 0, 0]) == [4, 1, 3, 1], "what the walk jumps over does not count"
    assert walk([]) == [] and walk([0]) == []
    stats = WalkStats(round_lengths=[[4, 1], [2], []])
    assert stats.pooled == 7 / 3 and stats.macro == (2.5 + 2) / 2


def test_a_shards_sample_becomes_one_row_and_its_stop_token_counts():
    shard = HiddenShard(
        sample_ids=["a", "b"], token_ids=torch.arange(20, dtype=torch.int32), loss_mask=torch.arange(20) >= 12,
        offsets=torch.tensor([0, 8, 20]), hidden=torch.randn(20, 2 * HIDDEN), last_hidden=None, provenance={},
    )  # fmt: skip
    batch = sample_batch(shard, 1)
    assert batch.token_ids.tolist() == [list(range(8, 20))] and batch.sample_ids == [["b"]]
    assert torch.equal(batch.hidden[0], shard.hidden[8:]) and answer_span(batch.loss_mask[0]) == (4, 12)
    assert answer_span(sample_batch(shard, 0).loss_mask[0]) == (0, 0)
    config = tiny_config((FULL,))
    model = init_weights(DFlashDrafter(config), 0)
    head = tiny_head()
    always = torch.full((VOCAB, HIDDEN), 0.0)
    run = lambda stop: evaluate_samples(
        model, config, TargetHead(head.embedding, always, head.final_norm, 0.0, 1e-6), [batch, sample_batch(shard, 0)],
        objective=Objective(), stop_ids=stop, attention="sdpa",
    )  # fmt: skip
    assert run({19}).round_lengths == [[1] * 7, []], "argmax of equal logits is token 0, which never comes"
    assert run({19}).supervised == [7, 6, 5]
