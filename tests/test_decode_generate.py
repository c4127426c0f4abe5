"""The generate loop: what is emitted, and what counts as a round."""

import pytest
from helpers_decode import Knowing, RandomTrees, TableTarget
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.decode.autoregressive import Proposer as Autoregressive
from dflash_train.decode.generate import generate
from dflash_train.decode.verify import Sampling, Verifier

PROMPT = [3, 1, 4]


def greedy() -> Verifier:
    return Verifier(Sampling())


def stop_at(target: TableTarget, index: int) -> TableTarget:
    """The same target with the greedy answer's token `index` as its stop token, which does not occur before."""
    answer = target.greedy(PROMPT, index + 1)
    assert answer[index] not in answer[:index], "pick another seed"
    target.spec.stop_ids = (answer[index],)
    return target


def test_a_perfect_drafter_gives_exactly_the_block_size_per_round():
    """Trap 30: a perfect drafter with B=16 gives 16.0."""
    target = TableTarget(seed=1)
    answer = generate(target, Knowing(target, 15), greedy(), PROMPT, 1 + 16 * 5)
    assert answer.round_lengths == [16] * 5 and answer.token_ids == target.greedy(PROMPT, 81)
    assert target.num_forwards == 5


def test_an_always_wrong_drafter_gives_exactly_one_per_round():
    """Trap 30: an always-wrong drafter gives exactly 1.0."""
    target = TableTarget(seed=1)
    answer = generate(target, Knowing(target, 15, right=lambda i: 0), greedy(), PROMPT, 21)
    assert answer.round_lengths == [1] * 20 and answer.token_ids == target.greedy(PROMPT, 21)


