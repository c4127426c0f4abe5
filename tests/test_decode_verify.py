"""The accept rules: greedy walks against an independent one, and output laws against exact enumeration."""

import itertools
import math
import random

import pytest
import torch
from helpers_decode import Recording, TableTarget, random_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.decode.autoregressive import Proposer as Autoregressive
from dflash_train.decode.generate import generate
from dflash_train.decode.tree import build_ddtree, chain_tree
from dflash_train.decode.verify import Sampling, Verifier, draw, follow, processed_probs
from dflash_train.records import Tree

PROMPT = [1, 2]


def independent_walk(tree: Tree, tokens: list[int]) -> tuple[list[int], int]:
    """The accepted path, by looking for children one by one."""
    path = [0]
    while True:
        wanted = tokens[path[-1]]
        found = [i for i in range(len(tree)) if tree.parents[i] == path[-1] and tree.token_ids[i] == wanted]
        if not found:
            return path, wanted
        path.append(found[0])


def test_the_accepted_path_of_200_random_trees_equals_an_independent_walk():
    """Trap 27: 200 random trees: accepted path equals an independent walk."""
    rng, lengths = random.Random(0), []
    for seed in range(200):
        tree = random_tree(rng, 0, rng.randint(1, 30), 4)
        logits = torch.randn(len(tree), 4, generator=torch.Generator().manual_seed(seed))
        verdict = Verifier(Sampling()).verify(tree, logits)
        assert (verdict.path, verdict.bonus) == independent_walk(tree, logits.argmax(-1).tolist())
        lengths.append(len(verdict.path))
    assert max(lengths) >= 4, "the trees were too poor to test a walk"


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_acceptance_never_falls_with_the_budget_from_the_same_state(seed, small, more):
    """Trap 29: from the same root, context and draft logits a larger budget accepts at least as much."""
    generator = torch.Generator().manual_seed(seed)
    draft_logits = torch.randn(4, 6, generator=generator)
    target = TableTarget(6, seed=seed, scale=1.0)
    verdicts = []
    for budget in (small, small + more):
        tree = build_ddtree(2, draft_logits, budget)
        paths = [[2]]
        for i in range(1, len(tree)):
            paths.append([*paths[tree.parents[i]], int(tree.token_ids[i])])
        verdicts.append(follow(tree, [int(target.logits(path).argmax()) for path in paths]))
    assert len(verdicts[1].path) >= len(verdicts[0].path)


@given(st.integers(0, 10_000), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_a_tree_that_contains_the_chain_accepts_at_least_as_much(seed, chain_length):
    """Trap 29: branches added to a chain never shorten what is accepted."""
    rng = random.Random(seed)
    target = TableTarget(5, seed=seed)
    chain = [rng.randrange(5) for _ in range(chain_length)]
    tokens, parents = [0, *chain], list(range(-1, chain_length))
    for _ in range(rng.randint(1, 12)):
        parent, token = rng.randrange(len(tokens)), rng.randrange(5)
        if (parent, token) not in set(zip(parents, tokens)):
            tokens.append(token)
            parents.append(parent)
    depths, paths = [0], [[0]]
    for token, parent in zip(tokens[1:], parents[1:]):
        depths.append(depths[parent] + 1)
        paths.append([*paths[parent], token])
    tree = Tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths))
    on_tree = follow(tree, [int(target.logits(path).argmax()) for path in paths])
    chain_tokens = [int(target.logits([0, *chain[:i]]).argmax()) for i in range(chain_length + 1)]
    on_chain = follow(chain_tree(0, chain), chain_tokens)
    assert len(on_tree.path) >= len(on_chain.path)
    assert on_tree.path[: len(on_chain.path)] == on_chain.path


# ---------------------------------------------------------------- processed distributions


def naive_probs(logits: list[float], sampling: Sampling) -> list[float]:
    """Temperature, top_k, top_p on plain lists."""
    weights = [math.exp(x / sampling.temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    order = order[: sampling.top_k] if sampling.top_k else order
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= sampling.top_p:
            break
        kept.append(i)
        mass += weights[i] / total
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.7), Sampling(1.0, 0.8), Sampling(1.3, 1.0, 3), Sampling(0.9, 0.7, 5), Sampling(1, 0.01)],
)
def test_processed_distribution_equals_the_list_version(sampling):
    logits = torch.randn(20, 9, generator=torch.Generator().manual_seed(1)) * 2
    expected = torch.tensor([naive_probs(row, sampling) for row in logits.double().tolist()], dtype=torch.float64)
    torch.testing.assert_close(processed_probs(logits, sampling), expected, rtol=1e-9, atol=1e-12)


def test_processed_distribution_equals_hugging_faces_processors():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(30, 50, generator=torch.Generator().manual_seed(2)) * 2
    scores = logits.double()
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8)):
        scores = warper(None, scores)
    torch.testing.assert_close(processed_probs(logits, Sampling(0.7, 0.8, 20)), scores.softmax(-1))


def test_draws_never_hit_a_token_of_probability_zero_even_at_the_edges():
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    edges = [0.0, 0.4999999, 0.5, 1 - 2**-53]
    assert [int(draw(probs, torch.tensor([u], dtype=torch.float64))) for u in edges] == [1, 1, 3, 3]


def test_the_same_seed_repeats_and_another_does_not():
    logits = torch.zeros(64, 50)
    draws = [Verifier(Sampling(1.0), seed=seed).choose(logits) for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]


# ---------------------------------------------------------------- output laws

VOCAB, NUM_TOKENS = 4, 3


