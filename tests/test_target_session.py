"""Decoding through our own cache: any tree, in one pass, gives each node the logits of a plain forward of its path."""

import pytest
import torch
from helpers_target import (
    one_thread,  # noqa: F401
    path_to,
    plain_hidden,
    plain_logits,
    random_ids,
    random_tree,
    tiny,
    tree,
)

from dflash_train.records import FeatureSpec
from dflash_train.target.attention import KVCache, ancestor_mask, attention_by_session, tree_bias
from dflash_train.target.base import hf_index
from dflash_train.util.errors import UserError

ARCHS = ("qwen3", "llama")
ALL = FeatureSpec((0, 1), last_hidden=True)


def started(target, ids, capacity=200, features=ALL):
    session = target.session(capacity, features)
    session.prefill(ids)
    return session


def check_nodes(target, context, drafted, logits, tolerance=1e-4):
    for node in range(len(drafted)):
        text = torch.cat([context, drafted.token_ids[path_to(node, drafted.parents)]])
        assert (logits[node] - plain_logits(target, text)[-1]).abs().max() < tolerance


@pytest.mark.parametrize("arch", ARCHS)
def test_prefill_gives_the_last_logits_and_the_rows_of_capture(arch):
    target, ids = tiny(arch), random_ids(21, 1)
    session = target.session(64, ALL)
    logits, features = session.prefill(ids)
    assert session.length == 21 and logits.dtype == torch.float32 and logits.shape == (128,)
    assert (logits - plain_logits(target, ids)[-1]).abs().max() < 1e-5
    captured = target.capture(ids[None], (0, 1), True)
    assert torch.equal(features.hidden, captured.hidden[0])
    assert torch.equal(features.last_hidden, captured.last_hidden[0])


@pytest.mark.parametrize("arch", ARCHS)
def test_every_node_of_a_tree_equals_a_plain_forward_of_its_path(arch):
    """Traps 26 and 27: context 7, parents [-,0,0,1,1,2], depths [0,1,1,2,2,2]: logits and features of each node."""
    target, context = tiny(arch), random_ids(7, 2)
    drafted = tree(random_ids(6, 3), [-1, 0, 0, 1, 1, 2])
    assert drafted.depths.tolist() == [0, 1, 1, 2, 2, 2]
    logits, features = started(target, context).forward(drafted)
    check_nodes(target, context, drafted, logits)
    for node in range(6):
        text = torch.cat([context, drafted.token_ids[path_to(node, drafted.parents)]])
        states = plain_hidden(target, text)
        expected = torch.cat([states[hf_index(0)][-1], states[hf_index(1)][-1]])
        assert (features.hidden[node] - expected).abs().max() < 1e-4
        assert (features.last_hidden[node] - states[-1][-1]).abs().max() < 1e-4


def test_positions_by_index_or_a_chain_mask_would_be_far_off():
    """Trap 27: what the test above would miss if positions or ancestors did not matter in this model."""
    target, context = tiny(), random_ids(7, 2)
    drafted = tree(random_ids(6, 3), [-1, 0, 0, 1, 1, 2])
    right = started(target, context).forward(drafted)[0]
    by_index = type(drafted)(drafted.token_ids, drafted.parents, torch.arange(6))
    assert (started(target, context).forward(by_index)[0] - right).abs().max() > 0.1
    chain = tree(drafted.token_ids, [-1, 0, 1, 2, 3, 4])
    assert (started(target, context).forward(chain)[0] - right)[2:].abs().max() > 0.1


@pytest.mark.parametrize("arch", ARCHS)
def test_a_hundred_random_trees_each_agree_path_by_path(arch):
    """Traps 26 and 27: 200 random trees in all, at random context lengths, nodes checked against plain forwards."""
    target = tiny(arch)
    for seed in range(100):
        context = random_ids(1 + seed % 13, seed)
        drafted = random_tree(2 + seed % 11, 1000 + seed)
        logits, _ = started(target, context, 40).forward(drafted)
        check_nodes(target, context, drafted, logits)


def test_a_width_one_tree_equals_the_chain_exactly():
    """Trap 27: ancestors of a chain are the causal mask, its depths are positions; the results are bit-equal."""
    target, context, ids = tiny(), random_ids(11, 4), random_ids(6, 5)
    drafted = tree(ids, list(range(-1, 5)))
    assert torch.equal(ancestor_mask(drafted.parents), torch.ones(6, 6).tril().bool())
    session = started(target, context)
    logits, features = session.forward(drafted)
    causal = torch.full((6, 11 + 6), float("-inf")).triu(12).repeat(session.num_groups, 1)
    assert torch.equal(tree_bias(drafted, 11, session.num_groups, torch.float32, "cpu"), causal)
    with torch.inference_mode():
        normed, chain_features = session._run(ids, torch.arange(11, 17), causal)
    assert torch.equal(target.logits(normed), logits)
    assert torch.equal(chain_features.hidden, features.hidden)


@pytest.mark.parametrize("arch", ARCHS)
def test_any_pattern_of_commits_equals_a_fresh_forward_of_the_text(arch):
    """Trap 28: 12 rounds of random trees and accepted paths, nodes [0,2,5] among them (KV rows and positions)."""
    target, text = tiny(arch), random_ids(5, 6)
    session = started(target, text)
    for round_ in range(12):
        drafted = tree(random_ids(6, 60), [-1, 0, 0, 1, 1, 2]) if round_ == 3 else random_tree(2 + round_, 70 + round_)
        logits, features = session.forward(drafted)
        check_nodes(target, text, drafted, logits)
        path = [0, 2, 5] if round_ == 3 else path_to((7 * round_) % len(drafted), drafted.parents)
        session.commit(path)
        text = torch.cat([text, drafted.token_ids[path]])
        assert session.length == len(text)
        states = plain_hidden(target, text)
        kept = features.select(torch.tensor(path))
        assert (kept.last_hidden - states[-1][-len(path) :]).abs().max() < 1e-4
    assert len(text) > 30


