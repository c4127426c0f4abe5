"""The mixer: exact counts, hash order, hold-out, deduplication across sources and turns, deficits, the same bytes every
time."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_data import FIXTURES, mixed, prompts, recipe, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.mixing.candidates import prompt_ends
from dflash_train.data.recipe import plan_takes
from dflash_train.records import Sample
from dflash_train.util.errors import UserError


def ids(rows: list[dict]) -> list[str]:
    return [row["id"] for row in rows]


def two_sources(tmp_path: Path, **values):
    a = write_rows(tmp_path / "a.jsonl", prompts(60, "apple"))
    b = write_rows(tmp_path / "b.jsonl", prompts(40, "berry"))
    return recipe(
        {"a": {"path": str(a), "take": 30, "license": "MIT"}, "b": {"path": str(b), "take": 20, "bucket": "code"}},
        **values,
    )


def test_counts_are_exact_and_no_row_comes_twice(tmp_path):
    """Trap 14: exact counts per source, nothing twice, the manifest's numbers add up."""
    train, heldout, mix = mixed(two_sources(tmp_path, heldout_fraction=0.1), tmp_path / "w")
    assert [sum(row["source"] == name for row in train) for name in "ab"] == [30, 20]
    assert len(set(ids(train + heldout))) == len(train) + len(heldout)
    assert heldout and {row["split"] for row in train} == {"train"} and {row["split"] for row in heldout} == {"heldout"}
    for report in mix.reports.values():
        assert report.read == report.converted + report.skipped.total() + report.dropped.total() + report.not_needed
        assert report.prompts == report.converted == report.kept + report.filtered.total()
        assert report.kept >= report.taken + report.heldout
    rows = [Sample.from_json(row) for row in train]
    assert {row.license for row in rows if row.source == "a"} == {"MIT"}
    assert {row.bucket for row in rows if row.source == "b"} == {"code"}


def test_the_same_recipe_gives_the_same_order_and_another_seed_another(tmp_path):
    """Trap 14: same seed, same order, sources mixed and not one after another."""
    first, held, _ = mixed(two_sources(tmp_path, heldout_fraction=0.1), tmp_path / "1")
    again, held_again, _ = mixed(two_sources(tmp_path, heldout_fraction=0.1), tmp_path / "2")
    assert (first, held) == (again, held_again)
    other, _, _ = mixed(two_sources(tmp_path, heldout_fraction=0.1, seed=1), tmp_path / "3")
    assert ids(other) != ids(first) and set(ids(other)) != set(ids(first))
    switches = sum(x["source"] != y["source"] for x, y in itertools.pairwise(first))
    assert switches > 10


