"""What the tests of row forms share: fixture rows, what becomes of one row, and the grammar a renderer relies on."""

import json
from itertools import pairwise

from helpers_data import FIXTURES

from dflash_train.data.clean import clean_messages
from dflash_train.data.forms import FORMS, RawRow, convert
from dflash_train.data.text import Drop

FORM_FIXTURES = FIXTURES / "forms"
NAMED_FORMS = tuple(sorted(path.stem for path in FORM_FIXTURES.glob("*.jsonl") if path.stem in FORMS))


def fixture_rows(form: str) -> list[dict]:
    return [json.loads(line) for line in (FORM_FIXTURES / f"{form}.jsonl").read_text("utf-8").splitlines()]


def result(raw: RawRow) -> dict:
    """{drop} or {skip}, or the canonical parts of a row, without those that are not there."""
    if raw.drop or raw.skip:
        return {"drop": raw.drop} if raw.drop else {"skip": raw.skip}
    repairs = set(raw.notes)
    try:
        messages = clean_messages(raw.messages, repairs)
    except Drop as drop:
        return {"drop": drop.reason}
    parts = {key: getattr(raw, key) for key in ("id", "license", "thinking", "group", "unique", "kind")}
    parts |= {"repairs": sorted(repairs), "messages": messages, "tools": raw.tools}
    return {key: value for key, value in parts.items() if value not in (None, [])}


def convert_fixture(form: str) -> list[dict]:
    rows = fixture_rows(form)
    return [result(convert(row, form, f"{form}:{n}", {"row": n})) for n, row in enumerate(rows, 1)]


def check_grammar(messages: list[dict], tools: list[dict] | None) -> None:
    """What a chat template may take for granted; asserts it."""
    json.dumps([messages, tools], allow_nan=False).encode("utf-8")
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    assert turns and turns[0] == "user" and "system" not in turns
    follows = {"user": ("assistant",), "assistant": ("user", "tool"), "tool": ("user", "assistant", "tool")}
    assert all(after in follows[before] for before, after in pairwise(turns))
    open_calls = 0
    for message in messages:
        assert isinstance(message["content"], str)
        calls = message.get("tool_calls", [])
        assert message["content"] or calls or message["role"] == "tool"
        for call in calls:
            assert call["type"] == "function" and isinstance(call["id"], str)
            assert isinstance(call["function"]["name"], str) and call["function"]["name"]
            assert isinstance(call["function"]["arguments"], dict)
        if message["role"] == "tool":
            assert isinstance(message["tool_call_id"], str) and isinstance(message["name"], str)
            open_calls -= 1
            assert open_calls >= 0
        else:
            open_calls = len(calls)
    for tool in tools or ():
        assert set(tool) == {"type", "function"} and set(tool["function"]) == {"name", "description", "parameters"}
        assert isinstance(tool["function"]["parameters"], dict) and isinstance(tool["function"]["name"], str)
