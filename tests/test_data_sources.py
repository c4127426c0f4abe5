"""Files and hub rows: every form, every defect, streaming, one bad row never costs another one."""

import gzip
import json

import pytest
from helpers_data import FIXTURES, outcome, read_all, write_rows

from dflash_train.data import json_arrays
from dflash_train.data.forms import detect
from dflash_train.util.errors import UserError


def wanted(name: str) -> dict[int, str | None]:
    """Line number -> the reason the fixture itself asks for (None = kept); lines that are no JSON objects say it in
    their text."""
    out = {}
    for number, line in enumerate((FIXTURES / name).read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        text = line.decode("utf-8", "replace")
        if text.startswith("["):
            out[number] = "row_not_an_object"
        else:
            want = text.partition('"want": ')[2]
            out[number] = None if want.startswith("null") else want.split('"')[1]
    return out


@pytest.mark.parametrize("name", ["dirty_messages", "dirty_sharegpt", "dirty_alpaca", "dirty_prompt"])
@pytest.mark.parametrize("form", ["auto", "own"])
def test_every_dirty_row_is_dropped_for_its_own_reason_and_no_other_row_with_it(name, form):
    """Trap 13: every fixture line names the reason it must be dropped for, and the lines around it survive."""
    expected = wanted(f"{name}.jsonl")
    rows = read_all(FIXTURES / f"{name}.jsonl", form="auto" if form == "auto" else name.removeprefix("dirty_"))
    assert len(rows) == len(expected) >= 10
    for row in rows:
        number = int(row.location.rpartition(":")[2])
        result = outcome(row)
        got = result if isinstance(result, str) else None
        if form == "own" and expected[number] == "unknown_form":
            assert got == "empty_user"  # a named form knows what it misses
        elif form == "own" and row.id == "nested":
            assert (
                got == "message_not_an_object" or got == "content_not_text"
            )  # only `auto` sees messages in a prompt column
        else:
            assert got == expected[number], f"line {number}"


def test_repairs_leave_the_text_that_was_meant():
    kept = {row.id: outcome(row) for row in read_all(FIXTURES / "dirty_messages.jsonl")}
    assert kept["parts"] == [{"role": "user", "content": "Two parts,\none text."}]
    assert kept["number"][0]["content"] == "42"
    assert kept["starts_with_assistant"] == [{"role": "user", "content": "Go on, please."}]
    assert [m["content"] for m in kept["same_role"]] == [
        "First half.\n\nSecond half.",
        "One.\n\nTwo.",
        "Thanks, and then?",
    ]
    assert kept["empty_assistant"] == [{"role": "user", "content": "What is left?"}]
    assert [m["content"] for m in kept["switches"]] == [
        "Why is the sky blue?",
        "Because of scattering.",
        "And sunsets?",
    ]
    assert kept["whole_emoji"][0]["content"] == "a whole one \U0001f600 here"
    assert kept["controls"][0]["content"] == "nul  bell  zerowidth BOM\nnext\ttab"
    assert kept["raw_nul"][0]["content"] == "a raw nul  byte in the file"
    assert kept["latin1"][0]["content"] == "Café au lait, s'il vous plaît"
    assert kept["messages_text"] == [{"role": "user", "content": "Messages stored as JSON text."}]
    for messages in kept.values():
        if not isinstance(messages, str):
            json.dumps(messages).encode("utf-8")


def test_tool_calls_become_mappings_and_results_find_their_calls():
    kept = {row.id: outcome(row) for row in read_all(FIXTURES / "dirty_messages.jsonl")}
    _, asked, second, first = kept["parallel_calls"]
    assert [call["function"]["arguments"] for call in asked["tool_calls"]] == [{"city": "Paris"}, {"city": "Rome"}]
    assert (second["tool_call_id"], second["content"]) == ("b", '{"temp": 20}')
    assert (first["tool_call_id"], first["name"]) == ("a", "weather")
    _, asked, result, _, _ = kept["empty_arguments"]
    assert asked["tool_calls"][0]["function"]["arguments"] == {}
    assert result["tool_call_id"] == asked["tool_calls"][0]["id"]


def test_tools_become_json_schema_functions_whatever_they_were_stored_as():
    rows = {row.id: row for row in read_all(FIXTURES / "dirty_messages.jsonl")}
    tool = rows["parallel_calls"].tools[0]
    assert tool["type"] == "function" and tool["function"]["name"] == "weather"
    parameters = tool["function"]["parameters"]
    assert parameters["type"] == "object" and parameters["required"] == ["city"]
    assert parameters["properties"] == {"city": {"type": "string"}, "type": {}, "k": {"type": "number", "default": 1.5}}
    assert [tool["function"]["name"] for tool in rows["tools_texts"].tools] == ["f", "g"]
    assert rows["tools_text"].tools[0]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_alpaca_input_is_appended_unless_it_is_a_placeholder():
    kept = {row.id: outcome(row) for row in read_all(FIXTURES / "dirty_alpaca.jsonl")}
    assert kept["with_input"] == [{"role": "user", "content": "Sort these numbers.\n\n3 1 2"}]
    assert kept["noinput"][-1]["content"] == "Write a limerick."
    assert [m["role"] for m in kept["with_system"]] == ["system", "user"]


def test_persian_and_emoji_joiners_survive_cleaning():
    kept = {row.id: outcome(row) for row in read_all(FIXTURES / "dirty_sharegpt.jsonl")}
    assert kept["joiners"][0]["content"] == "مى\u200cخواهم emoji 👨\u200d👩\u200d👧 keep joiners"


def test_a_truncated_array_gives_every_whole_row_and_counts_the_rest_once():
    """Trap 13: a JSON file cut in the middle of a string."""
    rows = read_all(FIXTURES / "truncated_sharegpt.json")
    assert [row.id for row in rows[:-1]] == ["t0", "t1", "t2", "t3"]
    assert rows[-1].drop == "truncated_json"
    assert rows[-1].location.endswith(":5")


def test_array_rows_do_not_depend_on_where_chunks_end(tmp_path, monkeypatch):
    values = [{"prompt": f'Question {i} é\u4f60 "quoted" [x] {{y}}, ]', "n": i} for i in range(40)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1), "utf-8")
    whole = [outcome(row) for row in read_all(path)]
    assert len(whole) == 40
    for size in (1, 2, 7, 64):
        monkeypatch.setattr(json_arrays, "CHUNK_BYTES", size)
        assert [outcome(row) for row in read_all(path)] == whole


