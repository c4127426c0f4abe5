"""Chain and tree proposers on a real tiny target: lossless, caches in step, whole blocks after overfitting."""

import pytest
import torch
from helpers_decode import PROMPT_IDS, overfit, tiny_drafter

from dflash_train.decode.autoregressive import Proposer as Autoregressive
from dflash_train.decode.base import DraftSettings
from dflash_train.decode.ddtree import Proposer as DDTree
from dflash_train.decode.dflash import Proposer as DFlash
from dflash_train.decode.generate import generate
from dflash_train.decode.shuffle import ShuffledFeatures
from dflash_train.decode.tree import is_chain
from dflash_train.decode.verify import Sampling, Verifier
from dflash_train.drafter.dflash import DraftCache, draft, extend
from dflash_train.records import FeatureSpec
from dflash_train.target.tiny import make_tiny_target
from dflash_train.util.errors import UserError

NUM_TOKENS = 48


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Models this small only lose by sharing an operation between threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _still_one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target():
    return make_tiny_target()


@pytest.fixture(scope="module")
def head(target):
    return target.head()


@pytest.fixture(scope="module")
def plain(target):
    return generate(target, Autoregressive(), Verifier(Sampling()), PROMPT_IDS, NUM_TOKENS)


@pytest.fixture(scope="module")
def fitted(target, plain):
    """A drafter that has learnt the greedy answer to PROMPT_IDS by heart."""
    return overfit(target, tiny_drafter(target), [*PROMPT_IDS, *plain.token_ids])


def test_greedy_answers_of_chain_and_tree_equal_autoregressive_token_for_token(target, head, plain):
    """Random drafters of every attention pattern: what is drafted never shows in fp32 output."""
    for layer_types, window in [(None, None), (["sliding_attention", "full_attention"], 6)]:
        drafter = tiny_drafter(target, layer_types=layer_types, sliding_window=window)
        for make, settings in [(DFlash, DraftSettings()), (DDTree, DraftSettings(budget=24))]:
            answer = generate(target, make(drafter, head, settings), Verifier(Sampling()), PROMPT_IDS, NUM_TOKENS)
            assert answer.token_ids == plain.token_ids
            assert answer.margins == pytest.approx(plain.margins, abs=1e-3)


