"""Chains and best-first trees, against brute force."""

import itertools
import random

import pytest
import torch
from helpers_decode import random_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.decode.tree import build_ddtree, chain_tree, check_tree, is_chain, limit_depth
from dflash_train.records import Tree


def brute_force(logits: torch.Tensor, budget: int) -> list[tuple[int, ...]]:
    """The most probable prefixes by listing every one of them: score, then rank tuple."""
    log_probs = logits.float() - logits.float().logsumexp(-1, keepdim=True)
    ranked = [sorted(range(len(row)), key=lambda t: (-row[t], t)) for row in logits.float().tolist()]
    prefixes = []
    for depth in range(1, len(logits) + 1):
        for ranks in itertools.product(range(logits.shape[1]), repeat=depth):
            tokens = tuple(ranked[d][r] for d, r in enumerate(ranks))
            score = 0.0
            for d, token in enumerate(tokens):
                score += log_probs[d, token].item()
            prefixes.append((-score, ranks, tokens))
    return [tokens for _, _, tokens in sorted(prefixes)[:budget]]


def prefixes_of(tree: Tree) -> list[tuple[int, ...]]:
    """Every node's tokens from below the root, in node order."""
    paths = [()]
    for i in range(1, len(tree)):
        paths.append((*paths[tree.parents[i]], int(tree.token_ids[i])))
    return paths[1:]


def random_logits(seed: int, num_depths: int, vocab_size: int, scale: float) -> torch.Tensor:
    return torch.randn(num_depths, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4), st.integers(2, 5), st.sampled_from([0.1, 1.0, 5.0]), st.integers(1, 60))
def test_the_best_first_tree_is_brute_forces_most_probable_prefixes(seed, num_depths, vocab_size, scale, budget):
    """Trap 29: the built tree equals brute force's M most probable prefixes, in their order."""
    logits = random_logits(seed, num_depths, vocab_size, scale)
    tree = build_ddtree(3, logits, budget)
    check_tree(tree)
    assert prefixes_of(tree) == brute_force(logits, budget)


def test_equal_logits_are_taken_by_token_id_and_rank():
    logits = torch.zeros(3, 4)
    tree = build_ddtree(0, logits, 20)
    assert prefixes_of(tree) == brute_force(logits, 20)
    assert prefixes_of(tree)[:5] == [(0,), (1,), (2,), (3,), (0, 0)]


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_a_smaller_budget_builds_the_beginning_of_a_larger_ones_tree(seed, small, more):
    logits = random_logits(seed, 5, 9, 2.0)
    a, b = build_ddtree(1, logits, small), build_ddtree(1, logits, small + more)
    assert torch.equal(a.token_ids, b.token_ids[: len(a)]) and torch.equal(a.parents, b.parents[: len(a)])


def test_a_budget_above_the_number_of_prefixes_gives_all_of_them():
    tree = build_ddtree(0, random_logits(0, 2, 3, 1.0), 100)
    assert tree.num_draft_nodes == 3 + 9 and len(set(prefixes_of(tree))) == 12


def test_impossible_tokens_are_never_drafted():
    logits = torch.tensor([[0.0, float("-inf"), 1.0], [float("-inf"), 0.0, float("-inf")]])
    assert set(prefixes_of(build_ddtree(0, logits, 50))) == {(2,), (0,), (2, 1), (0, 1)}


def test_nan_logits_are_not_drafted_from():
    with pytest.raises(AssertionError, match="not finite"):
        build_ddtree(0, torch.tensor([[0.0, float("nan")]]), 2)


def test_scores_use_the_whole_vocabulary_not_the_kept_top():
    """Slot 1: 0.8 and 0.1; slot 2 flat over 50 tokens. Renormalised over the top 2, slot 2 would look like a coin flip
    and its token would come before slot 1's second one."""
    first = torch.full((1, 50), 0.1 / 48).log()
    first[0, :2] = torch.tensor([0.8, 0.1]).log()
    assert prefixes_of(build_ddtree(0, torch.cat([first, torch.zeros(1, 50)]), 2)) == [(0,), (1,)]


def test_budget_512_over_a_large_vocabulary_is_taken_from_the_top_k_alone():
    logits = random_logits(0, 15, 50_000, 3.0)
    tree = build_ddtree(0, logits, 512)
    check_tree(tree, 50_000)
    top = [set(row.topk(512).indices.tolist()) for row in logits]
    assert len(tree) == 513 and int(tree.depths.max()) > 1
    assert all(t in top[d - 1] for t, d in zip(tree.token_ids[1:].tolist(), tree.depths[1:].tolist()))


def test_a_chain_is_a_tree_of_width_one():
    tree = chain_tree(5, [7, 8, 9])
    check_tree(tree, 10)
    assert is_chain(tree) and tree.num_draft_nodes == 3
    assert tree.parents.tolist() == [-1, 0, 1, 2] and tree.depths.tolist() == [0, 1, 2, 3]
    assert len(chain_tree(5, [])) == 1 and is_chain(chain_tree(5, []))


@given(st.integers(0, 10_000), st.integers(1, 25), st.integers(0, 6))
@settings(max_examples=60, deadline=None)
def test_limiting_the_depth_keeps_exactly_the_shallow_prefixes(seed, num_nodes, max_depth):
    tree = random_tree(random.Random(seed), 3, num_nodes, 9)
    limited = limit_depth(tree, max_depth)
    check_tree(limited)
    assert prefixes_of(limited) == [path for path in prefixes_of(tree) if len(path) <= max_depth]


def test_limiting_the_depth_keeps_each_nodes_draft_distribution():
    probs = torch.rand(4, 5)
    limited = limit_depth(chain_tree(1, [2, 3, 4], probs), 2)
    assert torch.equal(limited.draft_probs, probs[:3])


@pytest.mark.parametrize(
    ("tokens", "parents", "depths", "reason"),
    [
        ([0, 1], [-1, 1], [0, 1], "come before"),
        ([0, 1], [0, 0], [0, 1], "root"),
        ([0, 1, 2], [-1, 0, 1], [0, 1, 1], "depth"),
        ([0, 1, 1], [-1, 0, 0], [0, 1, 1], "siblings"),
        ([0, 99], [-1, 0], [0, 1], "vocabulary"),
    ],
)
def test_malformed_trees_are_refused(tokens, parents, depths, reason):
    with pytest.raises(AssertionError, match=reason):
        check_tree(Tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths)), vocab_size=50)
