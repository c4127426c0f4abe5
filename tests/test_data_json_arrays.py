"""A JSON array with broken elements: each costs itself, the rows after it survive, and what is lost is counted."""

import io
import json
import random
import zlib

import pytest
from helpers_data import mixed, read_all, recipe
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_train.data import json_arrays
from dflash_train.data.json_arrays import Bad, array_rows


def row(i: int) -> dict:
    text = f'Nr. {i}: "quoted" \\ [x], {{y}}, é\u4f60 }}, {{ '
    said = [{"role": "user", "content": text}, {"role": "assistant", "content": "]"}]
    return {"id": i, "messages": said, "score": 0.5, "tags": [[], {}, [i]]}


BREAKS = {
    "a trailing comma": lambda text: text[:-1] + ",}",
    "no value": lambda text: text.replace("0.5", "undefined", 1),
    "no quotes": lambda text: text.replace('"score"', "score", 1),
    "no JSON": lambda text: "None and more",
    "an escape that is none": lambda text: text.replace("Nr.", "\\x41", 1),
    "an endless number": lambda text: text.replace("0.5", "9" * 5000, 1),
    "deep nesting": lambda text: text.replace("0.5", "[" * 3000 + "]" * 3000, 1),
    "a string cut with its row": lambda text: text[: text.index("quoted")],
    "a string that is not closed": lambda text: text.replace('"user"', '"user', 1),
    "a bracket that is not closed": lambda text: text.replace('"tags": [', '"tags": [[', 1),
    "a bracket too many": lambda text: text.replace('"tags": [', '"tags": []], [', 1),
    "brackets that do not match": lambda text: text.replace('"tags": [', '"tags": [}', 1),
    "a brace that is not closed": lambda text: text[:-1],
    "nested garbage": lambda text: text.replace("0.5", '{"a": [[{"b": }, 5] "c" {{', 1),
}  # fmt: skip


def array(count: int, broken: dict[int, str], indent: int | None = None) -> str:
    rows = [json.dumps(row(i), ensure_ascii=False, indent=indent) for i in range(count)]
    return "[" + ",\n ".join(BREAKS[broken[i]](text) if i in broken else text for i, text in enumerate(rows)) + "]"


def test_every_break_breaks_rows_of_either_layout():
    for broken in BREAKS.values():
        for indent in (None, 1):
            assert not _sound(broken(json.dumps(row(1), indent=indent)).encode())


def parsed(text: str) -> tuple[list, list[Bad]]:
    found = list(array_rows(io.BytesIO(text.encode()), "utf-8"))
    return [one for one in found if not isinstance(one, Bad)], [one for one in found if isinstance(one, Bad)]


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("at", [0, 3, 8])
def test_a_broken_element_costs_itself_alone(kind, at):
    text = array(9, {at: kind})
    with pytest.raises((ValueError, RecursionError)):
        json.loads(text)
    rows, bad = parsed(text)
    assert rows == [row(i) for i in range(9) if i != at]
    assert [one.reason for one in bad] in (["bad_json"], ["truncated_json"] if at == 8 else [])
    lost = len(BREAKS[kind](json.dumps(row(at), ensure_ascii=False)).encode())
    assert lost * 0.9 <= bad[0].lost <= lost + 5


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.dictionaries(st.integers(0, 11), st.sampled_from(sorted(BREAKS)), min_size=1, max_size=4),
       st.sampled_from([1, 7, 100, 1 << 20]), st.sampled_from([None, 1]))  # fmt: skip
def test_all_whole_rows_survive_wherever_chunks_end(broken, chunk, indent):
    before, json_arrays.CHUNK_BYTES = json_arrays.CHUNK_BYTES, chunk
    try:
        rows, bad = parsed(array(12, broken, indent))
    finally:
        json_arrays.CHUNK_BYTES = before
    assert rows == [row(i) for i in range(12) if i not in broken]
    assert 1 <= len(bad) <= 2 * len(broken)


def test_text_behind_a_row_costs_no_row():
    rows, bad = parsed('[{"id": 1} and more, {"id": 2}, {"id": 3}} , {"id": 4}]')
    assert [one["id"] for one in rows] == [1, 2, 3, 4] and [one.reason for one in bad] == ["bad_json"] * 2