class Drafts(Recording):
    """Offers a chain or a best-first tree from fixed draft logits; with `sampling`, a chain drawn from them."""

    def __init__(self, kind, sampling=None):
        super().__init__()
        self.kind, self.sampling = kind, sampling
        self.logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(9))
        self.rng = torch.Generator().manual_seed(10)

    def draft(self, root, text):
        if self.kind == "tree":
            return build_ddtree(root, self.logits, 6)
        if self.kind == "chain":
            return chain_tree(root, self.logits.argmax(-1).tolist())
        probs = processed_probs(self.logits, self.sampling)
        tokens = draw(probs, torch.rand(len(probs), generator=self.rng, dtype=torch.float64)).tolist()
        return chain_tree(root, tokens, torch.cat([torch.zeros(1, VOCAB, dtype=torch.float64), probs]))


def exact_law(target: TableTarget, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of PROMPT by NUM_TOKENS tokens."""
    law = {}
    for tokens in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        probability = 1.0
        for i, token in enumerate(tokens):
            probability *= naive_probs(target.logits([*PROMPT, *tokens[:i]]).tolist(), sampling)[token]
        law[tokens] = probability
    return law


def chi_square_z(counts: dict, law: dict, total: int) -> float:
    """Normal score of Pearson's statistic (Wilson-Hilferty), small cells merged; inf where the law is 0."""
    if any(law[cell] == 0 for cell in counts):
        return math.inf
    cells, rest = [], [0.0, 0.0]
    for cell, probability in law.items():
        observed, expected = counts.get(cell, 0), probability * total
        if expected >= 5:
            cells.append((observed, expected))
        else:
            rest = [rest[0] + observed, rest[1] + expected]
    if rest[1] > 0:
        cells.append(tuple(rest))
    statistic, freedom = sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def sample_counts(proposer, verifier, target, total) -> tuple[dict, float]:
    """Counts of the first NUM_TOKENS tokens, and the mean accepted length over the rounds."""
    counts, rounds = {}, []
    for _ in range(total):
        answer = generate(target, proposer, verifier, PROMPT, NUM_TOKENS + 1)
        tokens = tuple(answer.token_ids[:NUM_TOKENS])
        counts[tokens] = counts.get(tokens, 0) + 1
        rounds += answer.round_lengths
    return counts, sum(rounds) / max(len(rounds), 1)


PLAIN, CUT = Sampling(0.9), Sampling(1.2, 0.9, 3)


@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["temperature", "top_p_top_k"])
@pytest.mark.parametrize("kind", ["autoregressive", "chain", "tree", "rejection"])
def test_the_output_law_at_temperature_is_the_targets(kind, sampling):
    target = TableTarget(VOCAB, seed=3, order=3, scale=1.0)
    proposer = Autoregressive() if kind == "autoregressive" else Drafts(kind, sampling)
    verifier = Verifier(sampling, accept="rejection" if kind == "rejection" else "sample", seed=1)
    counts, length = sample_counts(proposer, verifier, target, 700)
    assert chi_square_z(counts, exact_law(target, sampling), 700) < 3.5
    assert (length == 1) == (kind == "autoregressive"), "drafts must have been accepted for this to mean anything"


def test_the_chi_square_test_sees_a_rule_that_favours_drafts():
    """The same sample size finds out a verifier that keeps each first draft with probability 1/3 extra."""

    class Favouring(Verifier):
        def verify(self, tree, logits):
            tokens = self.choose(logits)
            if torch.rand(1, generator=self._generator) < 1 / 3:
                tokens[0] = int(tree.token_ids[1])
            return follow(tree, tokens)

    target = TableTarget(VOCAB, seed=3, order=3, scale=1.0)
    counts, _ = sample_counts(Drafts("chain"), Favouring(PLAIN, seed=1), target, 700)
    assert chi_square_z(counts, exact_law(target, PLAIN), 700) > 4


def test_rejection_with_equal_distributions_keeps_everything():
    """p == q: every draft stays (u q < p), and the residual never matters."""
    sampling = Sampling(1.0)
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    probs = processed_probs(logits, sampling)
    draft_probs = torch.cat([torch.zeros(1, 6, dtype=torch.float64), probs[:3]])
    for seed in range(20):
        uniforms = torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        tokens = draw(probs[:3], uniforms).tolist()
        verdict = Verifier(sampling, "rejection", seed).verify(chain_tree(0, tokens, draft_probs), logits)
        assert verdict.path == [0, 1, 2, 3]


def test_rejection_falls_back_to_the_target_where_the_residual_is_empty():
    """A draft outside p's support with q == p elsewhere leaves max(p - q, 0) empty: the bonus comes from p."""
    logits = torch.tensor([[0.0, float("-inf"), 0.0], [0.0, 0.0, 0.0]])
    draft_probs = torch.tensor([[0.0, 0.0, 0.0], [0.5, 1e-9, 0.5]], dtype=torch.float64)
    tree = chain_tree(0, [1], draft_probs)
    verdicts = [Verifier(Sampling(1.0), "rejection", seed).verify(tree, logits) for seed in range(30)]
    assert {verdict.bonus for verdict in verdicts} == {0, 2} and all(verdict.path == [0] for verdict in verdicts)


def test_rejection_refuses_trees_and_chains_without_probabilities():
    verifier = Verifier(Sampling(1.0), "rejection")
    branching = Tree(torch.tensor([0, 1, 2]), torch.tensor([-1, 0, 0]), torch.tensor([0, 1, 1]), torch.ones(3, 4) / 4)
    for tree in (branching, chain_tree(0, [1, 2])):
        with pytest.raises(AssertionError, match="chain"):
            verifier.verify(tree, torch.zeros(3, 4))
