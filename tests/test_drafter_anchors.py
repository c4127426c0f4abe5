"""Anchors, labels and masks of blocks: worked examples, and the loop-written twin over random rows."""

import random

import pytest
import torch

from dflash_train.drafter.anchors import GOLDEN, allot, draw_anchors, eligible, make_blocks, mix64, signed64
from dflash_train.drafter.naive import naive_anchors, naive_labels, naive_rank
from dflash_train.records import DraftBatch
from dflash_train.util.provenance import stable_hash
from tests.helpers_drafter import MASK_ID, packed_batch

YES = torch.tensor([[True]])


def draw(batch, num_anchors=8, block_size=4, seed=0, epoch=0):
    return draw_anchors(
        batch, num_anchors=num_anchors, block_size=block_size, mask_token_id=MASK_ID, seed=seed, epoch=epoch
    )


def one_document(token_ids, supervised):
    count = len(token_ids)
    mask = torch.zeros(1, count, dtype=torch.bool)
    mask[0, list(supervised)] = True
    zeros = torch.zeros(1, count, dtype=torch.long)
    return DraftBatch(
        torch.tensor([token_ids]), mask, zeros, torch.arange(count)[None], torch.zeros(1, count, 2), None, [["one"]]
    )


def random_rows(seed, num_rows=3, num_tokens=60):
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        documents, left = [], num_tokens - rng.randrange(0, 8)
        while left >= 4:
            length = rng.randrange(4, min(left, 25) + 1)
            first = rng.randrange(1, length)
            documents.append((length, first, rng.randrange(first, length + 1)))
            left -= length
        rows.append(documents)
    return packed_batch(rows, num_tokens, seed=seed)


def test_labels_are_not_shifted_and_only_slot_0_is_clean():
    """Trap 17: tokens 10..21, anchor 5, B=4 read [15,M,M,M] at positions 5..8 and predict [-,16,17,18]."""
    batch = one_document(list(range(10, 22)), range(12))
    blocks = make_blocks(batch, torch.tensor([[5]]), YES, block_size=4, mask_token_id=MASK_ID)
    assert blocks.token_ids.tolist() == [[[15, MASK_ID, MASK_ID, MASK_ID]]]
    assert blocks.position_ids.tolist() == [[[5, 6, 7, 8]]]
    assert blocks.labels[0, 0, 1:].tolist() == [16, 17, 18]
    assert blocks.loss_mask.tolist() == [[[False, True, True, True]]]


def test_a_block_at_the_turns_end_is_kept_with_partial_supervision():
    """Trap 17: turn at 8..39, anchor 37: loss on slots 1 and 2 only, also when the next turn is supervised again."""
    batch = one_document(list(range(60)), [*range(8, 40), *range(41, 50)])
    anchors = torch.tensor([[37]])
    blocks = make_blocks(batch, anchors, YES, block_size=6, mask_token_id=MASK_ID)
    assert blocks.loss_mask.tolist() == [[[False, True, True, False, False, False]]], "nothing after the gap"
    assert bool(eligible(batch)[0, 38]) and not bool(eligible(batch)[0, 39]) and not bool(eligible(batch)[0, 7])


def test_the_last_anchor_of_a_row_predicts_the_last_token():
    batch = one_document(list(range(10)), range(4, 10))
    blocks = draw(batch, num_anchors=20)
    assert blocks.anchors[0][blocks.valid[0]].tolist() == [4, 5, 6, 7, 8]
    assert blocks.loss_mask[0, 4].tolist() == [False, True, False, False]
    assert blocks.labels[0, 4].tolist() == [8, 9, 0, 0]


def test_no_eligible_position_gives_invalid_blocks_only():
    """Trap 39: a row without anchors is legal; every block is invalid and carries no loss."""
    blocks = draw(packed_batch([[(10, 3, 4), (8, 8, 8)], []], 20))
    assert not blocks.valid.any() and not blocks.loss_mask.any()
    assert (blocks.token_ids == MASK_ID).all() and (blocks.document_ids == -1).all()