def test_order_does_not_depend_on_pythons_hash_salt(tmp_path):
    """Trap 14: Python's own hash() differs between processes; ours may not."""
    write_rows(tmp_path / "a.jsonl", prompts(40, "apple"))
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\nfrom helpers_data import mixed, recipe\n"
        f"root = Path({str(tmp_path)!r})\n"
        "sources = {'a': {'path': str(root / 'a.jsonl'), 'take': 20}}\n"
        "data = recipe(sources, thinking_share={'chat': 0.5}, heldout_fraction=0.1)\n"
        "train, held, _ = mixed(data, root / sys.argv[1])\n"
        "print([(r['id'], r['thinking']) for r in train + held])"
    )
    salt = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"  # this process has another one
    other = subprocess.run(
        [sys.executable, "-c", code, "there"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": salt, "PATH": "", "PYTHONPATH": "."},
        cwd=Path(__file__).parents[1],
    )
    data = recipe(
        {"a": {"path": str(tmp_path / "a.jsonl"), "take": 20}}, thinking_share={"chat": 0.5}, heldout_fraction=0.1
    )
    train, held, _ = mixed(data, tmp_path / "here")
    assert other.stdout.strip() == str([(row["id"], row["thinking"]) for row in train + held]) and len(train) == 20


def test_row_order_of_the_file_changes_nothing(tmp_path):
    rows = [*prompts(50, "apple"), {"id": "copy", "prompt": "Apple  number 3, PLEASE?"}]
    forward = write_rows(tmp_path / "f.jsonl", rows)
    backward = write_rows(tmp_path / "b.jsonl", rows[::-1])
    result = [
        mixed(recipe({"a": {"path": str(p), "take": 20}}, heldout_fraction=0.1), tmp_path / p.stem)[:2]
        for p in (forward, backward)
    ]
    strip = lambda split: [{**row, "upstream": None} for row in split]
    assert [strip(split) for split in result[0]] == [strip(split) for split in result[1]]


def test_a_smaller_take_is_a_prefix_in_hash_order_and_heldout_never_moves_into_train(tmp_path):
    path = str(write_rows(tmp_path / "a.jsonl", prompts(200, "apple")))
    taken, held = {}, {}
    for take in (20, 50, 150):
        train, heldout, _ = mixed(
            recipe({"a": {"path": path, "take": take}}, heldout_fraction=0.2), tmp_path / str(take)
        )
        taken[take], held[take] = set(ids(train)), set(ids(heldout))
    assert taken[20] < taken[50] < taken[150]
    assert held[20] <= held[50] <= held[150]
    assert not held[150] & taken[150]
    assert [len(held[take]) for take in (20, 50)] == [4, 10]


def test_limit_is_the_head_of_the_final_order(tmp_path):
    train, heldout, _ = mixed(two_sources(tmp_path, heldout_fraction=0.1), tmp_path / "1")
    some, some_held, _ = mixed(two_sources(tmp_path, heldout_fraction=0.1), tmp_path / "2", limit=3)
    assert (some, some_held) == (train[:3], heldout[:3])


def test_take_null_is_everything_and_take_zero_is_nothing(tmp_path):
    a, b = (str(write_rows(tmp_path / f"{n}.jsonl", prompts(10, n))) for n in "ab")
    train, _, mix = mixed(recipe({"a": {"path": a}, "b": {"path": b, "take": 0}}), tmp_path / "w")
    assert [row["source"] for row in train] == ["a"] * 10
    assert mix.reports["b"].taken == 0 and mix.reports["b"].not_needed == mix.reports["b"].read == 10


# ---------------------------------------------------------------- duplicates


def test_duplicates_across_sources_keep_the_earlier_source_and_are_counted_by_pair(tmp_path):
    a = write_rows(tmp_path / "a.jsonl", prompts(5, "apple"))
    b = write_rows(
        tmp_path / "b.jsonl",
        [
            {"prompt": "APPLE  number 1,\nplease?"},
            {"prompt": "\uff21pple number 2, please?"},
            {"prompt": "pear?"},
            {"prompt": "pear?"},
        ],
    )
    _, _, mix = mixed(recipe({"a": {"path": str(a)}, "b": {"path": str(b)}}), tmp_path / "w")
    assert (mix.reports["a"].kept, mix.reports["b"].kept) == (5, 1)
    assert dict(mix.reports["b"].duplicates) == {"a": 2, "b": 1}
    _, _, mix = mixed(recipe({"b": {"path": str(b)}, "a": {"path": str(a)}}), tmp_path / "v")
    assert (mix.reports["b"].kept, dict(mix.reports["a"].duplicates)) == (3, {"b": 2})


def test_a_system_text_or_tools_make_two_equal_questions_different(tmp_path):
    row = {"messages": [{"role": "user", "content": "What now?"}]}
    system = {"messages": [{"role": "system", "content": "Be brief."}, *row["messages"]]}
    tools = {**row, "tools": [{"name": "f"}]}
    path = write_rows(tmp_path / "a.jsonl", [row, system, tools, row])
    _, _, mix = mixed(recipe({"a": {"path": str(path)}}), tmp_path / "w")
    assert (mix.reports["a"].kept, mix.reports["a"].filtered["duplicate"]) == (3, 1)


def conversation(word: str, turns: int) -> list[dict]:
    return [
        m
        for i in range(turns)
        for m in ({"role": "user", "content": f"{word} {i}?"}, {"role": "assistant", "content": f"{i}"})
    ]


def test_copies_of_a_conversation_stay_duplicates_wherever_they_are_cut(tmp_path):
    rows = [
        {"id": f"{word}{copy}", "messages": conversation(word, 4)}
        for word in ("fig", "kiwi", "lime")
        for copy in range(8)
    ]
    train, heldout, mix = mixed(
        recipe({"a": {"path": str(write_rows(tmp_path / "a.jsonl", rows))}}, heldout_fraction=0.3), tmp_path / "w"
    )
    assert mix.reports["a"].kept == 3
    assert len({row["messages"][0]["content"] for row in train + heldout}) == len(train + heldout) <= 3


def test_repeated_ids_give_distinct_sample_ids(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"id": 7, "prompt": f"number {i}?"} for i in range(4)])
    train, _, _ = mixed(recipe({"a": {"path": str(path)}}), tmp_path / "w")
    assert sorted(ids(train)) == ["a/7", "a/7~2", "a/7~3", "a/7~4"]


