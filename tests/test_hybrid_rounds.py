"""Verify, commit, verify again on recurrent targets: a rejected draft leaves nothing behind, over 300 rounds."""

import random
from dataclasses import replace

import pytest
import torch
from helpers_decode import tiny_drafter
from helpers_hybrid import (
    DENSE,
    HYBRIDS,
    SHAPES,
    drafted_tree,
    new_cache,
    plain_answer,
    relative,
    session_state,
    started,
    step,
    tree_parents,
    without_stop,
    worst,
)
from helpers_target import plain_logits, random_ids, random_tree, tiny, tree

from dflash_train.decode.autoregressive import Proposer as Autoregressive
from dflash_train.decode.base import DraftSettings
from dflash_train.decode.ddtree import Proposer as DDTree
from dflash_train.decode.dflash import Proposer as DFlash
from dflash_train.decode.generate import generate
from dflash_train.decode.tree import build_ddtree, chain_tree
from dflash_train.decode.verify import Sampling, Verifier
from dflash_train.records import FeatureSpec
from dflash_train.util.errors import UserError

BRANCHING = [-1, 0, 0, 1, 1, 2]
PROMPTS = ([20, 31, 9], [41, 17, 25, 33, 12, 8, 29], list(range(10, 46)))


class Oracle:
    """Knows the answer and drafts it with seeded mistakes, as a chain, a best-first tree or a random tree."""

    features, max_nodes = FeatureSpec(), 48

    def __init__(self, kind: str, prompt: list[int], answer: list[int], seed: int):
        self.name, self.kind, self.rng = kind, kind, random.Random(seed)
        self.text, self.generator = [*prompt, *answer], torch.Generator().manual_seed(seed)

    def start(self, token_ids, features) -> None:
        pass

    def commit(self, token_ids, features) -> None:
        pass

    def propose(self, root: int, position: int):
        assert self.text[position] == root, "the answer left the known one"
        following = self.text[position + 1 : position + 8]
        if self.kind == "random":
            shape, num_nodes = self.rng.choice(SHAPES), self.rng.randint(1, 40)
            return drafted_tree(root, following, tree_parents(shape, num_nodes, self.rng), 0.55, self.rng)
        logits = torch.randn(max(1, len(following)), 128, generator=self.generator)
        certainty = self.rng.choice((2.0, 2.0, 2.0, 5.0))
        for row, token in zip(logits, following):
            row[token] += certainty
        if self.kind == "ddtree":
            return build_ddtree(root, logits, self.rng.choice((8, 24, 47)))
        return chain_tree(root, logits.argmax(-1).tolist())


@pytest.mark.parametrize("kind", ("chain", "ddtree", "random"))
def test_a_hundred_rounds_each_give_the_tokens_of_plain_decode(kind):
    """Traps 25 and 28: 300 rounds in all; chains, best-first and random trees that are rejected at every depth."""
    target, rounds, lengths = without_stop(tiny(DENSE)), 0, []
    for seed, prompt in enumerate(PROMPTS):
        answer = plain_answer(target, tuple(prompt), 120)
        assert len(set(answer)) > 20, "an answer that repeats itself tells little"
        oracle = Oracle(kind, prompt, answer, seed)
        result = generate(target, oracle, Verifier(Sampling()), prompt, 120)
        assert result.token_ids == answer
        rounds, lengths = rounds + len(result.round_lengths), lengths + result.round_lengths
    print(kind, rounds, "rounds of", sum(lengths) / rounds, "tokens")
    assert rounds >= 100 and min(lengths) == 1 and max(lengths) >= 5


@pytest.mark.parametrize("arch", HYBRIDS)
def test_a_drafter_on_captured_rows_leaves_the_answer_as_it_is(arch):
    """With the proposers that read features, and with none."""
    target = without_stop(tiny(arch))
    prompt = PROMPTS[1]
    answer = plain_answer(target, tuple(prompt), 40)
    drafter, head = tiny_drafter(target, intermediate_size=128), target.head()
    for proposer in (Autoregressive(), DFlash(drafter, head, DraftSettings()), DDTree(drafter, head, DraftSettings())):
        assert generate(target, proposer, Verifier(Sampling()), prompt, 40).token_ids == answer


