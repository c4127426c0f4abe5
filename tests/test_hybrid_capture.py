"""Capture on recurrent targets: padding, batches and neighbours reach no real row; the head alone rebuilds logits."""

import pytest
import torch
from helpers_hybrid import DENSE, HYBRIDS, plain_answer
from helpers_target import hooked_hidden, plain_logits, random_ids, tiny

from dflash_train.target.base import hf_index

LAYERS = (0, 1, 2)


def padded(samples: list[torch.Tensor], pad: int = 0) -> torch.Tensor:
    """Samples as rows of one right-padded batch."""
    batch = torch.full((len(samples), max(map(len, samples))), pad)
    for row, ids in zip(batch, samples):
        row[: len(ids)] = ids
    return batch


def greedy(target, prompts: list[list[int]], count: int) -> list[list[int]]:
    results = target.answer(prompts, max_new_tokens=count, temperature=0.0, top_p=1.0, top_k=0, seed=0)
    return [token_ids for token_ids, _ in results]


@pytest.mark.parametrize("arch", HYBRIDS)
def test_layer_id_is_hidden_states_plus_one_and_equals_a_hook_bit_for_bit(arch):
    """Trap 1: on recurrent layers and on the full one before the norm alike; order and duplicates are kept."""
    target, ids = tiny(arch), random_ids(23, 1)
    states, hooked = hooked_hidden(target, ids)
    features, wanted = target.capture(ids[None], (2, 0, 1, 2)), (2, 0, 1, 2)
    for part, layer_id in zip(features.hidden[0].split(target.spec.hidden_size, dim=-1), wanted, strict=True):
        assert torch.equal(part, states[hf_index(layer_id)]) and torch.equal(part, hooked[layer_id])


@pytest.mark.parametrize("arch", HYBRIDS)
def test_right_padding_and_its_content_do_not_reach_real_rows(arch):
    """Trap 3: lengths 12 and 17 in one right-padded batch equal the unpadded rows, recurrent layers included."""
    target, samples = tiny(arch), [random_ids(12, 5), random_ids(17, 6)]
    alone = [target.capture(ids[None], LAYERS, True) for ids in samples]
    for pad in (0, 50, 127):
        both = target.capture(padded(samples, pad), LAYERS, True)
        for row, (ids, single) in enumerate(zip(samples, alone)):
            assert (both.hidden[row, : len(ids)] - single.hidden[0]).abs().max() < 1e-4
            assert (both.last_hidden[row, : len(ids)] - single.last_hidden[0]).abs().max() < 1e-4


def test_left_padding_without_a_mask_would_be_far_off():
    """Trap 3: the state does read what lies to its left, so the test above is about padding's side."""
    target, ids = tiny(DENSE), random_ids(12, 5)
    left = torch.cat([torch.full((5,), 50), ids])
    off = target.capture(left[None], (2,)).hidden[0, 5:] - target.capture(ids[None], (2,)).hidden[0]
    assert off.abs().max() > 0.5


@pytest.mark.parametrize("arch", HYBRIDS)
def test_batch_size_order_and_neighbours_change_nothing(arch):
    """Traps 4 and 5: one document a row, batches of 1, 4 and 9 in any order: every sample's rows are its own (1e-4)."""
    target, lengths = tiny(arch), (5, 17, 66, 12, 3, 16, 8, 1, 17)
    samples = [random_ids(length, 10 + i) for i, length in enumerate(lengths)]
    alone = [target.capture(ids[None], LAYERS).hidden[0] for ids in samples]
    for size, order in ((4, range(9)), (9, (3, 8, 0, 5, 1, 7, 2, 6, 4))):
        for start in range(0, 9, size):
            chosen = list(order)[start : start + size]
            hidden = target.capture(padded([samples[i] for i in chosen]), LAYERS).hidden
            for row, i in zip(hidden, chosen):
                assert (row[: lengths[i]] - alone[i]).abs().max() < 1e-4


def test_another_document_beside_it_changes_no_bit_of_a_row_and_before_it_would():
    """Trap 4: neighbour A becomes A' in the same batch; packed into one row, A would reach into B's state."""
    target, b = tiny(DENSE), random_ids(14, 3)
    rows = [target.capture(torch.stack([random_ids(14, seed), b]), LAYERS).hidden[1] for seed in (1, 2)]
    assert torch.equal(rows[0], rows[1])
    packed = [target.capture(torch.cat([random_ids(14, seed), b])[None], LAYERS).hidden[0, 14:] for seed in (1, 2)]
    assert (packed[0] - packed[1]).abs().max() > 0.5


@pytest.mark.parametrize("arch", HYBRIDS)
def test_the_head_is_never_called_and_the_pass_ends_after_the_last_needed_layer(arch):
    """Trap 6: counted at every layer, the final norm and the head."""
    target, ids, calls = tiny(arch), random_ids(9, 7), []
    watched = {f"layer{i}": layer for i, layer in enumerate(target.layers)}
    watched |= {"norm": target.decoder.norm, "head": target.lm_head}
    handles = [
        module.register_forward_hook(lambda m, a, o, name=name: calls.append(name)) for name, module in watched.items()
    ]
    target.capture(ids[None], (1, 0))
    assert calls == ["layer0", "layer1"]
    calls.clear()
    target.capture(ids[None], (1, 0), last_hidden=True)
    assert calls == [*(f"layer{i}" for i in range(4)), "norm"]
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("arch", HYBRIDS)
@pytest.mark.parametrize("tied", (True, False))
def test_the_head_alone_rebuilds_logits_and_the_recorded_norm_is_the_one_applied(arch, tied):
    """Trap 2: x*(1+w) with random gains: offset 1.0; a second norm, or the plain one, would be far off."""
    target, ids, seen = tiny(arch, tied=tied), random_ids(17, 3), []
    head, logits = target.head(), plain_logits(target, ids)
    handle = target.decoder.norm.register_forward_hook(lambda m, args, out: seen.append(args[0][0]))
    last = target.capture(ids[None], (0,), last_hidden=True).last_hidden[0]
    handle.remove()
    assert (head.logits(last) - logits).abs().max() < 1e-5
    norm = lambda x, offset: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + head.final_norm_eps) * (
        head.final_norm + offset
    )  # fmt: skip
    assert head.final_norm_offset == 1.0
    assert (norm(seen[0], 1.0) - last).abs().max() < 1e-5
    assert (norm(seen[0], 0.0) - last).abs().max() > 0.1
    assert (head.logits(norm(last, 1.0)) - logits).abs().max() > 0.1


@pytest.mark.parametrize("arch", HYBRIDS)
def test_greedy_answers_of_a_left_padded_batch_equal_single_ones(arch):
    """Traps 3 and 5: the library's own generation masks padding out of the recurrent state."""
    target = tiny(arch)
    prompts = [random_ids(length, length).tolist() for length in (3, 11, 7)]
    together = greedy(target, prompts, 8)
    for prompt, answer in zip(prompts, together):
        assert greedy(target, [prompt], 8) == [answer]
        assert plain_answer(target, tuple(prompt), 8)[: len(answer)] == answer