def test_a_forward_without_commit_leaves_nothing_behind():
    target, context = tiny(), random_ids(9, 7)
    session, clean = started(target, context), started(target, context)
    for seed in range(3):
        session.forward(random_tree(9, seed))
    drafted = random_tree(5, 99)
    assert torch.equal(session.forward(drafted)[0], clean.forward(drafted)[0])
    session.commit([0])
    clean.commit([0])
    step = tree([20], [-1])
    assert torch.equal(session.forward(step)[0], clean.forward(step)[0])


def test_step_by_step_equals_the_full_forward():
    """The autoregressive tree: one node a round."""
    target, ids = tiny(), random_ids(30, 8)
    session = started(target, ids[:4])
    rows = []
    for token_id in ids[4:]:
        rows.append(session.forward(tree([int(token_id)], [-1]))[0][0])
        session.commit([0])
    assert (torch.stack(rows) - plain_logits(target, ids)[4:]).abs().max() < 1e-4


def test_poisoned_cache_rows_never_reach_a_result():
    """Rows that were not written yet hold NaN here."""
    target, context = tiny(), random_ids(6, 9)
    session = target.session(64, ALL)
    for buffer in (*session.cache.keys.values(), *session.cache.values.values()):
        buffer.fill_(float("nan"))
    session.prefill(context)
    drafted = random_tree(9, 1)
    logits, features = session.forward(drafted)
    assert logits.isfinite().all() and features.hidden.isfinite().all()
    session.commit(path_to(8, drafted.parents))
    assert session.forward(random_tree(4, 2))[0].isfinite().all()


def test_the_head_sees_only_the_rows_that_are_asked_for():
    target, ids = tiny(), random_ids(19, 10)
    rows = []
    handle = target.lm_head.register_forward_hook(lambda m, args, out: rows.append(args[0].shape[0]))
    session = started(target, ids)
    session.forward(random_tree(5, 1))
    handle.remove()
    assert rows == [1, 5]


def test_a_full_cache_is_a_clear_error_and_the_session_stays_usable():
    target, ids = tiny(), random_ids(10, 11)
    with pytest.raises(UserError, match="0 committed rows \\+ 10 new"):
        target.session(9, ALL).prefill(ids)
    session = started(target, ids, 12)
    with pytest.raises(UserError, match="10 committed rows \\+ 3 new"):
        session.forward(random_tree(3, 1))
    drafted = random_tree(2, 1)
    check_nodes(target, ids, drafted, session.forward(drafted)[0])


def test_a_commit_that_is_no_path_of_the_last_tree_is_refused():
    target = tiny()
    session = started(target, random_ids(5, 12))
    with pytest.raises(AssertionError, match="without a forward"):
        session.commit([0])
    drafted = tree(random_ids(6, 3), [-1, 0, 0, 1, 1, 2])
    for bad in ([], [1], [0, 5], [0, 2, 3]):
        session.forward(drafted)
        with pytest.raises(AssertionError, match="path"):
            session.commit(bad)
    session.commit([0, 2, 5])
    with pytest.raises(AssertionError, match="without a forward"):
        session.commit([0])


def test_sessions_of_one_target_do_not_see_each_other_and_plain_calls_stay_plain():
    target, a, b = tiny(), random_ids(8, 13), random_ids(12, 14)
    first, second = started(target, a), started(target, b)
    drafted = random_tree(4, 3)
    check_nodes(target, a, drafted, first.forward(drafted)[0])
    check_nodes(target, b, drafted, second.forward(drafted)[0])
    before = target.text_config._attn_implementation
    with pytest.raises(RuntimeError), attention_by_session(target.text_config):
        raise RuntimeError
    assert target.text_config._attn_implementation == before == "sdpa"


def test_keep_moves_exactly_the_rows_of_the_path():
    cpu = torch.device("cpu")
    cache = KVCache({3: cpu, 7: cpu}, 3, 4, 10, torch.float32)  # a hybrid's attention layers
    cache.keys[cpu].copy_(torch.arange(10.0)[None, None, :, None].expand(2, 3, 10, 4))
    cache.values[cpu].copy_(-cache.keys[cpu])
    cache.length = 2
    cache.keep([0, 2, 5])
    assert cache.length == 5
    assert cache.keys[cpu][1, 2, :5, 0].tolist() == [0, 1, 2, 4, 7]
    assert torch.equal(cache.values[cpu][:, :, :5], -cache.keys[cpu][:, :, :5])


def test_layers_of_two_devices_keep_their_own_buffers():
    cpu, meta = torch.device("cpu"), torch.device("meta")
    cache = KVCache({0: cpu, 1: meta, 2: cpu}, 1, 2, 8, torch.float32)
    assert cache.keys[cpu].shape[0] == 2 and cache.keys[meta].shape[0] == 1
    rows = torch.randn(1, 3, 2)
    keys, values = cache.write(2, rows, -rows)
    assert torch.equal(keys[0], rows) and torch.equal(values[0], -rows) and keys.device == cpu
    assert cache.write(1, rows.to(meta), rows.to(meta))[0].device == meta
    cache.keep([0, 2])
    assert torch.equal(cache.keys[cpu][1, :, :2], rows[:, [0, 2]])