def test_latin1_arrays_and_jsonl_under_a_json_name_are_read(tmp_path):
    rows = read_all(FIXTURES / "latin1_array.json")
    assert [outcome(row)[0]["content"] for row in rows] == ["Où est le café?", "Là-bas, à gauche."]
    assert all(row.notes == ("decoded_as_latin1",) for row in rows)
    path = tmp_path / "lines.json"
    write_rows(path, [{"prompt": "one?"}, {"prompt": "two?"}])
    assert [outcome(row)[0]["content"] for row in read_all(path)] == ["one?", "two?"]


def test_gzip_folder_glob_and_byte_order_mark(tmp_path):
    (tmp_path / "sub").mkdir()
    write_rows(tmp_path / "a.jsonl", [{"prompt": "from a"}])
    (tmp_path / "sub" / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "from b"}\n'))
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "from c"}\n')
    (tmp_path / "notes.txt").write_text("not data")
    texts = lambda path: [outcome(row)[0]["content"] for row in read_all(path)]
    assert texts(tmp_path) == ["from a", "from c", "from b"]
    assert texts(tmp_path / "*.jsonl") == ["from a", "from c"]


def test_a_cut_gzip_gives_its_whole_lines_and_one_counted_drop(tmp_path):
    body = gzip.compress("".join(json.dumps({"prompt": f"q {i * 7919}"}) + "\n" for i in range(3000)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(body[: len(body) // 2])
    rows = read_all(tmp_path / "cut.jsonl.gz")
    assert len(rows) > 100
    assert [row.drop for row in rows if row.drop] == ["truncated_gzip"]


def test_parquet_rows_have_no_nulls_of_other_rows(tmp_path):
    """Trap 12: a columnar file gives every row the union of nested keys."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    call = lambda arguments: [
        {"role": "user", "content": "Go?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}],
        },
    ]
    pq.write_table(
        pa.Table.from_pylist([{"messages": call({"city": "Oslo"})}, {"messages": call({"n": 3})}]),
        tmp_path / "x.parquet",
    )
    assert (
        pq.read_table(tmp_path / "x.parquet").to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"][
            "n"
        ]
        is None
    )
    rows = [outcome(row) for row in read_all(tmp_path / "x.parquet")]
    assert [m[1]["tool_calls"][0]["function"]["arguments"] for m in rows] == [{"city": "Oslo"}, {"n": 3}]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    assert [row.drop for row in read_all(tmp_path)] == ["bad_parquet", None, None]


def test_a_missing_path_is_named():
    with pytest.raises(UserError, match=r"data\.sources\.mine\.path"):
        read_all("/nowhere/at/all.jsonl")


def test_detect_prefers_conversations_and_is_a_function_of_the_row_alone():
    turns = [{"role": "user", "content": "x"}]
    assert detect({"messages": turns, "prompt": "x"}) == "messages"
    assert detect({"prompt": "x", "conversations": [{"from": "human", "value": "x"}]}) == "sharegpt"
    assert detect({"prompt": turns}) == "messages"
    assert detect({"instruction": "x", "question": "y"}) == "alpaca"
    native = {"messages": turns, "source": "s", "license": "l", "bucket": "b", "split": "train", "thinking": "on"}
    assert detect(native) == "native"
    assert detect(dict(reversed(native.items()))) == "native"


def test_rows_without_an_id_get_one_from_their_content(tmp_path):
    first = read_all(write_rows(tmp_path / "a.jsonl", [{"prompt": "one?"}, {"prompt": "two?"}]))
    second = read_all(write_rows(tmp_path / "b.jsonl", [{"prompt": "two?"}, {"prompt": "one?"}]))
    assert [row.id for row in first] == [row.id for row in reversed(second)]
    assert first[0].id != first[1].id


def test_column_options_name_other_columns(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"task": "Why?", "sys": "Be kind.", "key": 7, "prompt": "no"}])
    rows = read_all(path, prompt_field="task", system_field="sys", id_field="key")
    assert (rows[0].id, outcome(rows[0])) == (
        "7",
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why?"}],
    )
