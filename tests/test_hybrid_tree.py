"""A tree through Gated DeltaNet layers in one pass, against the library's own decode of each path, token by token.

The algebra is held in float64, where both sides are one throughout; float32 and bfloat16 then only round, and are held
to the rounding of the library's own passes. These models amplify it: a head's first outputs are all but parallel, and
the gated norm divides by their length.
"""

from dataclasses import replace
from statistics import median

import pytest
import torch
from helpers_hybrid import (
    DENSE,
    HYBRIDS,
    brute_logits,
    decode_paths,
    decode_state,
    everything_in_float64,
    leaves,
    naive_logits,
    random_case,
    relative,
    session_state,
    started,
    tiny_float64,
    walk,
    worst,
)
from helpers_target import path_to, plain_logits, random_ids, random_tree, tiny, tree

from dflash_train.decode.verify import Sampling, Verifier
from dflash_train.records import FeatureSpec
from dflash_train.target import qwen3_5
from dflash_train.target.attention import ancestor_mask
from dflash_train.target.qwen3_5 import TreeShape
from dflash_train.target.tree_delta_rule import conv_windows

BRANCHING = [-1, 0, 0, 1, 1, 2]
EXACT = 1e-11


def logits_after(session, token_ids: list[int]) -> torch.Tensor:
    """Our session, one node a round."""
    rows = []
    for token_id in token_ids:
        rows.append(session.forward(tree([token_id], [-1]))[0][0])
        session.commit([0])
    return torch.stack(rows)


@pytest.fixture
def float64():
    for arch in HYBRIDS:
        tiny_float64(arch)  # made before the name changes
    with everything_in_float64():
        yield


@pytest.mark.parametrize("arch", HYBRIDS)
def test_in_float64_trees_states_and_what_follows_equal_decode_token_by_token(arch, float64):
    """Traps 26 and 28: node logits, committed KV / conv / recurrent state and six tokens decoded on from it."""
    target, onward = tiny_float64(arch), [20, 31, 9, 44, 12, 27]
    for seed in range(8 if arch == DENSE else 4):
        context, drafted = random_case(target, seed, 24, 12, hit_rate=0)
        session = started(target, context)
        assert relative(session.forward(drafted)[0], naive_logits(target, context, drafted)) < EXACT
        path = path_to(len(drafted) - 1, drafted.parents)
        session.commit(path)
        text = torch.cat([context, drafted.token_ids[path]])
        assert worst(session_state(session), decode_state(target, text, len(context))) < EXACT
        after = decode_paths(target, context, [[*drafted.token_ids[path].tolist(), *onward]])[0][0, len(path) :]
        assert relative(logits_after(session, onward), after) < EXACT


def test_two_hundred_random_trees_are_exact_and_accepted_like_an_independent_walk(float64):
    """Traps 26 and 27: 1..64 nodes, chains, stars, uniform and deep ones, each against decode or fresh forwards."""
    target, verifier, accepted = tiny_float64(DENSE), Verifier(Sampling()), []
    for seed in range(200):
        context, drafted = random_case(target, seed, 64, 9)
        session = started(target, context, 80)
        logits = session.forward(drafted)[0]
        wide = 3 * int(drafted.depths.max()) < len(leaves(drafted))  # then few steps; else few rows: the cheaper twin
        expected = (naive_logits if wide else brute_logits)(target, context, drafted)
        assert relative(logits, expected) < EXACT, f"tree {seed}"
        verdict = verifier.verify(drafted, logits)
        assert (verdict.path, verdict.bonus) == walk(drafted, expected)
        accepted.append(len(verdict.path))
        if seed % 5 == 0:
            session.commit(verdict.path)
            text = torch.cat([context, drafted.token_ids[verdict.path], torch.tensor([verdict.bonus])])
            following = session.forward(tree([verdict.bonus], [-1]))[0][0]
            assert relative(following, plain_logits(target, text)[-1]) < EXACT
    assert max(accepted) >= 5 and accepted.count(1) < 150, "the trees must be accepted now and then"


