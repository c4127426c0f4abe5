"""The mixer on sources larger than their takes: how much is read, kept and prepared bounds work and memory, and never
changes the result."""

import itertools
import json
import random
from math import ceil
from pathlib import Path

import pytest
from helpers_data import mixed, prompts, recipe, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.config import SourceConfig
from dflash_train.data import mixture
from dflash_train.data.forms import RawRow
from dflash_train.data.mixing import pool, sift
from dflash_train.data.mixing.candidates import prepare
from dflash_train.data.mixing.sift import Lowest, Place, SiftJob, read_places
from dflash_train.util.errors import UserError
from dflash_train.util.provenance import stable_hash

WORDS = [f"word{i}" for i in range(300)]


def text(rng: random.Random, count: int = 60) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def dirty_sources(folder: Path, num: int = 400) -> dict[str, dict]:
    """Two code sources and one of questions, with exact and near duplicates, bad rows, repeated ids and questions."""
    rng, folder = random.Random(5), folder / "sources"
    folder.mkdir(exist_ok=True)
    base = [text(rng) for _ in range(num)]
    rows: dict[str, list] = {"a": [], "b": [], "c": []}
    for i in range(num):
        rows["a"].append({"id": f"a{i % (num - 40)}", "prompt": base[i] if i % 11 else base[i - i % 7]})
        changed = base[i].split()
        changed[30] = "changed"
        quote = f"{text(rng)} {' '.join(changed[:25])}"
        rows["b"].append({"id": f"b{i}", "prompt": (" ".join(changed), quote, text(rng))[i % 3]})
        question = text(rng, 9) if i % 4 else f"question {i % 60}"
        rows["c"].append({"id": f"{('t0', 't0', 'flan')[i % 3]}.{i}", "system_prompt": f"{i}", "question": question})
        if i % 13 == 0:
            rows["abc"[i % 3]].append({"id": f"bad{i}", "prompt": "", "question": None})
    paths = {name: str(write_rows(folder / f"{name}.jsonl", lines)) for name, lines in rows.items()}
    return {
        "a": {"path": paths["a"], "take": 60, "bucket": "code", "form": "prompt"},
        "b": {"path": paths["b"], "take": 70, "bucket": "code", "form": "prompt"},
        "c": {"path": paths["c"], "take": 50, "form": "openorca", "caps": {"t0": 0.5}},
    }


def dirty(folder: Path, **values):
    near = {"buckets": ["code"], "threshold": 0.8}
    defaults = {"heldout_fraction": 0.3, "reserve_fraction": 0.2, "near_duplicates": near, "decontaminate": ["heldout"]}
    return recipe(dirty_sources(folder), **{**defaults, **values})


def everything(data, workspace: Path) -> tuple[list, dict]:
    train, heldout, mix = mixed(data, workspace)
    return [train, heldout, list(mix.rows("reserve"))], mix.reports


def test_every_filter_has_work_in_these_sources(tmp_path):
    rows, reports = everything(dirty(tmp_path), tmp_path / "w")
    found = {reason for report in reports.values() for reason in report.filtered}
    assert found == {"duplicate", "same_question", "over_cap", "near_duplicate", "contaminated"}
    assert [len(split) for split in rows] == [180, 54, 36]
    assert reports["b"].contaminated == {"heldout": reports["b"].filtered["contaminated"]}


@pytest.mark.parametrize(
    ("margin", "depth", "spare", "chunk"), [(1.0, 1.0, 1, 7), (1.0, 1.3, 3, 50), (9.0, 9.0, 999, 2000)]
)
def test_how_much_is_read_and_prepared_at_a_time_changes_no_row(tmp_path, monkeypatch, margin, depth, spare, chunk):
    """The first case starts with exactly the rows that are needed, so filters leave every source short: more rows are
    prepared, and the sources are read again, deeper."""
    expected, _ = everything(dirty(tmp_path), tmp_path / "1")
    for name, value in (("MARGIN", margin), ("DEPTH", depth), ("MIN_SPARE", spare), ("CHUNK_ROWS", chunk)):
        monkeypatch.setattr(pool, name, value)
    reads = []
    monkeypatch.setattr(mixture, "sift", lambda job: reads.append(job.name) or sift.sift(job))
    got, reports = everything(dirty(tmp_path), tmp_path / "2")
    assert got == expected
    assert (len(reads) > 3) == (margin == 1.0) == all(report.not_needed for report in reports.values())
    for report in reports.values():
        assert report.read == report.converted + report.dropped.total() + report.skipped.total() + report.not_needed
        assert report.prompts == report.kept + report.filtered.total()
        assert report.kept >= report.taken + report.heldout + report.reserve