def test_after_overfitting_one_sequence_whole_blocks_are_accepted(target, head, plain, fitted):
    """Trap 18: after overfitting one sequence, evaluation accepts whole blocks on it."""
    block_size = fitted.config.block_size
    for make in (DFlash, DDTree):
        proposer = make(fitted, head, DraftSettings(budget=20))
        answer = generate(target, proposer, Verifier(Sampling()), PROMPT_IDS, NUM_TOKENS)
        assert answer.token_ids == plain.token_ids
        assert answer.round_lengths == [block_size] * ((NUM_TOKENS - 1) // block_size)


def test_a_smaller_block_caps_the_draft_and_a_larger_one_is_refused(target, head, plain, fitted):
    """Trap 24: evaluating above the trained B is refused, below works and caps; B counts the anchor."""
    capped = DFlash(fitted, head, DraftSettings(block_size=3))
    answer = generate(target, capped, Verifier(Sampling()), PROMPT_IDS, NUM_TOKENS)
    assert answer.token_ids == plain.token_ids
    assert max(answer.round_lengths) == 3 and set(answer.draft_lengths) == {2}
    for wanted in (1, fitted.config.block_size + 1):
        for make in (DFlash, DDTree):
            with pytest.raises(UserError, match=r"eval\.block_size"):
                make(fitted, head, DraftSettings(block_size=wanted))


def test_drafter_rows_and_positions_stay_in_step_with_the_text(target, head, fitted):
    """Trap 28: after every commit the drafter's rows, and its drafts, equal those of a fresh capture of the text."""
    proposer = DDTree(fitted, head, DraftSettings(budget=20))
    text, checked = [], []
    start, commit, propose = proposer.start, proposer.commit, proposer.propose

    def watched_start(token_ids, features):
        text.clear()
        start(token_ids, features)

    def watched_commit(token_ids, features):
        text.extend(token_ids.tolist())
        commit(token_ids, features)

    def watched_propose(root, position):
        rows = target.capture(torch.tensor([text]), tuple(fitted.config.target_layer_ids)).hidden[0]
        fresh = DraftCache(fitted)
        extend(fitted, fresh, rows, torch.arange(len(text)))
        assert position == len(text) == proposer.cache.length
        for layer in range(fitted.config.num_layers):
            for got, want in zip(proposer.cache.read(layer, 0), fresh.read(layer, 0)):
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        expected = draft(fitted, head, fresh, root, position, fitted.config.block_size)
        torch.testing.assert_close(proposer.draft_logits(root, position), expected, atol=1e-3, rtol=1e-3)
        checked.append(position)
        return propose(root, position)

    proposer.start, proposer.commit, proposer.propose = watched_start, watched_commit, watched_propose
    generate(target, proposer, Verifier(Sampling()), [*PROMPT_IDS, 40], 30)
    assert len(checked) >= 5


def test_chain_and_tree_draft_from_the_same_logits(target, head, fitted):
    """A tree of budget 1 is the chain's start, and a large one holds every slot's best token at its depth."""
    session = target.session(200, FeatureSpec(tuple(fitted.config.target_layer_ids)))
    _, features = session.prefill(torch.tensor(PROMPT_IDS))
    proposals = []
    for make, budget in [(DFlash, 1), (DDTree, 1), (DDTree, 400)]:
        proposer = make(fitted, head, DraftSettings(budget=budget))
        proposer.start(torch.tensor(PROMPT_IDS), features)
        proposals.append(proposer.propose(9, len(PROMPT_IDS)))
    chain, one, many = proposals
    assert is_chain(chain) and len(chain) == fitted.config.block_size and chain.draft_probs is None
    assert one.token_ids.tolist() == chain.token_ids[:2].tolist()
    edges = set(zip(many.depths.tolist(), many.token_ids.tolist()))
    assert set(zip(chain.depths.tolist(), chain.token_ids.tolist())) <= edges


def test_the_proposers_largest_tree_is_what_it_says(target, head, fitted):
    for make, budget, nodes in [(DFlash, 9, fitted.config.block_size), (DDTree, 9, 10)]:
        proposer = make(fitted, head, DraftSettings(budget=budget))
        assert proposer.max_nodes == nodes
        answer = generate(target, proposer, Verifier(Sampling()), PROMPT_IDS, 20)
        assert len(answer.token_ids) == 20


def test_rejection_drafts_are_samples_that_repeat_per_prompt_whatever_came_before(target, head, fitted):
    settings = DraftSettings(accept="rejection", sampling=Sampling(1.0), seed=4)
    proposer = DFlash(fitted, head, settings)
    run = lambda ids: generate(target, proposer, Verifier(Sampling(1.0), "rejection", seed=2), ids, 24).token_ids
    first = run(PROMPT_IDS)
    run(PROMPT_IDS[:4])
    assert run(PROMPT_IDS) == first
    with pytest.raises(UserError, match="rejection"):
        DDTree(fitted, head, settings)


def test_shuffled_rows_keep_the_output_and_destroy_what_was_learnt(target, head, plain, fitted):
    true = generate(target, DFlash(fitted, head, DraftSettings()), Verifier(Sampling()), PROMPT_IDS, NUM_TOKENS)
    wrapped = ShuffledFeatures(DFlash(fitted, head, DraftSettings()), seed=0)
    shuffled = generate(target, wrapped, Verifier(Sampling()), PROMPT_IDS, NUM_TOKENS)
    assert shuffled.token_ids == plain.token_ids
    mean = lambda lengths: sum(lengths) / len(lengths)
    assert mean(shuffled.round_lengths) < 0.7 * mean(true.round_lengths)
    again = generate(target, wrapped, Verifier(Sampling()), PROMPT_IDS, NUM_TOKENS)
    assert again.round_lengths == shuffled.round_lengths, "the shuffle is seeded"


def test_shuffling_gives_rows_that_exist_in_another_order(target, head, fitted):
    """The prompt's rows are a permutation; later rows are drawn from everything seen."""
    received = []

    class Sink:
        name, features, max_nodes = "sink", FeatureSpec((0,)), 1
        start = commit = lambda self, token_ids, features: received.append(features.hidden)

    session = target.session(100, FeatureSpec(tuple(fitted.config.target_layer_ids)))
    _, features = session.prefill(torch.tensor(PROMPT_IDS))
    wrapped = ShuffledFeatures(Sink(), seed=3)
    wrapped.start(torch.tensor(PROMPT_IDS), features)
    assert not torch.equal(received[0], features.hidden)
    assert {tuple(row) for row in received[0].tolist()} == {tuple(row) for row in features.hidden.tolist()}
    wrapped.commit(torch.tensor([1, 2]), features.select(slice(0, 2)))
    assert {tuple(row) for row in received[1].tolist()} <= {tuple(row) for row in features.hidden.tolist()}
