"""Batched answers: the library's generate, steered by our arguments alone."""

import json

import pytest
import torch
from helpers_target import (
    one_thread,  # noqa: F401
    plain_logits,
    random_ids,
)

from dflash_train.config import HardwareConfig, TargetConfig
from dflash_train.target import hf, tiny
from dflash_train.util.hf import transformers

CPU = HardwareConfig(device="cpu")


def test_greedy_answers_of_a_left_padded_batch_equal_single_ones():
    """Trap 5: and step-by-step argmax of the plain forward."""
    target = tiny.make_tiny_target()
    prompts = [random_ids(n, n).tolist() for n in (3, 11, 7)]
    greedy = {"max_new_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    together = target.answer(prompts, **greedy)
    for prompt, answer in zip(prompts, together):
        assert target.answer([prompt], **greedy) == [answer]
        ids = list(prompt)
        for token_id in answer[0]:
            assert int(plain_logits(target, torch.tensor(ids))[-1].argmax()) == token_id
            ids.append(token_id)


def test_answers_end_at_the_stop_token_and_say_why_they_ended():
    target = tiny.make_tiny_target()
    prompts = [random_ids(n, n).tolist() for n in (3, 11, 7, 5, 9, 4, 6, 8)]
    results = target.answer(prompts, max_new_tokens=40, temperature=1.0, top_p=1.0, top_k=0, seed=3)
    reasons = {reason for _, reason in results}
    assert reasons == {"stop", "length"}
    for token_ids, reason in results:
        assert (token_ids[-1] == 2) == (reason == "stop") and 2 not in token_ids[:-1]
        assert reason == "stop" or len(token_ids) == 40


def test_a_seed_decides_the_answers_and_leaves_the_global_generator_alone():
    target, prompts = tiny.make_tiny_target(), [[20, 30, 40], [50, 60]]
    ask = lambda seed: target.answer(prompts, max_new_tokens=16, temperature=1.0, top_p=0.9, top_k=50, seed=seed)
    before = torch.get_rng_state()
    assert ask(1) == ask(1) != ask(2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_models_own_generation_config_does_not_steer_answers(tmp_path):
    folder = tiny.save_tiny(tmp_path / "model")
    theirs = {"eos_token_id": [2, 9], "repetition_penalty": 5.0, "temperature": 0.1, "do_sample": True, "top_k": 1}
    (folder / "generation_config.json").write_text(json.dumps(theirs))
    changed = hf.load(TargetConfig(name="x", kind="hf", path=str(folder), dtype="float32"), CPU)
    plain = tiny.make_tiny_target()
    assert changed.spec.stop_ids == (2, 9)
    ask = {"max_new_tokens": 16, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0}
    prompt = [[20, 30, 40]]
    expected = hf.cut_at_stop(plain.answer(prompt, **ask)[0][0], (2, 9))
    assert changed.answer(prompt, **ask)[0] == expected


@pytest.mark.parametrize("temperature, top_p, top_k", [(1.0, 1.0, 0), (0.7, 0.8, 20), (1.3, 0.5, 0), (0.5, 1.0, 3)])
def test_draws_follow_the_librarys_own_warpers(temperature, top_p, top_k):
    """Its chain gives the law; 40,000 draws of ours stay within it, and never leave its support."""
    scores = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 2
    law = transformers.TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        law = transformers.TopKLogitsWarper(top_k)(None, law)
    law = transformers.TopPLogitsWarper(top_p)(None, law).softmax(-1)[0]
    out = hf.TopSampler(temperature, top_p, top_k)(None, scores.expand(40_000, -1).contiguous())
    counts = torch.bincount(out.argmax(-1), minlength=40).float()
    assert (out == 0).sum() == 40_000 and counts[law == 0].sum() == 0
    seen = law > 0
    chi_square = ((counts - 40_000 * law)[seen] ** 2 / (40_000 * law[seen])).sum()
    degrees = int(seen.sum()) - 1
    assert chi_square < degrees + 5 * (2 * max(degrees, 1)) ** 0.5
