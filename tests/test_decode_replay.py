"""Replayed rounds are decoding's rounds: exactly when greedy, in law when sampled."""

import dataclasses

import pytest
import torch
from helpers_decode import overfit, tiny_drafter

from dflash_train.decode.autoregressive import Proposer as Autoregressive
from dflash_train.decode.base import DraftSettings
from dflash_train.decode.ddtree import Proposer as DDTree
from dflash_train.decode.dflash import Proposer as DFlash
from dflash_train.decode.generate import generate
from dflash_train.decode.replay import record_answer, replay, write_answers
from dflash_train.decode.shuffle import ShuffledFeatures
from dflash_train.decode.verify import Sampling, Verifier
from dflash_train.target.tiny import make_tiny_target

PROMPTS = [list(range(20, 20 + n)) for n in (5, 9, 14)]
NUM_TOKENS = 30


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def parts(request):
    """A target and a drafter that half knows one of its answers: rounds of many lengths."""
    target = make_tiny_target(request.param)
    answer = generate(target, Autoregressive(), Verifier(Sampling()), PROMPTS[0], NUM_TOKENS).token_ids
    return target, overfit(target, tiny_drafter(target), [*PROMPTS[0], *answer], 25), target.head()


def proposers(parts):
    _, drafter, head = parts
    return [DFlash(drafter, head, DraftSettings()), DDTree(drafter, head, DraftSettings(budget=3)),
            DDTree(drafter, head, DraftSettings(budget=64)),
            ShuffledFeatures(DFlash(drafter, head, DraftSettings()), seed=1)]  # fmt: skip


@pytest.mark.parametrize("max_new_tokens", [9, NUM_TOKENS])
def test_greedy_rounds_are_those_of_decoding(parts, max_new_tokens):
    target = parts[0]
    answers = write_answers(target, PROMPTS, Sampling(), max_new_tokens=max_new_tokens, batch_size=2, seed=0)
    lengths = set()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        for proposer in proposers(parts):
            real = generate(target, proposer, Verifier(Sampling()), prompt, max_new_tokens)
            again = replay(record_answer(target, prompt, answer, proposer.features), proposer, max_new_tokens)
            assert again.token_ids == real.token_ids == answer
            assert again.round_lengths == real.round_lengths and again.draft_lengths == real.draft_lengths
            assert again.stopped_by == real.stopped_by and again.decode_s == 0
            lengths |= set(real.round_lengths)
    assert max_new_tokens < NUM_TOKENS or len(lengths) > 2, "a drafter that accepts always or never shows nothing"


def test_an_answer_ends_at_its_stop_token_as_in_decoding(parts, monkeypatch):
    target, real_spec = parts[0], parts[0].spec
    answer = write_answers(target, PROMPTS[:1], Sampling(), max_new_tokens=NUM_TOKENS, batch_size=1, seed=0)[0]
    stop = answer[NUM_TOKENS // 2]
    short = answer[: answer.index(stop) + 1]
    monkeypatch.setattr(target, "spec", dataclasses.replace(real_spec, stop_ids=(stop,)))
    for proposer in proposers(parts):
        real = generate(target, proposer, Verifier(Sampling()), PROMPTS[0], NUM_TOKENS)
        again = replay(record_answer(target, PROMPTS[0], short, proposer.features), proposer, NUM_TOKENS)
        assert again.token_ids == real.token_ids == short and again.round_lengths == real.round_lengths
        assert again.stopped_by == "stop"


def test_sampled_rounds_have_decodings_mean(parts):
    """Both are means over independent sampled answers: apart by less than four standard errors."""
    target, drafter, head = parts
    sampling, proposer = Sampling(temperature=0.7), DDTree(drafter, head, DraftSettings(budget=8))
    count = 24
    answers = write_answers(target, PROMPTS[:1] * count, sampling, max_new_tokens=12, batch_size=count, seed=5)
    assert len({tuple(a) for a in answers}) > count // 2
    replayed = [replay(record_answer(target, PROMPTS[0], a, proposer.features), proposer, 12) for a in answers]
    real = [generate(target, proposer, Verifier(sampling, seed=i), PROMPTS[0], 12) for i in range(count)]
    mean = [torch.tensor([sum(g.round_lengths) / max(1, len(g.round_lengths)) for g in kind]) for kind in
            (replayed, real)]  # fmt: skip
    error = sum(m.var() / count for m in mean).sqrt()
    assert (mean[0].mean() - mean[1].mean()).abs() < 4 * error
    assert mean[0].mean() > 1


def test_answers_come_back_in_the_order_of_their_prompts(parts):
    target = parts[0]
    one_by_one = [generate(target, Autoregressive(), Verifier(Sampling()), p, 8).token_ids for p in PROMPTS]
    assert write_answers(target, PROMPTS, Sampling(), max_new_tokens=8, batch_size=2, seed=0) == one_by_one
    backwards = write_answers(target, PROMPTS[::-1], Sampling(), max_new_tokens=8, batch_size=1, seed=0)
    assert backwards == one_by_one[::-1]
