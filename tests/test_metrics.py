"""Acceptance, intervals, speed and agreement from known rounds."""

import itertools
import math
import random

import pytest
from helpers_decode import generation
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.bench import metrics
from dflash_train.bench.metrics import MethodResult, PromptResult
from dflash_train.util.errors import UserError


def results(*rounds, task="t") -> list[PromptResult]:
    return [PromptResult(task, str(i), 0, generation(lengths)) for i, lengths in enumerate(rounds)]


def method(name, prompts) -> MethodResult:
    return MethodResult(name, name, {}, prompts)


def test_pooled_acceptance_does_not_depend_on_how_rounds_are_split_over_prompts():
    """Trap 30: runs 3,2,1,0 split (3,1),(2,0): 2.5 with bonus whatever the split."""
    for split in ([[4, 2], [3, 1]], [[4], [3, 2, 1]], [[4, 3, 2, 1]], [[1], [2], [3], [4]]):
        assert metrics.pooled_acceptance(results(*split)) == 2.5


def test_macro_acceptance_is_the_mean_of_the_prompts_own_ratios():
    assert metrics.macro_acceptance(results([4], [3, 2, 1])) == 3.0
    assert metrics.pooled_acceptance(results([4], [3, 2, 1])) == 2.5


@given(st.lists(st.lists(st.integers(1, 16), max_size=9), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_acceptance_by_position_adds_up_to_the_pooled_length(rounds):
    """Trap 30: not a product of marginals: 1 + the sum over positions is the pooled length itself."""
    found = results(*rounds)
    shares, pooled = metrics.acceptance_by_position(found), metrics.pooled_acceptance(found)
    if pooled is None:
        assert shares == [] and metrics.macro_acceptance(found) is None and metrics.pooled_interval(found) is None
        return
    assert 1 + sum(shares) == pytest.approx(pooled)
    assert all(a >= b for a, b in itertools.pairwise(shares))
    assert metrics.pooled_interval(found).low - 1e-9 <= pooled <= metrics.pooled_interval(found).high + 1e-9


def test_positions_reach_to_the_deepest_draft_even_when_nothing_got_there():
    found = [PromptResult("t", "0", 0, generation([2, 1], draft_lengths=[7, 7]))]
    assert metrics.acceptance_by_position(found) == [0.5, 0, 0, 0, 0, 0, 0]


def test_prompts_without_a_round_change_nothing():
    assert metrics.pooled_acceptance(results([4, 2], [])) == metrics.macro_acceptance(results([4, 2], [])) == 3.0


def test_both_turns_of_a_prompt_are_one_unit():
    two_turns = [PromptResult("t", "0", turn, generation(lengths)) for turn, lengths in enumerate([[4], [1, 1, 1]])]
    assert metrics.prompt_counts(two_turns) == {("t", "0"): (7, 4)}
    assert metrics.macro_acceptance(two_turns) == 7 / 4


def test_the_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    """200 draws of 30 prompts whose rounds have mean 2.5: the 95 % interval must miss rarely, but not never."""
    rng, missed = random.Random(0), 0
    for seed in range(200):
        rounds = [[rng.randint(1, 4) for _ in range(rng.randint(3, 12))] for _ in range(30)]
        interval = metrics.pooled_interval(results(*rounds), seed)
        assert interval.low < interval.value < interval.high
        missed += not interval.low <= 2.5 <= interval.high
    assert 0.02 < missed / 200 < 0.11


def test_the_interval_repeats_with_its_seed_and_closes_on_equal_prompts():
    found = results(*[[1 + i % 4, 1 + i % 7, 1 + i % 3] for i in range(40)])
    assert metrics.pooled_interval(found, 1) == metrics.pooled_interval(found, 1) != metrics.pooled_interval(found, 2)
    same = metrics.pooled_interval(results([2, 2], [2, 2]))
    assert (same.low, same.value, same.high) == (2, 2, 2)


def test_a_paired_difference_sees_a_small_gain_that_unpaired_intervals_hide():
    rng = random.Random(1)
    rounds = [[rng.randint(1, 15) for _ in range(5)] for _ in range(40)]
    better = [[length + 1 for length in lengths] for lengths in rounds]
    a, b = method("a", results(*better)), method("b", results(*rounds))
    paired = metrics.paired_difference(a, b)
    assert paired["difference"].value == pytest.approx(1) and paired["difference"].low > 0.99
    assert paired["ratio"].low > 1
    apart = metrics.pooled_interval(a.results), metrics.pooled_interval(b.results)
    assert apart[0].low < apart[1].high, "the example must be one where pairing matters"


def test_methods_measured_on_other_prompts_are_not_compared():
    a, b = method("a", results([1], [2])), method("b", results([1]))
    with pytest.raises(UserError, match="the same prompts"):
        metrics.paired_difference(a, b)


def test_prompts_where_a_method_accepts_less_are_listed_with_the_largest_loss_first():
    a, b = method("a", results([3], [1], [2])), method("b", results([2], [4], [3]))
    assert [(row["id"], row["a"], row["b"]) for row in metrics.lower_prompts(a, b)] == [("1", 1, 4), ("2", 2, 3)]


def test_speed_uses_the_tokens_and_seconds_of_counted_rounds():
    found = results([4, 2], [3])
    assert metrics.tokens_per_s(found) == 9 / 2.0
    expected = {"propose": 500 / 3, "verify": 1000 / 3, "commit": 500 / 3, "total": 2000 / 3}
    assert metrics.round_ms(found) == pytest.approx(expected)
    assert metrics.tokens_per_s([PromptResult("t", "0", 0, generation([], decode_s=0.0))]) is None


# ---------------------------------------------------------------- agreement


def answers(*token_lists, margins=None, prompt_ids=(1,)) -> list[PromptResult]:
    return [
        PromptResult("t", str(i), 0, generation([1], token_ids=tokens, margins=margins, prompt_ids=prompt_ids))
        for i, tokens in enumerate(token_lists)
    ]


def test_the_first_difference_is_reported_with_the_targets_margin_there():
    """Trap 31: report the margin at the first difference."""
    baseline = method("autoregressive", answers([5, 6, 7], [5, 6, 7], margins=[3.0, 0.125, 2.0]))
    found = metrics.agreement(method("chain", answers([5, 9, 8], [5, 6, 7])), baseline)
    assert (found.num_answers, found.num_equal) == (2, 1)
    assert [(d.id, d.position, d.margin) for d in found.differences] == [("0", 1, 0.125)]


def test_an_answer_that_ends_early_differs_where_it_ends():
    assert metrics.first_difference([1, 2, 3], [1, 2, 3, 4]) == 2
    assert metrics.first_difference([1, 9], [1, 2, 3]) == 1


def test_turns_whose_history_already_differs_are_not_compared():
    baseline = method("autoregressive", answers([1, 2], prompt_ids=(1,)))
    found = metrics.agreement(method("chain", answers([3, 4], prompt_ids=(2,))), baseline)
    assert found.num_answers == 0 and metrics.losslessness(found, dtype="float32", max_margin=1)[0] == "not checked"


@pytest.mark.parametrize(
    ("dtype", "margin", "verdict"),
    [
        ("float32", 1e-3, "FAILED"),
        ("float32", 1e-5, "differs at near ties"),
        ("bfloat16", 0.2, "differs at near ties"),
        ("bfloat16", 0.6, "FAILED"),
        ("bfloat16", math.nan, "FAILED"),
    ],
)
def test_answers_may_differ_at_near_ties_only_and_in_float32_by_rounding_alone(dtype, margin, verdict):
    """Trap 31: bf16 near-ties flip legally (up to ~0.25), real bugs show 0.6-2.4: fail above a stated margin."""
    baseline = method("autoregressive", answers([5, 6], margins=[9.0, margin]))
    found = metrics.agreement(method("chain", answers([5, 7])), baseline)
    got, sentence = metrics.losslessness(found, dtype=dtype, max_margin=0.25)
    assert got == verdict and "t 0 token 1" in sentence
    assert "0 of 1 answers equal" in sentence and "1 differ;" in sentence


def test_equal_answers_are_called_equal_in_every_dtype():
    baseline = method("autoregressive", answers([5, 6]))
    found = metrics.agreement(method("chain", answers([5, 6])), baseline)
    assert metrics.losslessness(found, dtype="bfloat16", max_margin=0.0)[0] == "equal"