def test_values_that_json_lacks_are_rows_still():
    rows, bad = parsed('[{"id": NaN}, NaN, {"id": -Infinity}, [1], "x", {"id": 2}]')
    assert len(rows) == 6 and not bad and rows[3:] == [[1], "x", {"id": 2}]


def test_a_cut_array_gives_its_whole_rows_and_counts_the_bytes_of_the_rest():
    text = array(4, {}).encode()
    ends = [i for i in range(len(text)) if text[: i + 1].endswith(b"]}") and _sound(text[: i + 1] + b"]")]
    for size in random.Random(0).sample(range(2, len(text)), 120):
        found = list(array_rows(io.BytesIO(text[:size]), "utf-8"))
        whole = sum(end < size for end in ends)
        assert found[:-1] == [row(i) for i in range(whole)], size
        assert found[-1].reason == "truncated_json"
        assert found[-1].lost <= size - (ends[whole - 1] + 1 if whole else 1)
        assert found[-1].lost >= size - (ends[whole - 1] + 4 if whole else 1) - 3


def _sound(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def test_several_arrays_in_one_file_are_all_read():
    rows, bad = parsed(array(2, {}) + "\n" + array(2, {}) + ",\n" + array(1, {}))
    assert rows == [row(i) for i in (0, 1, 0, 1, 0)] and [one.reason for one in bad] == ["bad_json"] * 2
    assert parsed("[]") == parsed(" [ ]\n ") == ([], [])


def test_an_element_without_end_is_searched_through_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(json_arrays, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(json_arrays, "_LOOK_CHARS", 5000)
    longest = []
    real = json_arrays._Window.more
    monkeypatch.setattr(json_arrays._Window, "more", lambda self: (real(self), longest.append(len(self.text))))
    endless = '{"id": 1, "x": {"a": oops, ' + '"b": "no end", ' * 9000
    rows, bad = parsed(f'[{{"id": 0}}, {endless}, {{"id": 2}}, {{"id": 3}}]')
    assert rows == [{"id": 0}, {"id": 2}, {"id": 3}] and max(longest) < 20_000
    assert len(bad) == 1 and abs(bad[0].lost - len(endless)) < 5


def damaged(before: bytes, after: bytes) -> bytes:
    """A gzip file whose second part begins with a block of a kind that there is not."""
    packer = zlib.compressobj(wbits=31)
    first = packer.compress(before) + packer.flush(zlib.Z_FULL_FLUSH)
    return first + b"\x07" + (packer.compress(after) + packer.flush())[1:]


def test_losses_are_in_the_mixes_report(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    text = array(30, {4: "nested garbage", 9: "no value"})
    (source / "a.json").write_text(text[: len(text) - 100])
    lines = [json.dumps({"id": f"z{i}", "prompt": f"q {i * 7919}?"}).encode() + b"\n" for i in range(3000)]
    zipped = damaged(b"".join(lines[:2000]), b"".join(lines[2000:]))
    (source / "b.jsonl.gz").write_bytes(zipped)
    (source / "c.jsonl").write_text('{"id": "c", "prompt": "And this?"}\n{"id": "d", "prompt": \n')
    train, _, mix = mixed(recipe({"a": {"path": str(source)}}), tmp_path / "w")
    report = mix.reports["a"]
    assert dict(report.dropped) == {"bad_json": 3, "truncated_json": 1, "truncated_gzip": 1}
    kept = {one["id"] for one in train}
    assert kept >= {f"a/{i}" for i in range(29) if i not in (4, 9)} | {"a/c", "a/z0", "a/z1500"}
    assert set(report.lost) == {"bad_json, bytes", "truncated_json, bytes", "truncated_gzip, bytes of the .gz"}
    assert 0 <= report.lost["truncated_gzip, bytes of the .gz"] < len(zipped)
    assert report.lost["truncated_json, bytes"] < 300


def test_a_damaged_gzip_array_gives_the_rows_before_the_damage(tmp_path):
    text = json.dumps([{"id": i, "prompt": f"q {i * 7919}?"} for i in range(4000)]).encode()
    (tmp_path / "a.json.gz").write_bytes(damaged(text[:100_000], text[100_000:]))
    rows = read_all(tmp_path / "a.json.gz")
    assert [one.drop for one in rows if one.drop] == ["truncated_gzip"]
    whole = text[:100_000].count(b"}")
    assert 0.7 * whole < len(rows) <= whole + 1 and [one.id for one in rows[:-1]] == [
        str(i) for i in range(len(rows) - 1)
    ]
