"""Captured rows are the residual stream after the named layers, exactly, whatever the batch around them."""

import pytest
import torch
from helpers_target import (
    hooked_hidden,
    one_thread,  # noqa: F401
    plain_hidden,
    plain_logits,
    random_ids,
    rows_of,
    tiny,
)

from dflash_train.target.base import check_layer_ids, default_layer_ids, hf_index
from dflash_train.util.errors import UserError

ARCHS = ("qwen3", "llama")


def num_hooks(target) -> int:
    return sum(len(module._forward_hooks) for module in (*target.layers, target.decoder.norm))


@pytest.mark.parametrize("arch", ARCHS)
def test_layer_id_is_hidden_states_plus_one_and_equals_a_hook_bit_for_bit(arch):
    """Trap 1: id L is hidden_states[L+1], bit-equal to a hook; order and duplicates of the list are kept."""
    target, ids = tiny(arch), random_ids(23, 1)
    states, hooked = hooked_hidden(target, ids)
    features = target.capture(ids[None], (1, 0, 1))
    width = target.spec.hidden_size
    assert features.hidden.shape == (1, 23, 3 * width) and features.last_hidden is None
    for slot, layer_id in enumerate((1, 0, 1)):
        rows = features.hidden[0, :, slot * width : (slot + 1) * width]
        assert torch.equal(rows, states[hf_index(layer_id)])
        assert torch.equal(rows, hooked[layer_id])


def test_the_last_entry_of_hugging_face_is_after_the_norm_and_a_hook_is_before_it():
    """Trap 1: that is why the last layer's id is refused, as are -1 and -2, naming the range."""
    target, ids = tiny(), random_ids(9, 2)
    seen = []
    handle = target.layers[-1].register_forward_hook(lambda m, a, out: seen.append(rows_of(out)))
    last = plain_hidden(target, ids)[-1]
    handle.remove()
    assert not torch.allclose(seen[0], last)
    with torch.no_grad():
        assert torch.equal(target.decoder.norm(seen[0][None])[0], last)
    for bad in ((2,), (3,), (-2,), (0, 7), ()):
        with pytest.raises(UserError, match=r"within 0\.\.1"):
            target.capture(ids[None], bad)
        with pytest.raises(UserError):
            check_layer_ids(bad, 3)


def test_default_layer_ids_follow_the_formula_and_refuse_where_it_repeats():
    assert default_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_layer_ids(30, 5) == (1, 8, 14, 20, 27)
    with pytest.raises(UserError, match="layer_ids"):
        default_layer_ids(3, 5)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tied", (True, False))
def test_the_head_alone_rebuilds_logits_from_the_stored_last_state(arch, tied):
    """Trap 2: the last state is after the final norm: head alone gives the model's logits, a second norm does not."""
    target, ids = tiny(arch, tied=tied), random_ids(17, 3)
    head = target.head()
    last = target.capture(ids[None], (0,), last_hidden=True).last_hidden[0]
    logits = plain_logits(target, ids)
    assert (head.logits(last) - logits).abs().max() < 1e-5
    scale = torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + head.final_norm_eps)
    normed_again = last * scale * (head.final_norm + head.final_norm_offset)
    assert (head.logits(normed_again) - logits).abs().max() > 0.1


@pytest.mark.parametrize("arch", ARCHS)
def test_the_recorded_norm_gain_and_offset_are_the_ones_the_model_applies(arch):
    """Trap 2: Qwen3 and Llama norms are x*w (offset 0.0)."""
    target, ids = tiny(arch), random_ids(17, 4)
    head, seen = target.head(), []
    handle = target.decoder.norm.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    target.capture(ids[None], (), last_hidden=True)
    handle.remove()
    ((x, out),) = seen
    assert head.final_norm_offset == 0.0
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + head.final_norm_eps)
    assert (x * scale * (head.final_norm + head.final_norm_offset) - out).abs().max() < 1e-5