def test_blocks_never_reach_into_the_next_document():
    batch = packed_batch([[(10, 4, 10), (12, 0, 12)]], 22)
    anchors = torch.tensor([[8, 9]])
    blocks = make_blocks(batch, anchors, YES.expand(1, 2), block_size=4, mask_token_id=MASK_ID)
    assert blocks.loss_mask.tolist() == [[[False, True, False, False], [False] * 4]]
    assert not bool(eligible(batch)[0, 9]), "its next token is another document's"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_anchors", [1, 5, 17, 80])
def test_anchors_and_labels_equal_the_loop_twin(seed, num_anchors):
    batch = random_rows(seed)
    blocks = draw(batch, num_anchors=num_anchors, block_size=5, seed=seed, epoch=seed % 3)
    expected = naive_anchors(batch, num_anchors, seed, seed % 3)
    assert sum(map(len, expected)) > 0
    for b, anchors in enumerate(expected):
        assert blocks.anchors[b][blocks.valid[b]].tolist() == anchors
        assert blocks.valid[b].tolist() == [True] * len(anchors) + [False] * (num_anchors - len(anchors))
        assert (blocks.anchors[b].diff() >= 0).all(), "sorted, filler included"
        for n, anchor in enumerate(anchors):
            labels, mask = naive_labels(batch, b, anchor, 5)
            assert blocks.labels[b, n].tolist() == [0 if label is None else label for label in labels]
            assert blocks.loss_mask[b, n].tolist() == mask


def test_the_tensor_hash_equals_the_integer_one():
    for position in (0, 1, 777, 300_000):
        salt = signed64(stable_hash("anchor", 3, 5, "x"))
        x = torch.tensor([salt]) + torch.tensor([position + 1]) * signed64(GOLDEN)
        assert int(mix64(x)) == naive_rank(3, 5, "x", position)


def test_a_draw_depends_on_seed_epoch_and_sample_alone():
    """Same document, another row, another place in it, other neighbours: the same anchors if its share is the same."""
    alone = packed_batch([[(40, 5, 40)]], 40)
    moved = packed_batch([[(12, 12, 12), (40, 5, 40)]], 60)
    moved.sample_ids[0][1] = alone.sample_ids[0][0]
    pick = lambda batch, **kw: draw(batch, num_anchors=8, **kw).anchors[0].tolist()
    assert [a - 12 for a in pick(moved)] == pick(alone)
    assert pick(alone) == pick(alone)
    draws = {tuple(pick(alone, seed=s, epoch=e)) for s in range(3) for e in range(3)}
    assert len(draws) == 9, "drawn anew for each seed and epoch"


def test_every_eligible_position_comes_up_over_epochs():
    batch = packed_batch([[(40, 5, 40)]], 40)
    counts = torch.zeros(40)
    for epoch in range(400):
        blocks = draw(batch, num_anchors=7, epoch=epoch)
        counts[blocks.anchors[0]] += 1
    assert (counts[5:39] > 0).all() and counts[:5].sum() == counts[39] == 0
    assert counts[5:39].max() < 2 * counts[5:39].min(), "drawn evenly"


def test_no_document_is_starved_and_what_is_left_goes_to_the_long_ones():
    assert allot([3, 100, 50], 30) == [3, 14, 13]
    assert allot([0, 100, 50], 30) == [0, 15, 15]
    assert allot([5, 6, 7], 100) == [5, 6, 7]
    assert allot([10, 30, 20], 2) == [0, 1, 1]
    assert allot([], 4) == [] and allot([0, 0], 4) == [0, 0]
    for seed in range(50):
        rng = random.Random(seed)
        counts = [rng.randrange(0, 40) for _ in range(rng.randrange(1, 9))]
        slots = rng.randrange(1, 120)
        quotas = allot(counts, slots)
        assert sum(quotas) == min(slots, sum(counts)) and all(q <= c for q, c in zip(quotas, counts))
        short = [q for q, c in zip(quotas, counts) if q < c]
        assert not short or max(quotas) <= min(short) + 1, "nobody has two more than one who wanted more"
