"""Is a mix that of a recipe? What makes it stale is named; what cannot be looked at here is no reason."""

import shutil
from dataclasses import replace

import pytest
from helpers_data import mix_manifest, prompts, recipe, write_rows

from dflash_train.bench.contamination import evaluation_facts
from dflash_train.data import staleness
from dflash_train.data.staleness import difference, made_of, recipe_hash, why_stale
from dflash_train.util.io import read_json, write_json


@pytest.fixture
def made(tmp_path):
    """(folder of a mix, its recipe) of a file, a hub set of open revision and this Python's own library."""
    write_rows(tmp_path / "a.jsonl", prompts(3))
    items = write_rows(tmp_path / "items.jsonl", [{"turns": ["One?"]}])
    sources = {"a": {"path": str(tmp_path / "a.jsonl")}, "b": {"kind": "hub", "path": "o/set"},
               "c": {"kind": "pydoc"}}  # fmt: skip
    data = recipe(sources, decontaminate=["gsm8k", f"file:{items}", "heldout"])
    folder = tmp_path / "mix"
    pinned = replace(data, sources={**data.sources, "b": replace(data.sources["b"], revision="a" * 40)})
    manifest = mix_manifest(pinned)
    manifest["sources"]["b"]["revision"] = "a" * 40
    for name in ("prompts.jsonl", "heldout.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}\n")
        manifest["files"][name] = {"bytes": 3}
    write_json(folder / "manifest.json", manifest)
    return folder, data


def stale(folder, data, limit=None) -> str | None:
    return why_stale(folder, data, limit, evaluation_facts(data.decontaminate))


def test_a_whole_mix_of_the_same_recipe_and_inputs_is_kept_and_asks_no_hub(made):
    folder, data = made
    assert stale(folder, data) is None
    other = replace(data, name="other", num_processes=7, answers=replace(data.answers, batch_size=3))
    assert stale(folder, other) is None  # where it goes, how fast, and what comes after


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: replace(data, seed=4), "data.seed was 0, and is 4 now"),
        (lambda data: replace(data, sources=dict(reversed(data.sources.items()))), "order was"),
        (lambda data: replace(data, sources={"a": data.sources["a"]}), "data.sources.b was {"),
        (
            lambda data: replace(data, sources={**data.sources, "b": replace(data.sources["b"], revision="b" * 40)}),
            "data.sources.b.revision was",
        ),
        (lambda data: replace(data, decontaminate=[]), "data.decontaminate was"),
    ],
)
def test_a_change_of_the_recipe_is_named_with_both_values(made, change, said):
    folder, data = made
    assert said in stale(folder, change(data))


def test_a_changed_input_is_a_reason_and_one_that_is_not_here_is_none(made, tmp_path, monkeypatch):
    folder, data = made
    write_rows(tmp_path / "items.jsonl", [{"turns": ["Two?"]}])
    assert "evaluation.file:" in stale(folder, data)
    (tmp_path / "items.jsonl").unlink()
    assert stale(folder, data) is None
    write_rows(tmp_path / "a.jsonl", prompts(4))
    assert "inputs.a was" in stale(folder, data)
    (tmp_path / "a.jsonl").unlink()
    monkeypatch.setattr(staleness, "_python", lambda data: "3.99")
    assert stale(folder, data) is None


def test_other_rules_or_a_mix_of_an_earlier_version_are_a_reason(made, monkeypatch):
    folder, data = made
    monkeypatch.setattr(staleness, "RULES_VERSION", staleness.RULES_VERSION + 1)
    assert "rules was" in stale(folder, data)
    monkeypatch.undo()
    manifest = read_json(folder / "manifest.json")
    del manifest["made_of"]
    write_json(folder / "manifest.json", manifest)
    assert "earlier version" in stale(folder, data)


def test_a_limit_and_missing_or_cut_files_are_a_reason(made):
    folder, data = made
    assert "limit was null, and is 5 now" in stale(folder, data, limit=5)
    (folder / "heldout.jsonl").write_text("{")
    assert "heldout.jsonl is missing or cut" in stale(folder, data)
    (folder / "heldout.jsonl").unlink()
    assert "heldout.jsonl is missing or cut" in stale(folder, data)
    shutil.rmtree(folder)
    assert "no mix in" in stale(folder, data)


def test_differences_are_found_behind_inputs_that_are_not_here():
    made, wanted = {"inputs": {"a": [1], "b": [2]}, "x": 1}, {"inputs": {"a": None, "b": [2]}, "x": 2}
    assert difference(made, wanted) == "x was 1, and is 2 now"
    assert difference(made, {**wanted, "x": 1}) is None
    assert "inputs.b" in difference(made, {"inputs": {"a": None, "b": [3]}, "x": 1})


def test_credentials_in_a_recipe_stay_out_of_the_record_and_the_hash_tells_recipes_apart():
    data = recipe({"a": {"path": "x", "options": {"id_field": "i"}}})
    secret = replace(data, sources={"a": replace(data.sources["a"], options={"api_key": "s3cret"})})
    assert "s3cret" not in str(made_of(secret, None, {})) and "redacted" in str(made_of(secret, None, {}))
    assert recipe_hash(made_of(data, None, {})) != recipe_hash(made_of(data, 5, {}))
