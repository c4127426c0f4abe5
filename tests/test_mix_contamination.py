"""Evaluation sets by name: wheels, BFCL, files, columns of hub sets; what a mix depends on of them."""

import json

import pytest
from helpers_data import fake_wheel, write_rows

from dflash_train.bench import contamination
from dflash_train.bench.contamination import contamination_texts, evaluation_facts, evaluation_need, hub_set
from dflash_train.util.errors import UserError


@pytest.fixture
def bfcl(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    turn = lambda text, role="user": {"role": role, "content": text}
    rows = [
        {"id": "a", "question": [[turn("Be exact.", "system"), turn("What is the weather in Rome today?")]]},
        {"id": "b", "question": [[turn("bye")], [turn("Now book me a table for two.")]]},
        {"id": "c", "question": [[turn("北京今天的天气怎么样")]]},
        {"id": "d", "question": [[turn("bye")]]},
    ]
    files = {
        "bfcl_eval/data/BFCL_v4_simple.json": "".join(json.dumps(row) + "\n" for row in rows),
        "bfcl_eval/data/BFCL_v4_format.json": json.dumps({"one": "object"}),
        "bfcl_eval/data/possible_answer/BFCL_v4_simple.json": '{"id": "a", "ground_truth": []}\n',
    }
    fake_wheel(tmp_path, *contamination.BFCL, files)


def test_bfcl_gives_the_user_turns_that_say_something(bfcl):
    assert contamination_texts(["bfcl"])["bfcl"] == [
        ("What is the weather in Rome today?",), ("Now book me a table for two.",), ("北京今天的天气怎么样",), ()
    ]  # fmt: skip
    assert evaluation_need("bfcl").ok


def test_a_hub_set_is_named_by_repository_split_and_column(monkeypatch):
    source, column = hub_set("hub:google-research-datasets/mbpp:full/test:text")
    assert (source.kind, source.path, source.subset, source.split, column) == (
        "hub", "google-research-datasets/mbpp", "full", "test", "text",
    )  # fmt: skip
    commit = "0123456789" * 4
    assert hub_set(f"hub:a/b@{commit}:test:problem")[0].revision == commit
    rows = [("x", {}, {"problem": "How many?"}), ("y", {}, {"problem": None})]
    monkeypatch.setattr(contamination, "hub_rows", lambda name, config: iter(rows))
    name = "hub:HuggingFaceH4/MATH-500:test:problem"
    assert contamination_texts([name]) == {name: [("How many?",)]}
    with pytest.raises(UserError, match="no text in column 'answer'"):
        contamination_texts(["hub:HuggingFaceH4/MATH-500:test:answer"])


@pytest.mark.parametrize("name", ["mbpp", "hub:a/b", "hub:a:test:x", "hub:a/b@main:test:x"])
def test_other_names_are_refused_with_what_there_is(name):
    with pytest.raises(UserError, match=r"data\.decontaminate"):
        contamination_texts([name])
    need = evaluation_need(name)
    assert not need.ok and "hub:<owner/name>" in need.fix


def test_held_out_rows_are_the_mixers_own_and_hub_sets_count_by_name_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr(contamination, "hub_rows", None)
    path = write_rows(tmp_path / "e.jsonl", [{"turns": ["One?"]}])
    tasks = ["heldout", "hub:a/b:test:x", f"file:{path}"]
    before = evaluation_facts(tasks)
    assert before["heldout"] is before["hub:a/b:test:x"] is None and evaluation_need("heldout").ok
    write_rows(path, [{"turns": ["Two?"]}])
    after = evaluation_facts(tasks)
    assert after[f"file:{path}"] != before[f"file:{path}"] and contamination_texts(["heldout"]) == {}
