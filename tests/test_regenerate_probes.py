"""Eight questions come before the bill: a server that answers as the target would not is found by them."""

import threading

import pytest
from helpers_server import fake_servers, served_run  # noqa: F401
from helpers_target import one_thread, tiny  # noqa: F401

from dflash_train import regenerate
from dflash_train.util.errors import UserError


def thoughtless(server, body):
    reply = server.plain_answer(body)
    text = reply["text"].rpartition("</think>\n\n")[2]
    return {**reply, "text": text, "token_ids": [*server.tokenizer.encode(text, add_special_tokens=False), 2]}


def thinking_always(server, body):
    reply = server.plain_answer(body)
    ids = server.tokenizer.encode("<think>\nhm\n</think>\n\nyes", add_special_tokens=False)
    return {**reply, "token_ids": [*ids, 2]}


def stuck(server, body):
    return {**server.plain_answer(body), "token_ids": [50] * 200, "finish_reason": "length"}


def endless(server, body):
    return {**server.plain_answer(body), "finish_reason": "length"}


def rewritten(server, body):
    return {**server.plain_answer(body), "prompt_token_ids": [1, *body["prompt"]]}


@pytest.mark.parametrize("answer, said", [
    (thoughtless, "thinking is on, and there is no reasoning: 4 of 4"),
    (thinking_always, "thinking is off, and there is reasoning: 4 of 4"),
    (stuck, "the same words over and over: 8 of 8"),
    (endless, "not a possible answer: 8 of 8"),
    (lambda server, body: {**server.plain_answer(body), "token_ids": [], "text": ""}, "empty: 8 of 8"),
    (lambda server, body: {**server.plain_answer(body), "token_ids": [5000, 2]}, "not a possible answer: 8 of 8"),
    (rewritten, "changed the prompt"),
], ids=["no thoughts", "always thoughts", "stuck", "short length", "empty", "foreign ids", "other prompt"])  # fmt: skip
def test_a_server_that_answers_as_the_target_would_not_is_found_by_the_first_eight_questions(
    tmp_path, fake, answer, said
):
    server = fake()
    server.answer = lambda body: answer(server, body)
    with pytest.raises(UserError, match=said):
        regenerate.ensure_answers(served_run(tmp_path, server.url))
    assert len(server.bodies) <= 8


def test_greedy_answers_are_compared_with_our_own_loop_where_the_target_is_loaded_here(tmp_path, fake, tiny_answers):
    """The server is backed by the same tiny model, then by one of other weights."""
    for seed in (0, 1):
        server = fake(tiny_answers(seed))
        run = served_run(
            tmp_path / str(seed),
            server.url,
            num_train=2,
            max_new_tokens=20,
            client={"compare": True, "timeout_s": 20.0},
        )
        if seed == 0:
            regenerate.ensure_answers(run)
        else:
            with pytest.raises(UserError, match=r"greedy answers(.|\n)*is not this target's"):
                regenerate.ensure_answers(run)


@pytest.fixture
def tiny_answers(monkeypatch):
    """seed of the weights -> what such a model says. It does not think, which is not what is tried here."""
    monkeypatch.setattr(regenerate, "check_probes", lambda *a: {})

    def backed_by(seed: int):
        target, lock = tiny(seed=seed), threading.Lock()

        def answer(body: dict) -> dict:
            with lock:
                ((ids, reason),) = target.answer([body["prompt"]], max_new_tokens=body["max_tokens"], seed=body["seed"],
                                                 temperature=body["temperature"], top_p=body["top_p"],
                                                 top_k=max(0, body["top_k"]))  # fmt: skip
            return {"text": target.tokenizer.decode(ids), "token_ids": ids, "finish_reason": reason}

        return answer

    return backed_by
