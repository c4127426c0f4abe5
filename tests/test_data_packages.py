"""Prompts out of package wheels and the standard library, read from small stand-ins and from this Python itself."""

import ast
import json

import pytest
from helpers_data import fake_wheel, mixed, outcome, recipe

from dflash_train.config import SourceConfig
from dflash_train.data import packages
from dflash_train.data.recipe import read_source
from dflash_train.util.errors import UserError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read_kind(kind: str, **options) -> list:
    return list(read_source(kind, SourceConfig(kind=kind, options=options), recipe({kind: {"kind": kind}})))


def evals_line(*messages: tuple) -> str:
    return json.dumps({"input": [dict(zip(("role", "content", "name"), m)) for m in messages], "ideal": "x"}) + "\n"


def test_evals_caps_folders_and_leaves_out_other_licences_and_other_shapes(cache):
    root = "evals/registry/data"
    question = lambda i: evals_line(("system", "You answer questions briefly."), ("user", f"What is {i} plus {i}?"))
    fake_wheel(
        cache,
        "evals",
        "3.0.1.post1",
        {
            f"{root}/sums/samples.jsonl": "".join(question(i) for i in range(30)) + question(3),
            f"{root}/sandbagging/samples.jsonl": question(99),
            f"{root}/own_licence/LICENSE": "not ours",
            f"{root}/own_licence/samples.jsonl": question(98),
            f"{root}/shapes/a.jsonl": json.dumps({"question": "x"})
            + "\n"
            + json.dumps({"input": {"codeword": "at"}})
            + "\n{cut\n",
            f"{root}/long/a.jsonl": evals_line(("user", "x" * 3000)),
            f"{root}/greek/a.jsonl": evals_line(("user", "αβγδεζηθικλμνξοπρστ" * 3)),
        },
    )
    rows = read_kind("evals")
    kept = [row for row in rows if not row.drop and not row.skip]
    assert len(kept) == 10 and len({row.id for row in kept}) == 10
    assert all(row.upstream["config"] == "sums" for row in kept)
    reasons = sorted(row.skip or row.drop for row in rows if row.skip or row.drop)
    assert reasons == [
        "bad_json",
        "duplicate_in_folder",
        "length_outside_bounds",
        "not_a_chat_prompt",
        "not_a_chat_prompt",
        *["over_folder_cap"] * 20,
        "too_little_ascii",
    ]


def test_evals_system_only_rows_become_user_turns_and_named_examples_become_turns(cache):
    fake_wheel(
        cache,
        "evals",
        "3.0.1.post1",
        {
            "evals/registry/data/a/s.jsonl": evals_line(("system", "Name five rivers of France, please.")),
            "evals/registry/data/b/s.jsonl": evals_line(
                ("system", "Translate into German."),
                ("system", "good day", "example_user"),
                ("system", "Guten Tag", "example_assistant"),
                ("user", "good night"),
            ),
            "evals/registry/data/c/s.jsonl": evals_line(
                ("user", "Where does the sun set?"), ("system", "Too late for this.")
            ),
        },
    )
    a, b, c = (outcome(row) for row in read_kind("evals"))
    assert a == [{"role": "user", "content": "Name five rivers of France, please."}]
    assert [m["role"] for m in b] == ["system", "user", "assistant", "user"] and b[2]["content"] == "Guten Tag"
    assert c == "system_not_first"


def test_evals_cap_does_not_lean_towards_the_heldout_range(cache):
    """The cap keeps lowest hashes; with the hash that holds out it would leave next to nothing to train on."""
    folder = lambda f: "".join(evals_line(("user", f"Folder {f}, question {i}: how far is it?")) for i in range(100))
    fake_wheel(cache, "evals", "3.0.1.post1", {f"evals/registry/data/f{f}/s.jsonl": folder(f) for f in range(20)})
    data = recipe({"evals": {"kind": "evals", "options": {"per_folder": 5}}}, heldout_fraction=0.05)
    train, heldout, mix = mixed(data, cache / "w")
    assert mix.reports["evals"].kept == 100
    assert len(train) >= 85 and len(train) + len(heldout) <= 100


def test_stdlib_prompts_are_signatures_with_docstrings_and_files_are_never_split(tmp_path, monkeypatch):
    lib = tmp_path / "lib"  # a part of the real one: all of it takes ten seconds to parse
    (lib / "test").mkdir(parents=True)
    for path in sorted(packages.stdlib_folder().glob("[a-i]*.py")):
        (lib / path.name).write_bytes(path.read_bytes())
    (lib / "test" / "test_x.py").write_text(
        'def f():\n    """A docstring of a test, long enough to be taken for a prompt."""\n'
    )
    (lib / "broken.py").write_text("def f(:\n")
    monkeypatch.setattr(packages, "stdlib_folder", lambda: lib)
    data = recipe({"code": {"kind": "stdlib_code", "take": 300}}, heldout_fraction=0.2)
    train, heldout, mix = mixed(data, tmp_path / "w")
    assert len(train) == 300 and 30 <= len(heldout) <= 60
    assert mix.reports["code"].dropped == {"unparsable_file": 1}
    module = lambda row: row["upstream"]["row"].partition(":")[0]
    assert not {module(row) for row in train} & {module(row) for row in heldout}
    assert not any(part in ("test", "tests", "site-packages") for row in train for part in module(row).split("/"))
    for row in train[:50]:
        code = row["messages"][0]["content"].partition("```python\n")[2].removesuffix("\n```")
        (function,) = ast.parse(code).body
        assert len(function.body) == 1 and len(ast.get_docstring(function)) >= 40
    assert mix.reports["code"].skipped["no_docstring"] > 100


def test_pydoc_topics_are_asked_by_title():
    rows = read_kind("pydoc")
    assert len(rows) > 70 and len({row.id for row in rows}) == len(rows)
    assert 'The "assert" statement (`assert`)' in next(row for row in rows if row.id == "assert").messages[0]["content"]


def test_bfcl_keeps_a_share_for_evaluation_and_repairs_parameter_types(cache):
    row = lambda i: json.dumps(
        {
            "id": f"simple_python_{i}",
            "question": [[{"role": "user", "content": f"Area {i}?"}]],
            "function": [
                {
                    "name": "area",
                    "description": "d",
                    "parameters": {"type": "dict", "properties": {"r": {"type": "float"}}},
                }
            ],
        }
    )
    fake_wheel(
        cache,
        "bfcl-eval",
        "2026.3.23",
        {"bfcl_eval/data/BFCL_v4_simple_python.json": "".join(row(i) + "\n" for i in range(200))},
    )
    rows = read_kind("bfcl", files=["simple_python"])
    kept = [row for row in rows if not row.skip]
    assert 120 < len(kept) < 160 and {row.skip for row in rows} == {None, "kept_for_evaluation"}
    assert kept[0].tools[0]["function"]["parameters"] == {"type": "object", "properties": {"r": {"type": "number"}}}
    with pytest.raises(UserError, match="bfcl-eval=="):
        read_kind("bfcl", files=["no_such_file"])


def test_chatterbot_turns_alternate(cache):
    text = "categories:\n- x\nconversations:\n- - Hello there\n  - Hi\n  - How are you?\n- - yes\n  - 5\n"
    fake_wheel(cache, "chatterbot-corpus", "1.3.3", {"chatterbot_corpus/data/english/a.yml": text})
    rows = read_kind("chatterbot")
    assert [m["role"] for m in outcome(rows[0])] == ["user", "assistant", "user"]
    assert rows[1].drop == "content_not_text"
