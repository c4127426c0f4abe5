"""On a GPU: compiled flex attention against sdpa in values and gradients, and a bounded number of compilations."""

import pytest
import torch

from dflash_train.drafter.anchors import draw_anchors
from dflash_train.drafter.dflash import DraftCache, block_hidden, draft, extend
from dflash_train.drafter.loss import Objective, draft_loss
from dflash_train.drafter.walk import evaluate_samples
from tests.helpers_drafter import FULL, MASK_ID, SLIDING, packed_batch, tiny_config, tiny_drafter, tiny_head

pytestmark = pytest.mark.gpu
LAYOUTS = [((FULL, FULL), None), ((SLIDING, FULL, SLIDING), None), ((SLIDING, FULL), False)]


def draw(batch, num_anchors, epoch=0):
    return draw_anchors(batch, num_anchors=num_anchors, block_size=4, mask_token_id=MASK_ID, seed=0, epoch=epoch)


@pytest.mark.parametrize("layers, is_causal", LAYOUTS)
def test_compiled_flex_equals_sdpa_in_values_and_gradients(layers, is_causal):
    """Traps 16, 21: packed documents, padding and invalid blocks; float32, also through the loss."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = tiny_config(layers, window=20, is_causal=is_causal)
    model, head = tiny_drafter(config).cuda(), tiny_head().to("cuda")
    batch = packed_batch([[(100, 10, 100), (150, 20, 150)], [(200, 30, 190)]], 256).to("cuda")
    blocks = draw(batch, 230)
    assert blocks.anchors.is_cuda and not blocks.valid.all()
    results = {}
    for attention in ("sdpa", "flex"):
        model.zero_grad()
        hidden = block_hidden(model, config, head, batch, blocks, attention)
        terms = draft_loss(hidden, blocks, head, Objective(gamma=2.0), batch)
        terms.numerator.backward()
        assert hidden.isfinite().all() and terms.numerator.isfinite()
        results[attention] = hidden.detach(), [p.grad.clone() for p in model.parameters()]
    assert results["sdpa"][0].std() > 0.1
    torch.testing.assert_close(results["flex"][0], results["sdpa"][0], atol=1e-4, rtol=0)
    for got, want in zip(results["flex"][1], results["sdpa"][1]):
        assert want.abs().max() > 0
        torch.testing.assert_close(got, want, atol=1e-3 * float(want.abs().max()), rtol=0)


def test_ten_lengths_compile_a_bounded_number_of_graphs():
    """Trap 22: flex is bound to lengths; ten of them share a few graphs, and one length never compiles again."""
    config = tiny_config((SLIDING, FULL), window=20)
    model, head = tiny_drafter(config).cuda(), tiny_head().to("cuda")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def step(num_tokens, num_anchors, epoch):
        batch = packed_batch([[(num_tokens - 7, 10, num_tokens - 7)]], num_tokens).to("cuda")
        block_hidden(model, config, head, batch, draw(batch, num_anchors, epoch), "flex").sum().backward()

    for epoch in range(4):
        step(256, 32, epoch)
    first = graphs()
    for epoch in range(4):
        step(256, 32, 10 + epoch)
    assert graphs() == first, "steps of one shape compile nothing"
    heldout = [packed_batch([[(n, 10, n)]], n) for n in range(150, 520, 40)]
    assert len(heldout) == 10
    flex, sdpa = (
        evaluate_samples(model, config, head, heldout, objective=Objective(chunk_blocks=32), stop_ids=(),
                         attention=attention, device="cuda") for attention in ("flex", "sdpa")
    )  # fmt: skip
    assert abs(flex.loss - sdpa.loss) < 1e-4
    assert graphs() <= 4 * first, (first, graphs())
    print(f"graphs: {first} for training, {graphs()} with ten held-out lengths")


@pytest.mark.parametrize("layers, is_causal", LAYOUTS)
def test_cached_drafting_equals_the_packed_forward_on_the_gpu(layers, is_causal):
    """Trap 18: float32, sdpa and flex, windows shorter than the context."""
    torch.backends.cuda.matmul.allow_tf32 = False
    config = tiny_config(layers, window=20, is_causal=is_causal)
    model, head = tiny_drafter(config).cuda(), tiny_head().to("cuda")
    batch = packed_batch([[(120, 10, 120)]], 128).to("cuda")
    blocks = draw(batch, 32)
    with torch.no_grad():
        packed = head.logits(block_hidden(model, config, head, batch, blocks, "flex"))
    for n in (0, 15, 31):
        a = int(blocks.anchors[0, n])
        cache = DraftCache(model, capacity=16)
        for part in torch.arange(a).tensor_split(3):
            extend(model, cache, batch.hidden[0, part.cuda()], part)
        logits = draft(model, head, cache, int(batch.token_ids[0, a]), a, 4)
        torch.testing.assert_close(logits, packed[0, n, 1:], atol=1e-4 * float(packed.abs().max()), rtol=0)