def test_two_processes_write_the_same_bytes_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "CHUNK_ROWS", 40)
    one, reports = everything(dirty(tmp_path), tmp_path / "1")
    counted = []
    data = dirty(tmp_path, num_processes=2)
    (tmp_path / "2").mkdir()
    mix = mixture.build_mix(data, {}, tmp_path / "2", on_row=counted.append)
    two = [list(mix.rows(split)) for split in ("train", "heldout", "reserve")]
    assert json.dumps(two) == json.dumps(one) and mix.reports == reports
    prepared = sum(report.converted + report.dropped.total() for report in reports.values())
    assert sum(counted) == sum(report.read for report in reports.values()) + prepared


def test_caps_without_a_take_are_refused_since_they_are_shares_of_it():
    with pytest.raises(UserError, match=r"data\.sources\.a\.caps") as error:
        recipe({"a": {"path": "x", "caps": {"t0": 0.5}}})
    assert "data.sources.a.take=" in str(error.value)
    recipe({"a": {"path": "x", "caps": {"t0": 0.5}, "take": 9}, "b": {"path": "x"}})


@pytest.mark.parametrize("turns", ["one", "all"])
def test_chunks_are_bounded_in_bytes_and_change_no_row(tmp_path, monkeypatch, turns):
    """All turns of a session are written with all before them, so that of such rows fewer go into a chunk."""
    said = lambda i: [{"role": role, "content": f"{role} says {i} {text(random.Random(i), 30)}"}
                      for _ in range(1 + i % 4) for role in ("user", "assistant")]  # fmt: skip
    path = write_rows(tmp_path / "a.jsonl", [{"id": f"s{i}", "messages": said(i)} for i in range(60)])
    near = {"buckets": ["code"]}
    data = recipe({"a": {"path": str(path), "bucket": "code"}}, turns=turns, heldout_fraction=0.2, near_duplicates=near)
    expected, _ = everything(data, tmp_path / "1")
    sizes = []
    monkeypatch.setattr(mixture, "prepare", lambda job: sizes.append([p.size for p, _ in job.places]) or prepare(job))
    monkeypatch.setattr(pool, "CHUNK_BYTES", 3000 * (pool.TURNS_A_ROW if turns == "all" else 1))
    assert everything(data, tmp_path / "2")[0] == expected
    assert len(sizes) > 10 and all(sum(size) <= 3000 or len(size) == 1 for size in sizes)
    assert {len(size) == 1 for size in sizes} == {True, False}


@pytest.mark.parametrize("first_is_bad", [True, False])
def test_a_chunk_without_one_usable_row_is_none_among_the_near_duplicates(tmp_path, monkeypatch, first_is_bad):
    monkeypatch.setattr(pool, "CHUNK_ROWS", 1)
    near = text(random.Random(1))
    rows = [{"id": f"r{i}", "prompt": "" if (i % 3 == 0) == first_is_bad else f"{near} {i}"} for i in range(9)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    data = recipe({"a": {"path": str(path), "bucket": "code"}}, near_duplicates={"buckets": ["code"]})
    (train, _, _), reports = everything(data, tmp_path / "w")
    assert len(train) == 1 and reports["a"].dropped["empty_user"] in (3, 6)
    assert reports["a"].filtered == {"near_duplicate": 8 - reports["a"].dropped["empty_user"]}
    none = write_rows(tmp_path / "b.jsonl", [{"prompt": ""}] * 4)
    data.sources["a"].path, data.allow_short = str(none), True
    assert everything(data, tmp_path / "v")[0][0] == []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 50)), st.integers(1, 9), st.integers(1, 120))