@given(st.integers(0, 10_000), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_greedy_output_never_depends_on_what_is_drafted(seed, max_new_tokens):
    target = TableTarget(seed=seed, stop_ids=(0,))
    plain = generate(target, Autoregressive(), greedy(), PROMPT, max_new_tokens)
    drafted = generate(target, RandomTrees(target, 20, seed), greedy(), PROMPT, max_new_tokens)
    assert drafted.token_ids == plain.token_ids and drafted.stopped_by == plain.stopped_by
    assert drafted.margins == plain.margins


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_only_rounds_that_fit_are_counted_and_the_limit_changes_none_of_them(accepted, max_new_tokens):
    """The counted rounds are those of an unlimited run that end inside the limit; a round cut by it is left out."""
    right = lambda i: accepted[i % len(accepted)]
    target = TableTarget(seed=5)
    answer = generate(target, Knowing(target, 4, right), greedy(), PROMPT, max_new_tokens)
    expected, total = [], 1
    while total + (length := right(len(expected)) + 1) <= max_new_tokens:
        expected.append(length)
        total += length
    assert answer.round_lengths == expected
    assert answer.token_ids == target.greedy(PROMPT, max_new_tokens) and answer.stopped_by == "length"
    assert answer.draft_lengths == [4] * len(expected), "the offered depth is the proposer's, not the limit's"


def test_a_round_ended_by_a_drafted_stop_token_counts_up_to_it():
    target = stop_at(TableTarget(vocab_size=40, seed=2), 3)
    answer = generate(target, Knowing(target, 7), greedy(), PROMPT, 100)
    assert answer.token_ids == target.greedy(PROMPT, 4) and answer.stopped_by == "stop"
    assert answer.round_lengths == [3], "the prefill's token is not of the round; nothing after the stop token is"


def test_a_round_ended_by_a_stop_token_as_bonus_counts_whole():
    target = stop_at(TableTarget(vocab_size=40, seed=2), 3)
    answer = generate(target, Knowing(target, 7, right=lambda i: 2), greedy(), PROMPT, 100)
    assert answer.token_ids == target.greedy(PROMPT, 4) and answer.round_lengths == [3]


def test_a_stop_token_from_the_prefill_ends_without_a_round():
    target = stop_at(TableTarget(vocab_size=40, seed=2), 0)
    answer = generate(target, Knowing(target, 7), greedy(), PROMPT, 100)
    assert len(answer.token_ids) == 1 and answer.round_lengths == [] and answer.stopped_by == "stop"
    assert target.num_forwards == 0 and answer.decode_s == 0.0


def test_a_stop_token_beyond_the_limit_leaves_the_round_cut():
    target = stop_at(TableTarget(vocab_size=40, seed=2), 3)
    answer = generate(target, Knowing(target, 7), greedy(), PROMPT, 3)
    assert answer.token_ids == target.greedy(PROMPT, 3) and answer.stopped_by == "length" and answer.round_lengths == []


def test_a_stop_token_exactly_at_the_limit_stops_and_counts():
    target = stop_at(TableTarget(vocab_size=40, seed=2), 3)
    answer = generate(target, Knowing(target, 7), greedy(), PROMPT, 4)
    assert answer.stopped_by == "stop" and answer.round_lengths == [3]


def test_no_forward_is_spent_on_nodes_that_cannot_be_emitted():
    """With 3 tokens left, at most 3 levels are verified: the third tells a cut round from one that fits."""
    target, sizes = TableTarget(seed=1), []
    session = target.session

    def watched(capacity, features):
        inner = session(capacity, features)
        forward = inner.forward
        inner.forward = lambda tree: (sizes.append(len(tree)), forward(tree))[1]
        return inner

    target.session = watched
    generate(target, Knowing(target, 15), greedy(), PROMPT, 4)
    assert sizes == [4]


def test_the_mask_id_stays_in_the_output_when_the_target_emits_it():
    """Trap 20: a target that emits the mask id itself keeps it in the output."""
    target = TableTarget(vocab_size=8, seed=0)
    mask_id = target.greedy(PROMPT, 6)[4]
    answer = generate(target, Knowing(target, 3), greedy(), PROMPT, 6)
    assert mask_id in answer.token_ids and answer.token_ids == target.greedy(PROMPT, 6)


def test_margins_are_top1_minus_top2_at_every_emitted_token():
    target = TableTarget(seed=7)
    answer = generate(target, Knowing(target, 4, right=lambda i: i % 4), greedy(), PROMPT, 18)
    text, expected = list(PROMPT), []
    for token in answer.token_ids:
        best = target.logits(text).sort(descending=True).values
        expected.append(float(best[0] - best[1]))
        text.append(token)
    assert answer.margins == pytest.approx(expected)


def test_sampled_answers_record_no_margins_and_repeat_with_their_seed():
    target = TableTarget(seed=7)
    run = lambda seed: generate(target, Knowing(target, 4), Verifier(Sampling(1.0), seed=seed), PROMPT, 30)
    assert run(1).margins == [] and run(1).token_ids == run(1).token_ids != run(2).token_ids


def test_times_are_those_of_counted_rounds_and_add_up():
    target = TableTarget(seed=7)
    answer = generate(target, Knowing(target, 4), greedy(), PROMPT, 13)
    assert answer.decode_s == pytest.approx(answer.propose_s + answer.verify_s + answer.commit_s)
    assert answer.decode_s > 0 and answer.prefill_s > 0
    cut = generate(target, Knowing(target, 40), greedy(), PROMPT, 13)
    assert cut.round_lengths == [] and cut.decode_s == 0.0


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        generate(TableTarget(), Autoregressive(), greedy(), [], 5)


def test_the_accepted_rows_reach_the_proposer_in_path_order():
    """Each test proposer asserts that the rows it gets are the next rows of the text; here over branching paths."""
    target = TableTarget(vocab_size=3, seed=11)
    proposer = RandomTrees(target, 25, 3)
    answer = generate(target, proposer, greedy(), PROMPT, 60)
    assert max(answer.round_lengths) >= 3, "no branch was ever followed"
    emitted = [*PROMPT, *answer.token_ids]
    shared = min(len(proposer.text), len(emitted))
    assert shared >= len(emitted) - 1 and proposer.text[:shared] == emitted[:shared]