@pytest.mark.parametrize("arch", HYBRIDS)
def test_float32_trees_round_no_worse_than_decode_token_by_token(arch, record_property):
    """The truth is the float64 model. Median over the trees; one model's error varies fivefold from text to text."""
    target, exact = tiny(arch), tiny_float64(arch)
    errors = {name: [] for name in ("tree", "decode", "apart", "state", "decoded state", "state apart")}
    for seed in range(12):
        context, drafted = random_case(target, 100 + seed, 24, 12, hit_rate=0)
        session = started(target, context)
        logits, decoded = session.forward(drafted)[0], naive_logits(target, context, drafted)
        path = path_to(len(drafted) - 1, drafted.parents)
        session.commit(path)
        text = torch.cat([context, drafted.token_ids[path]])
        state, decoded_state = session_state(session), decode_state(target, text, len(context))
        with everything_in_float64():
            truth, true_state = brute_logits(exact, context, drafted), decode_state(exact, text, len(context))
        errors["tree"].append(relative(logits, truth))
        errors["decode"].append(relative(decoded, truth))
        errors["apart"].append(relative(logits, decoded))
        errors["state"].append(worst(state, true_state))
        errors["decoded state"].append(worst(decoded_state, true_state))
        errors["state apart"].append(worst(state, decoded_state))
    found = {name: median(values) for name, values in errors.items()}
    record_property("float32", str(found))
    print(arch, {name: f"{value:.1e}" for name, value in found.items()})
    assert found["tree"] < 1.5 * found["decode"] and found["state"] < 1.5 * found["decoded state"]
    assert found["apart"] < 3e-6 and found["state apart"] < 3e-6


@pytest.mark.parametrize("arch", HYBRIDS)
def test_bfloat16_trees_are_within_twice_the_error_of_the_librarys_own_forward(arch, record_property):
    """The truth is float32 with the same rounded weights. Top-1 agreement is reported, not promised."""
    half = tiny(arch, dtype=torch.bfloat16)
    truth_model = tiny(arch, seed=0, tied=True, kv=2)  # a copy of its own: its weights are rounded here
    with torch.no_grad():
        for rounded, parameter in zip(half.model.parameters(), truth_model.model.parameters(), strict=True):
            parameter.copy_(rounded)
    tree_errors, forward_errors, agree, count = [], [], 0, 0
    for seed in range(20):
        context, drafted = random_case(truth_model, 200 + seed, 24, 30, hit_rate=0)
        logits = started(half, context).forward(drafted)[0]
        truth = brute_logits(truth_model, context, drafted)
        tree_errors.append(relative(logits, truth))
        forward_errors.append(relative(brute_logits(half, context, drafted), truth))
        agree += int((logits.argmax(-1) == truth.argmax(-1)).sum())
        count += len(drafted)
    found = f"tree {median(tree_errors):.4f}, library {median(forward_errors):.4f}, top-1 {agree}/{count}"
    record_property("bfloat16", found)
    print(arch, found)
    assert median(tree_errors) < 2 * median(forward_errors)
    assert sum(tree_errors) < 2 * sum(forward_errors)
    assert agree / count > 0.6


@pytest.mark.parametrize("arch", HYBRIDS)
def test_every_node_of_a_tree_equals_a_plain_forward_of_its_path(arch):
    """Traps 26 and 27: context 7, parents [-,0,0,1,1,2]: logits and features, whatever the kinds of the layers."""
    target, context = tiny(arch), random_ids(7, 2)
    drafted = tree(random_ids(6, 3), BRANCHING)
    logits, features = started(target, context, features=FeatureSpec((0, 1, 2), True)).forward(drafted)
    for node in range(6):
        text = torch.cat([context, drafted.token_ids[path_to(node, drafted.parents)]])
        assert (logits[node] - plain_logits(target, text)[-1]).abs().max() < 1e-4
        captured = target.capture(text[None], (0, 1, 2), last_hidden=True)
        assert (features.hidden[node] - captured.hidden[0, -1]).abs().max() < 1e-4
        assert (features.last_hidden[node] - captured.last_hidden[0, -1]).abs().max() < 1e-4