@pytest.mark.parametrize("arch", ARCHS)
def test_right_padding_and_its_content_do_not_reach_real_rows(arch):
    """Trap 3: lengths 12 and 17 in one right-padded batch equal the unpadded rows (full attention)."""
    target = tiny(arch)
    short, long = random_ids(12, 5), random_ids(17, 6)
    alone = [target.capture(x[None], (0, 1), True) for x in (short, long)]
    for pad in (0, 50, 127):
        batch = torch.full((2, 17), pad)
        batch[0, :12], batch[1] = short, long
        both = target.capture(batch, (0, 1), True)
        for row, (x, single) in enumerate(zip((short, long), alone)):
            assert (both.hidden[row, : len(x)] - single.hidden[0]).abs().max() < 1e-4
            assert (both.last_hidden[row, : len(x)] - single.last_hidden[0]).abs().max() < 1e-4


def test_batch_size_and_order_change_nothing():
    """Trap 5: the same rows per sample for batches of 1, 4 and 9, and in another order (fp32, 1e-4)."""
    target = tiny()
    lengths = (5, 17, 9, 12, 3, 16, 8, 11, 17)
    samples = [random_ids(n, 10 + i) for i, n in enumerate(lengths)]
    alone = [target.capture(x[None], (0, 1)).hidden[0] for x in samples]
    for size in (1, 4, 9):
        for order in (range(9), reversed(range(9)), (3, 8, 0, 5, 1, 7, 2, 6, 4)):
            order = list(order)
            for start in range(0, 9, size):
                chosen = order[start : start + size]
                batch = torch.zeros(len(chosen), max(lengths[i] for i in chosen), dtype=torch.long)
                for row, i in enumerate(chosen):
                    batch[row, : lengths[i]] = samples[i]
                hidden = target.capture(batch, (0, 1)).hidden
                for row, i in enumerate(chosen):
                    assert (hidden[row, : lengths[i]] - alone[i]).abs().max() < 1e-4


def test_the_head_is_never_called_and_the_pass_ends_after_the_last_needed_layer():
    """Trap 6: counted at every layer, the final norm and the head."""
    target, ids = tiny(num_layers=5, seed=6), random_ids(9, 7)  # a target no other test has hooks on
    calls = {}
    watched = {f"layer{i}": layer for i, layer in enumerate(target.layers)}
    watched |= {"norm": target.decoder.norm, "head": target.lm_head}
    handles = [
        module.register_forward_hook(lambda m, a, o, name=name: calls.update({name: calls.get(name, 0) + 1}))
        for name, module in watched.items()
    ]
    target.capture(ids[None], (2, 0))
    assert calls == {"layer0": 1, "layer1": 1, "layer2": 1}
    calls.clear()
    target.capture(ids[None], (2, 0), last_hidden=True)
    assert calls == {f"layer{i}": 1 for i in range(5)} | {"norm": 1}
    assert num_hooks(target) == len(handles) - 1, "capture leaves no hook behind"
    for handle in handles:
        handle.remove()


def test_capture_keeps_no_row_of_a_layer_that_was_not_asked_for():
    """Trap 6: after the call the features hold exactly their own bytes, and nothing else of the pass is alive."""
    import gc

    target, ids = tiny(num_layers=5), random_ids(41, 8)
    # type(x), not isinstance: that one follows weak proxies, and those that other tests left behind are dead.
    alive = lambda: [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    before = {id(x) for x in alive()}
    features = target.capture(ids[None], (1,))
    gc.collect()
    new = [x for x in alive() if id(x) not in before]
    big = [x for x in new if x.numel() >= 41 * 64]
    assert [x.data_ptr() for x in big] == [features.hidden.data_ptr()]


def test_a_failing_forward_is_not_swallowed_by_the_early_stop():
    target = tiny()
    before = num_hooks(target)
    with pytest.raises(IndexError):
        target.capture(torch.tensor([[9999]]), (0,))
    assert num_hooks(target) == before