def test_chunks_hold_every_place_once_and_in_order(sizes, most_rows, most_bytes):
    places = [Place(i, 0, 0, size) for i, size in enumerate(sizes)]
    found = list(pool.chunks(places, most_rows, most_bytes))
    assert [place for chunk in found for place in chunk] == places and all(found)
    for chunk, following in itertools.zip_longest(found, found[1:], fillvalue=[]):
        weight = sum(place.size for place in chunk)
        assert len(chunk) <= most_rows and (weight <= most_bytes or len(chunk) == 1)
        assert not following or len(chunk) == most_rows or weight + following[0].size > most_bytes


def test_no_two_rows_are_alike_and_no_train_row_repeats_a_held_out_one(tmp_path):
    (train, heldout, reserve), _ = everything(dirty(tmp_path), tmp_path / "w")
    grams = lambda row, n: set(zip(*(row["messages"][-1]["content"].split()[i:] for i in range(n)), strict=False))
    code = [row for row in train + heldout + reserve if row["bucket"] == "code"]
    alike = [
        (a["id"], b["id"]) for a, b in itertools.combinations(code, 2)
        if len(grams(a, 5) & grams(b, 5)) >= 0.8 * len(grams(a, 5) | grams(b, 5))
    ]  # fmt: skip
    assert alike == []
    held = set().union(*(grams(row, 13) for row in heldout))
    assert not any(grams(row, 13) & held for row in train + reserve)
    assert len({row["id"] for row in train + heldout + reserve}) == 180 + 54 + 36
    questions = [row["messages"][-1]["content"] for row in train + heldout + reserve if row["source"] == "c"]
    assert len(set(questions)) == len(questions)


def test_a_capped_kind_has_its_share_and_no_more(tmp_path):
    (train, _, reserve), reports = everything(dirty(tmp_path), tmp_path / "w")
    count = lambda rows: sum(row["id"].startswith("c/t0.") for row in rows if row["source"] == "c")
    assert count(train) == 25 and reports["c"].filtered["over_cap"] > 0
    assert count(train) + count(reserve) <= 0.5 * 60
    sources = dirty_sources(tmp_path)
    uncapped, _, _ = mixed(recipe({"c": {**sources["c"], "caps": {}}}), tmp_path / "2")
    assert count(uncapped) > 25


def test_the_reserve_is_what_a_larger_take_would_add(tmp_path):
    path = str(write_rows(tmp_path / "a.jsonl", prompts(300, "apple")))
    table = lambda take: {"a": {"path": path, "take": take}}
    small, _, mix = mixed(recipe(table(100), reserve_fraction=0.25, heldout_fraction=0.05), tmp_path / "1")
    reserve = list(mix.rows("reserve"))
    large, _, _ = mixed(recipe(table(125), heldout_fraction=0.05), tmp_path / "2")
    ids = lambda rows: [row["id"] for row in rows]
    assert len(reserve) == 25 and {row["split"] for row in reserve} == {"reserve"}
    assert set(ids(large)) == set(ids(small)) | set(ids(reserve))
    order = [stable_hash(0, "a", id_.removeprefix("a/")) for id_ in ids(reserve)]
    assert order == sorted(order)
    limited, _, mix = mixed(recipe(table(100), reserve_fraction=0.25), tmp_path / "3", limit=10)
    assert (len(limited), len(list(mix.rows("reserve")))) == (10, ceil(2.5))


def test_a_reserve_that_cannot_be_filled_is_as_large_as_it_can_be(tmp_path):
    path = str(write_rows(tmp_path / "a.jsonl", prompts(105, "apple")))
    train, _, mix = mixed(recipe({"a": {"path": path, "take": 100}}, reserve_fraction=0.5), tmp_path / "w")
    assert (len(train), mix.reports["a"].reserve) == (100, 5)


