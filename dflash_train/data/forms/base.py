"""What every row form shares: the raw row it fills, the hints it gets beside the row, and how a row is named."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from dflash_train.data.text import SURROGATE, Drop, parse_literal

ID_KEYS = ("id", "uuid", "prompt_id", "conversation_id", "trajectory_id", "traj_id", "task_id", "question_id", "_id")


@dataclass
class RawRow:
    """One row of a source, before cleaning: `messages` hold a raw conversation, or `drop` says what is wrong with the
    row, or `skip` which rule of the source left it out (that is no defect, and strict mode does not mind it).

    location: file:line, for messages. group: rows of one group never fall on both sides of the hold-out (None = alone).
    unique: rows of one source with equal `unique` are one question, of which the mixer keeps the first. kind: a subset
    inside the source (OpenOrca's "t0") whose share the recipe may cap. notes: repairs worth counting. lost: how much of
    its file was passed over with a row that could not be read.
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
    lost: tuple[int, str] = (0, "bytes")


@dataclass(frozen=True)
class Hints:
    """What a form knows beside the row: columns the recipe names, and the hub configuration the row is from."""

    prompt_field: str | None = None
    system_field: str | None = None
    subset: str | None = None


@dataclass(frozen=True)
class Form:
    """parts: a row -> the fields of RawRow that this form fills; it raises Drop or Skip. columns: groups of names, of
    each of which a row of this form has at least one (that is how a renamed column is noticed). unread: large columns
    of the set that `parts` never looks at, which a reader may leave out."""

    parts: Callable[[dict, Hints], dict]
    columns: tuple[tuple[str, ...], ...]
    unread: tuple[str, ...] = ()


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


def as_list(value: object, reason: str) -> list:
    """A list, or the text of one. Raises Drop(reason)."""
    if isinstance(value, str):
        value = parse_literal(value)
    if not isinstance(value, list):
        raise Drop(reason)
    return value


def with_system(system: object, messages: list) -> list:
    return [{"role": "system", "content": system}, *messages] if system else messages


def ask(question: object, system: object = None) -> list:
    """A conversation of one question."""
    return with_system(system, [{"role": "user", "content": question}])


def word(value: object) -> str | None:
    """A column's value as a name to count by, None where there is none."""
    return " ".join(value.split())[:80] or None if isinstance(value, str) else None


def called_names(messages: list) -> set[str]:
    """Names of the tools that raw messages call, as far as they can be read."""
    calls = [call for m in messages if isinstance(m, dict) for call in _list_of(m.get("tool_calls"))]
    functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
    return {f["name"] for f in functions if isinstance(f, dict) and isinstance(f.get("name"), str)}


def _list_of(value: object) -> list:
    return value if isinstance(value, list) else []


def check_calls(messages: list, tools: list[dict] | None) -> None:
    """Every tool that is called is in the row's list. Raises Drop: a template would show calls of tools it never
    offered."""
    if called_names(messages) - {tool["function"]["name"] for tool in tools or ()}:
        raise Drop("unknown_tool_called")
