"""Row forms: what one row of a data set looks like, turned into a raw conversation.

    messages   {"messages": [{"role", "content", ...}], "tools"?}            OpenAI
    sharegpt   {"conversations": [{"from", "value"}], "tools"?, "system"?}
    alpaca     {"instruction", "input"?, "system"?}
    prompt     {"prompt" | "question" | "query" | "problem": text} or {"turns": [text, ...]}
    native     a canonical row of this project, with its own id, licence and thinking mode
    auto       whichever of these a row's own keys say, in the order of `detect`

A form only finds the parts; `clean.py` repairs or refuses them.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_train.data.schemas import clean_tools
from dflash_train.data.text import PLACEHOLDERS, SURROGATE, Drop, clean_text, parse_literal

ID_KEYS = ("id", "uuid", "prompt_id", "conversation_id", "task_id", "question_id", "_id")
PROMPT_KEYS = ("prompt", "question", "query", "problem", "turns")


@dataclass
class RawRow:
    """One row of a source, before cleaning: `messages` hold a raw conversation, or `drop` says what is wrong with the
    row, or `skip` which rule of the source left it out (that is no defect, and strict mode does not mind it).

    location: file:line, for messages. group: rows of one group never fall on both sides of the hold-out (None = alone).
    unique: rows of one source with equal `unique` are one question, of which the mixer keeps the first. kind: a subset
    inside the source (OpenOrca's "t0") whose share the recipe may cap. notes: repairs worth counting.
    """

    location: str
    id: str = ""
    messages: object = None
    tools: object = None
    upstream: dict = field(default_factory=dict)
    license: str | None = None
    thinking: str | None = None
    group: str | None = None
    unique: str | None = None
    kind: str | None = None
    notes: tuple[str, ...] = ()
    drop: str | None = None
    skip: str | None = None


def row_id(row: dict, id_field: str | None = None) -> str:
    """The row's own id, else a hash of its content: never its place in the file, which changes between revisions."""
    for key in (id_field,) if id_field else ID_KEYS:
        value = row.get(key)
        if isinstance(value, int | str) and not isinstance(value, bool) and str(value).strip():
            text = " ".join(str(value).split())
            usable = len(text) <= 120 and not SURROGATE.search(text)
            return text if usable else hashlib.sha1(text.encode("utf-8", "surrogatepass")).hexdigest()
    text = json.dumps(row, sort_keys=True, default=str)  # str: Parquet has dates and bytes
    return hashlib.sha1(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]


def _list(value: object, reason: str) -> list:
    if isinstance(value, str):
        value = parse_literal(value)
    if not isinstance(value, list):
        raise Drop(reason)
    return value


def _with_system(system: object, messages: list) -> list:
    return [{"role": "system", "content": system}, *messages] if system else messages


def from_messages(row: dict, prompt_field: str | None, system_field: str | None) -> list:
    """The OpenAI form; a `prompt` column that holds a message list counts too."""
    value = next((row[key] for key in ("messages", "conversations", "prompt") if row.get(key) is not None), None)
    return _with_system(row.get(system_field) if system_field else None, _list(value, "messages_not_a_list"))


def from_sharegpt(row: dict, prompt_field: str | None, system_field: str | None) -> list:
    """ShareGPT: from/value turns."""
    turns = _list(row.get("conversations", row.get("messages")), "messages_not_a_list")
    if not all(isinstance(turn, dict) for turn in turns):
        raise Drop("message_not_an_object")
    messages = [{"role": turn.get("from"), "content": turn.get("value")} for turn in turns]
    return _with_system(row.get(system_field or "system"), messages)


def from_alpaca(row: dict, prompt_field: str | None, system_field: str | None) -> list:
    """Instruction with optional input. The row's own answer is not read: the target answers anew."""
    instruction, extra = row.get(prompt_field or "instruction"), row.get("input")
    if isinstance(extra, str) and isinstance(instruction, str) and extra.strip() and extra.strip() not in PLACEHOLDERS:
        instruction = f"{instruction}\n\n{extra}"
    return _with_system(row.get(system_field or "system"), [{"role": "user", "content": instruction}])


def from_prompt(row: dict, prompt_field: str | None, system_field: str | None) -> list:
    """A prompt alone. Of several turns only the first can be asked, since the later ones wait for an answer."""
    value = row.get(prompt_field) if prompt_field else next((row[k] for k in PROMPT_KEYS if row.get(k)), None)
    if isinstance(value, list):
        value = value[0] if value else None
    return _with_system(row.get(system_field or "system"), [{"role": "user", "content": value}])


FORMS: dict[str, Callable[[dict, str | None, str | None], list]] = {
    "messages": from_messages,
    "native": from_messages,
    "sharegpt": from_sharegpt,
    "alpaca": from_alpaca,
    "prompt": from_prompt,
}
KNOWN_FORMS = ("auto", *FORMS)


def detect(row: dict) -> str:
    """The form that a row's keys and first turn say; the same row always gives the same answer. Raises Drop."""
    for key, usual in (("messages", "messages"), ("conversations", "sharegpt")):
        if row.get(key) is None:
            continue
        turns = parse_literal(row[key]) if isinstance(row[key], str) else row[key]
        first = turns[0] if isinstance(turns, list) and turns else None
        if key == "messages" and {"source", "license", "bucket", "split", "thinking"} <= row.keys():
            return "native"
        if isinstance(first, dict):
            return "sharegpt" if "from" in first else "messages"
        return usual
    if isinstance(row.get("prompt"), list):
        return "messages"
    if "instruction" in row:
        return "alpaca"
    if any(key in row for key in PROMPT_KEYS):
        return "prompt"
    raise Drop("unknown_form")


def convert(
    row: object,
    form: str,
    location: str,
    upstream: dict,
    *,
    prompt_field: str | None = None,
    system_field: str | None = None,
    id_field: str | None = None,
) -> RawRow:
    """One decoded row -> RawRow; a row that does not fit comes back with its `drop` reason."""
    if not isinstance(row, dict):
        return RawRow(location, drop="row_not_an_object")
    try:
        name = form if form != "auto" else "prompt" if prompt_field else detect(row)
        raw = RawRow(
            location,
            row_id(row, id_field),
            FORMS[name](row, prompt_field, system_field),
            clean_tools(row.get("tools")),
            upstream,
        )
        if isinstance(row.get("license"), str) and row["license"].strip():
            raw.license = clean_text(row["license"])
        if name == "native":
            raw.thinking = row.get("thinking")
            if raw.thinking not in (None, "on", "off"):
                raise Drop("bad_thinking_mode")
    except Drop as drop:
        return RawRow(location, drop=drop.reason)
    except RecursionError:
        return RawRow(location, drop="nested_too_deep")
    return raw