def test_cropping_keys_and_values_alone_does_not_take_rejected_drafts_back():
    """Trap 25: five rejected drafts, then the library's cache cut back to the prompt: far off. Ours: as if never."""
    target, context, rejected = tiny(DENSE), random_ids(12, 3), random_ids(5, 4)
    cache = new_cache(target.model)
    step(target.model, context[None], cache)
    for token_id in rejected:
        step(target.model, token_id.view(1, 1), cache)
    for layer in (cache.layers[i] for i in target.attention_layers):
        layer.keys, layer.values = layer.keys[:, :, :12], layer.values[:, :, :12]
    expected = plain_logits(target, torch.cat([context, torch.tensor([30])]))[-1]
    cropped = step(target.model, torch.tensor([[30]]), cache)[0, -1]
    session = started(target, context)
    session.forward(tree(rejected, list(range(-1, 4))))
    ours = session.forward(tree([30], [-1]))[0][0]
    print("cropped", float((cropped - expected).abs().max()))
    assert (cropped - expected).abs().max() > 0.1
    assert (ours - expected).abs().max() < 1e-4


@pytest.mark.parametrize("arch", HYBRIDS)
def test_after_accepting_a_branch_the_next_step_equals_a_fresh_forward_of_the_text(arch):
    """Traps 25 and 28: nodes [0,2,5] of [-,0,0,1,1,2], then a tree on top, again and again beyond a chunk of 64."""
    target, text = tiny(arch), random_ids(7, 2)
    session = started(target, text, 120)
    for round_ in range(22):
        drafted = tree(random_ids(6, 300 + round_), BRANCHING)
        logits = session.forward(drafted)[0]
        along = plain_logits(target, torch.cat([text, drafted.token_ids[[0, 2, 5]]]))[-3:]
        assert relative(logits[[0, 2, 5]], along) < 1e-4
        session.commit([0, 2, 5])
        text = torch.cat([text, drafted.token_ids[[0, 2, 5]]])
        assert session.length == len(text)
    assert len(text) > 64


def test_forward_before_commit_changes_nothing():
    """Bit for bit: the state, and whatever is verified and committed next."""
    target, context = tiny(DENSE), random_ids(9, 7)
    session, clean = started(target, context), started(target, context)
    before = {name: value.clone() for name, value in session_state(session).items()}
    for seed in range(3):
        session.forward(random_tree(9, seed))
    assert worst(session_state(session), before) == 0 and session.length == 9
    drafted = tree(random_ids(6, 8), BRANCHING)
    assert torch.equal(session.forward(drafted)[0], clean.forward(drafted)[0])
    for one in (session, clean):
        one.commit([0, 2, 5])
    assert worst(session_state(session), session_state(clean)) == 0


def test_a_commit_that_is_no_path_of_the_last_tree_is_refused_and_changes_nothing():
    target = tiny(DENSE)
    session = started(target, random_ids(5, 12))
    with pytest.raises(AssertionError, match="without a forward"):
        session.commit([0])
    session.forward(tree(random_ids(6, 3), BRANCHING))
    before = {name: value.clone() for name, value in session_state(session).items()}
    for bad in ([], [1], [0, 5], [0, 2, 3], [0, 1, 2]):
        with pytest.raises(AssertionError, match="path"):
            session.commit(bad)
    assert worst(session_state(session), before) == 0
    session.commit([0, 2, 5])
    with pytest.raises(AssertionError, match="without a forward"):
        session.commit([0])


def test_a_full_cache_is_a_clear_error_and_the_session_stays_usable():
    target, ids = tiny(DENSE), random_ids(10, 11)
    with pytest.raises(UserError, match="0 committed rows \\+ 10 new"):
        target.session(9, FeatureSpec()).prefill(ids)
    session = started(target, ids, 12)
    with pytest.raises(UserError, match="10 committed rows \\+ 3 new"):
        session.forward(random_tree(3, 1))
    logits = session.forward(tree([30], [-1]))[0][0]
    assert (logits - plain_logits(target, torch.cat([ids, torch.tensor([30])]))[-1]).abs().max() < 1e-4


def test_sessions_do_not_see_each_other_and_plain_calls_stay_plain():
    target, a, b = tiny(DENSE), random_ids(8, 13), random_ids(12, 14)
    plain = plain_logits(target, b)
    first, second = started(target, a), started(target, b)
    drafted = tree(random_ids(6, 8), BRANCHING)
    alone = started(target, a).forward(drafted)[0]
    first.forward(random_tree(5, 1))
    second.forward(drafted)
    second.commit([0, 1, 3])
    assert torch.equal(first.forward(drafted)[0], alone)
    with pytest.raises(IndexError):
        first.forward(replace(drafted, token_ids=torch.full((6,), 9999)))
    assert torch.equal(plain_logits(target, b), plain), "the layers are the library's again, after an error too"