def test_an_id_that_looks_like_a_repeated_ones_collides_with_none(tmp_path):
    names = ["x", "x", "x~2", "x~2", "x~2~2", "x~1", "x~2~1", "x~"]
    path = write_rows(tmp_path / "a.jsonl", [{"id": id_, "prompt": f"number {i}?"} for i, id_ in enumerate(names)])
    train, _, _ = mixed(recipe({"a": {"path": str(path)}}), tmp_path / "w")
    assert len(train) == len(names) == len(set(ids(train))) and {"a/x", "a/x~2", "a/x~"} < set(ids(train))


# ---------------------------------------------------------------- turns, thinking


def test_one_turn_is_chosen_by_hash_and_all_turns_share_split_and_mode(tmp_path):
    rows = [{"id": f"c{i}", "messages": conversation(f"plum{i}", 3)} for i in range(40)]
    path = str(write_rows(tmp_path / "a.jsonl", rows))
    one, held_one, _ = mixed(recipe({"a": {"path": path}}, heldout_fraction=0.2), tmp_path / "1")
    assert {len(row["messages"]) for row in one} == {1, 3, 5}
    assert all(row["messages"][-1]["role"] == "user" for row in one + held_one)
    everything, held, mix = mixed(
        recipe({"a": {"path": path}}, turns="all", heldout_fraction=0.2, thinking_share={"chat": 0.5}), tmp_path / "2"
    )
    assert mix.reports["a"].kept == 120 and len(set(ids(everything + held))) == len(everything + held)
    base = lambda row: row["id"].partition("#")[0]
    assert not {base(row) for row in everything} & {base(row) for row in held}
    modes: dict[str, set] = {}
    for row in everything:
        modes.setdefault(base(row), set()).add(row["thinking"])
    assert all(len(mode) == 1 for mode in modes.values())


def test_prompts_end_where_an_assistant_would_answer():
    u, a, t = ({"role": role} for role in ("user", "assistant", "tool"))
    assert prompt_ends([u]) == [1]
    assert prompt_ends([{"role": "system"}, u, a, u]) == [2, 4]
    assert prompt_ends([u, a, t, t, a, u, a]) == [1, 4, 6]
    assert prompt_ends([u, a, t]) == [1, 3]


def test_thinking_follows_the_buckets_share_and_a_native_rows_own_mode(tmp_path):
    native = {
        "messages": [{"role": "user", "content": "Own mode?"}],
        "source": "x",
        "license": "CC0-1.0",
        "bucket": "chat",
        "split": "train",
        "thinking": "on",
        "id": "n",
    }
    a = write_rows(tmp_path / "a.jsonl", prompts(400, "apple"))
    b = write_rows(tmp_path / "b.jsonl", [native])
    data = recipe(
        {"a": {"path": str(a), "bucket": "math"}, "b": {"path": str(b), "bucket": "chat"}}, thinking_share={"math": 0.6}
    )
    train, _, _ = mixed(data, tmp_path / "w")
    share = sum(row["thinking"] == "on" for row in train if row["source"] == "a") / 400
    assert 0.5 < share < 0.7
    own = next(row for row in train if row["source"] == "b")
    assert (own["thinking"], own["license"]) == ("on", "CC0-1.0")


# ---------------------------------------------------------------- short sources


def test_a_short_or_empty_source_is_refused_with_what_there_is(tmp_path):
    """Trap 14: an emptied source is an error unless the recipe allows it, then a named skip."""
    a = str(write_rows(tmp_path / "a.jsonl", prompts(10, "apple")))
    empty = write_rows(tmp_path / "b.jsonl", [{"prompt": ""}])
    with pytest.raises(UserError, match="a has 10 rows") as error:
        mixed(recipe({"a": {"path": a, "take": 11}}), tmp_path / "1")
    assert "data.sources.a.take=10" in str(error.value)
    with pytest.raises(UserError, match="b has 0 rows"):
        mixed(recipe({"a": {"path": a}, "b": {"path": str(empty)}}), tmp_path / "2")
    train, _, mix = mixed(recipe({"a": {"path": a}, "b": {"path": str(empty)}}, allow_short=True), tmp_path / "3")
    assert len(train) == 10 and mix.reports["b"].taken == 0