@pytest.mark.parametrize("arch", HYBRIDS)
def test_without_the_op_branch_nodes_are_far_off(arch):
    """Trap 26: the library's own forward over the flattened tree, with the right attention mask and positions."""
    target, context = tiny(arch), random_ids(7, 2)
    drafted = tree(random_ids(6, 3), BRANCHING)
    ids, count = torch.cat([context, drafted.token_ids]), 7 + 6
    sees = torch.ones(count, count).tril().bool()
    sees[7:, 7:] = ancestor_mask(drafted.parents)
    mask = torch.zeros(1, 1, count, count).masked_fill_(~sees, float("-inf"))
    positions = torch.cat([torch.arange(7), 7 + drafted.depths])
    with torch.no_grad():
        masks = {"full_attention": mask, "linear_attention": None}
        out = target.model(input_ids=ids[None], position_ids=positions[None], attention_mask=masks, use_cache=False)
    flat = out.logits[0, 7:]
    off = (flat - brute_logits(target, context, drafted)).abs().amax(-1)
    print(arch, "flattened", off.tolist())
    assert off[:2].max() < 1e-4, "the root and its first child are a chain still"
    assert off[2:].min() > 0.1


@pytest.mark.parametrize("part", ("ancestors", "windows"))
def test_a_flat_order_in_the_recurrence_or_in_the_convolution_alone_is_far_off(part, monkeypatch):
    """Trap 26: each half of the op is needed by itself, and the tests above see it."""
    target, context, drafted = tiny(DENSE), random_ids(7, 2), tree(random_ids(6, 3), BRANCHING)
    right = started(target, context).forward(drafted)[0]
    chain, session = torch.arange(6) - 1, started(target, context)
    flat = {"ancestors": ancestor_mask(chain), "windows": conv_windows(chain, 4)}[part]
    of = lambda parents, width: replace(TreeShape(ancestor_mask(parents), conv_windows(parents, width)), **{part: flat})
    monkeypatch.setattr(qwen3_5.TreeShape, "of", of)
    off = (session.forward(drafted)[0] - right).abs().amax(-1)
    print(part, off.tolist())
    assert off[:2].max() == 0 and off[2:].min() > 0.1


@pytest.mark.parametrize("arch", HYBRIDS)
def test_prompts_of_any_length_give_the_state_and_logits_of_decode(arch, float64):
    """Shorter than the convolution, around a chunk of 64 and beyond two of them; then a tree on top."""
    target = tiny_float64(arch)
    for length in (1, 2, 3, 63, 64, 65, 130) if arch == DENSE else (1, 3, 65):
        ids, drafted = random_ids(length, length), random_tree(6, length)
        session = target.session(200, FeatureSpec((0, 1), True))
        logits, features = session.prefill(ids)
        assert relative(logits, plain_logits(target, ids)[-1]) < EXACT
        captured = target.capture(ids[None], (0, 1), last_hidden=True)
        assert relative(features.hidden, captured.hidden[0]) < EXACT
        assert relative(features.last_hidden, captured.last_hidden[0]) < EXACT
        assert worst(session_state(session), decode_state(target, ids, 1)) < EXACT
        assert relative(session.forward(drafted)[0], brute_logits(target, ids, drafted)) < EXACT


def test_a_width_one_tree_equals_the_chain_taken_node_by_node(float64):
    """Trap 27: a chain in one pass, a chain in single rounds, a chain as prompt: one result and one state."""
    target, context, ids = tiny_float64(DENSE), random_ids(11, 4), random_ids(9, 5)
    at_once, by_node, as_prompt = (started(target, context) for _ in range(3))
    chain = tree(ids, list(range(-1, 8)))
    together = at_once.forward(chain)[0]
    at_once.commit(list(range(9)))
    assert relative(together, logits_after(by_node, ids.tolist())) < EXACT
    as_prompt = started(target, torch.cat([context, ids]))
    assert worst(session_state(at_once), session_state(by_node)) < EXACT
    assert worst(session_state(at_once), session_state(as_prompt)) < EXACT


def test_padding_nodes_under_the_root_change_nothing(float64):
    target, context = tiny_float64(DENSE), random_ids(10, 6)
    drafted = tree(random_ids(6, 3), BRANCHING)
    padded = tree([*drafted.token_ids.tolist(), *[0] * 10], [*BRANCHING, *[0] * 10])
    plain, with_padding = started(target, context), started(target, context)
    assert relative(with_padding.forward(padded)[0][:6], plain.forward(drafted)[0]) < EXACT
    for session in (plain, with_padding):
        session.commit([0, 2, 5])
    assert worst(session_state(with_padding), session_state(plain)) < EXACT
