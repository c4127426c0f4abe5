"""Micro-batches reach the device whole and in order, also where they are copied while others are computed."""

import pytest
import torch

from dflash_train.drafter.anchors import draw_anchors
from dflash_train.engine.window import uploaded
from tests.helpers_drafter import MASK_ID, packed_batch


def parts(count: int, num_tokens: int = 24):
    batches = [packed_batch([[(num_tokens, 4, num_tokens)]], num_tokens, seed=seed) for seed in range(count)]
    draw = lambda batch: draw_anchors(batch, num_anchors=3, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=0)
    return [(batch, draw(batch)) for batch in batches]


def check_same(got, want) -> None:
    (batch, blocks), (batch_before, blocks_before) = got, want
    assert batch.sample_ids == batch_before.sample_ids
    for after, before in ((batch, batch_before), (blocks, blocks_before)):
        for name, value in vars(before).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(after, name).cpu(), value), name


@pytest.mark.parametrize("count", [0, 1, 3])
def test_every_part_comes_once_and_in_order(count):
    given = parts(count)
    got = list(uploaded(given, torch.device("cpu")))
    assert len(got) == count
    for one, part in zip(got, given):
        check_same(one, part)


@pytest.mark.gpu
def test_on_a_gpu_a_part_is_whole_when_it_is_used_and_stays_so_until_then():
    """Memory that is freed in Python while the GPU still reads it must not hold the part after the next: each part is
    read late, behind a product that takes long, and dropped at once."""
    device, given = torch.device("cuda"), parts(6, num_tokens=4096)
    pinned = [(type(batch)(**{name: value.pin_memory() if isinstance(value, torch.Tensor) else value
                              for name, value in vars(batch).items()}), blocks) for batch, blocks in given]  # fmt: skip
    square, sums = torch.randn(4096, 4096, device=device), []
    for batch, _ in uploaded(pinned, device):
        for _ in range(20):
            torch.mm(square, square)
        sums.append(batch.hidden.double().sum())
        del batch
    assert [float(value) for value in sums] == pytest.approx([float(b.hidden.double().sum()) for b, _ in given])
    for one, part in zip(uploaded(pinned, device), given):
        check_same(one, part)