def test_deficits_are_spread_inside_the_bucket_in_proportion():
    table = lambda **takes: {
        name: {"path": "x", "take": take, "bucket": "tools" if name == "t" else "chat"} for name, take in takes.items()
    }
    data = recipe(table(a=100, b=50, c=25, t=10), allow_short=True)
    assert plan_takes(data, {"a": 40, "b": 1000, "c": 1000, "t": 500}) == {"a": 40, "b": 90, "c": 45, "t": 10}
    assert plan_takes(data, {"a": 40, "b": 60, "c": 1000, "t": 500}) == {"a": 40, "b": 60, "c": 75, "t": 10}
    assert plan_takes(data, {"a": 40, "b": 60, "c": 30, "t": 5}) == {"a": 40, "b": 60, "c": 30, "t": 5}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.sampled_from("xy")), min_size=1, max_size=6))
def test_spreading_never_takes_more_than_there_is_and_fills_what_the_bucket_can(rows):
    sources = {f"s{i}": SourceConfig(take=take, bucket=bucket) for i, (take, _, bucket) in enumerate(rows)}
    data = DataConfig(name="test", sources=sources, allow_short=True)
    available = {f"s{i}": have for i, (_, have, _) in enumerate(rows)}
    takes = plan_takes(data, available)
    assert all(0 <= takes[name] <= available[name] for name in takes)
    for bucket in {bucket for _, _, bucket in rows}:
        members = [(f"s{i}", take) for i, (take, _, b) in enumerate(rows) if b == bucket]
        can = sum(available[name] for name, take in members if take > 0)
        assert sum(takes[name] for name, _ in members) == min(sum(take for _, take in members), can)
        assert all(takes[name] >= min(take, available[name]) for name, take in members)


def test_a_total_that_is_not_met_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.total") as error:
        mixed(two_sources(tmp_path, total=51), tmp_path / "w")
    assert "data.total=50" in str(error.value)
    train, _, _ = mixed(two_sources(tmp_path, total=50), tmp_path / "v")
    assert len(train) == 50


# ---------------------------------------------------------------- bad rows


def test_lenient_mode_counts_every_reason_and_strict_mode_stops_at_file_and_line(tmp_path):
    """Traps 13, 15: bad rows and typed special tokens are dropped and counted; strict mode names file and line."""
    names = {
        "messages": "dirty_messages.jsonl",
        "sharegpt": "dirty_sharegpt.jsonl",
        "alpaca": "dirty_alpaca.jsonl",
        "prompt": "dirty_prompt.jsonl",
    }
    sources = {name: {"path": str(FIXTURES / file)} for name, file in names.items()}
    train, _, mix = mixed(recipe(sources), tmp_path / "w")
    reports = mix.reports
    assert reports["messages"].dropped["special_token_in_text"] == 4
    assert all(report.dropped["special_token_in_text"] for report in reports.values())
    assert reports["messages"].dropped["lone_surrogate"] == 1 and reports["messages"].dropped["bad_json"] == 2
    assert reports["messages"].repaired["leading_assistant_removed"] == 1
    assert reports["messages"].repaired["decoded_as_latin1"] == 1
    assert reports["prompt"].filtered["duplicate"] == 1
    for report in reports.values():
        assert report.read == report.converted + report.dropped.total()
        assert report.taken == report.kept > 0
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in train)
    text.encode("utf-8")
    assert "<|" not in text and "\x00" not in text
    with pytest.raises(UserError, match=r"dirty_messages\.jsonl:2\n.*bad_json"):
        mixed(recipe(sources, strict=True), tmp_path / "s")


def test_length_bounds_are_counted(tmp_path):
    path = write_rows(
        tmp_path / "a.jsonl", [{"prompt": "hi"}, {"prompt": "just right"}, {"prompt": "far too long " * 9}]
    )
    _, _, mix = mixed(recipe({"a": {"path": str(path)}}, min_prompt_chars=5, max_prompt_chars=50), tmp_path / "w")
    assert dict(mix.reports["a"].filtered) == {"too_short": 1, "too_long": 1}


def test_evaluation_items_are_kept_out_of_train_and_heldout(tmp_path):
    item = "A farmer has seventeen sheep and all but nine of them run away in the night, how many are left?"
    rows = [
        *prompts(20, "apple"),
        {"prompt": f"Please solve this: {item.upper()} Thanks."},
        {"messages": [{"role": "system", "content": item}, {"role": "user", "content": "Answer the riddle."}]},
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    train, heldout, mix = mixed(
        recipe({"a": {"path": str(path)}}, heldout_fraction=0.3), tmp_path / "w", {"riddles": [(item,)]}
    )
    assert dict(mix.reports["a"].contaminated) == {"riddles": 2} and mix.reports["a"].filtered["contaminated"] == 2
    assert not any("sheep" in json.dumps(row).lower() for row in train + heldout)