def test_a_deficit_is_filled_from_rows_that_were_not_read_before(tmp_path):
    a = str(write_rows(tmp_path / "a.jsonl", prompts(10, "apple")))
    b = str(write_rows(tmp_path / "b.jsonl", prompts(2000, "berry")))
    sources = {"a": {"path": a, "take": 900}, "b": {"path": b, "take": 5}}
    train, _, mix = mixed(recipe(sources, allow_short=True), tmp_path / "w")
    assert (mix.reports["a"].taken, mix.reports["b"].taken, len(train)) == (10, 895, 905)


def test_rows_of_one_group_are_on_one_side_and_keep_their_hash_order(tmp_path):
    session = lambda i: {"trajectory_id": f"t{i}", "repo": f"org/r{i % 40}", "license": "mit", "resolved": 1,
                         "messages": [{"role": "user", "content": f"Repair number {i}, please."}]}  # fmt: skip
    path = str(write_rows(tmp_path / "a.jsonl", [session(i) for i in range(400)]))
    source = {"path": path, "take": 120, "form": "open_swe"}
    train, heldout, _ = mixed(recipe({"a": source}, heldout_fraction=0.2), tmp_path / "w")
    repo = lambda row: int(row["id"].removeprefix("a/t")) % 40
    assert len(heldout) == 24 and not {repo(row) for row in train} & {repo(row) for row in heldout}


# ---------------------------------------------------------------- the first look


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60), st.integers(0, 12))
def test_the_lowest_are_those_that_sorting_finds_whatever_the_order_of_rows(orders, limit):
    places = [Place(order, tie, offset, 1) for offset, (order, tie) in enumerate(dict.fromkeys(orders))]
    for arrival in (places, places[::-1]):
        lowest = Lowest(limit)
        for place in arrival:
            if lowest.wants(place.order):
                lowest.add(place)
        assert lowest.places() == sorted(places)[:limit]
        assert lowest.complete == (len(places) <= limit)
        assert lowest.live_bytes == min(len(places), limit)


def test_a_spool_stays_small_and_gives_every_row_back_as_it_came(tmp_path, monkeypatch):
    content = ["\ud83d", {"n": 1.5}, None]
    odd = {
        "location": "f:1", "messages": [{"role": "user", "content": content}], "tools": [{"a": "\u00e9"}],
        "upstream": {"row": 1}, "license": "MIT", "thinking": "on", "group": "g", "unique": "u", "kind": "k",
    }  # fmt: skip
    rows = [RawRow(id=f"r{i}", notes=("decoded_as_latin1",), **odd) for i in range(2000)]
    monkeypatch.setattr(sift, "read_source", lambda *args: iter(rows))
    monkeypatch.setattr(sift, "_MIN_GARBAGE", 0)
    job = SiftJob("a", SourceConfig(), recipe({"a": {"path": "x"}}), tmp_path / "raw.jsonl", 0, 20)
    found = sift.sift(job)
    back = list(read_places(found.spool, found.train))
    wanted = sorted(rows, key=lambda row: stable_hash(0, "a", row.id))[:20]
    assert [row.id for row in back] == [row.id for row in wanted] and not found.train_complete
    assert all(vars(row) == {**vars(wanted[i]), "notes": list(wanted[i].notes)} for i, row in enumerate(back))
    assert found.spool.stat().st_size < 45 * len(found.spool.read_bytes().splitlines()[0])


def test_what_json_cannot_hold_is_dropped_as_no_text(tmp_path, monkeypatch):
    class Date:
        pass

    rows = [
        RawRow("f:1", "x", [{"role": "user", "content": Date()}]),
        RawRow("f:2", "y", [{"role": "user", "content": "Why?"}]),
    ]
    monkeypatch.setattr(sift, "read_source", lambda *args: iter(rows))
    train, _, mix = mixed(recipe({"a": {"path": "x"}}), tmp_path / "w")
    assert [row["id"] for row in train] == ["a/y"] and dict(mix.reports["a"].dropped) == {"content_not_text": 1}
