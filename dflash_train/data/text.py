"""Text and embedded values of a row: what is repaired, what costs the row, and the two exceptions that say so.

`Drop` is a defect and `Skip` a rule of the source; both carry the manifest's counter. Every function here takes
whatever a data set may hold and raises nothing else but those (and RecursionError, which `forms.convert` catches).
"""

import ast
import json
import math
import re
import warnings

PLACEHOLDERS = {"-", "N/A", "<N/A>", "n/a", "<noinput>"}
MAX_REPLACEMENT_SHARE = 0.001  # of U+FFFD, above which the text was damaged before it reached us
MAX_DEPTH = 64  # of nested lists and objects: real schemas stay under 20, and every later stage walks them recursively
MAX_PYTHON_CHARS = 1_000_000  # of a Python literal: its parser takes about 100 bytes of memory a character

# ZWJ and ZWNJ (U+200C/D) stay: they spell words in Persian and Indic scripts and join emoji.
_INVISIBLE = re.compile("[\u200b\u2060\ufeff\x00-\x08\x0b-\x1f\x7f]")
SURROGATE = re.compile("[\ud800-\udfff]")
# What chat templates of common models write around turns: <|im_end|>, <｜User｜>, [INST], <start_of_turn>, </s>.
_CONTROL_TOKEN = re.compile(
    r"<\|[A-Za-z][\w ./-]{0,60}\|>|<｜[^｜<>\n]{1,60}｜>|\[/?INST\]|<</?SYS>>|</?(?:start|end)_of_turn>|</s>"
)


class Drop(Exception):
    """This row cannot be used; `reason` is the manifest's counter."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


class Skip(Exception):
    """The source's own rule leaves this row out: no defect, counted apart, and strict mode does not mind it."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


def clean_text(text: str, repairs: set[str] | None = None) -> str:
    """Valid Unicode with \\n line ends and no invisible controls. Raises Drop for text that is damaged beyond repair.
    The names of what was repaired are added to `repairs`."""
    repairs = set() if repairs is None else repairs
    if not text.isascii() and SURROGATE.search(text):
        # JSON's "\ud83d\ude00" cut into two Python strings re-pairs through UTF-16; a half alone cannot be encoded at
        # all.
        try:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            raise Drop("lone_surrogate") from None
        repairs.add("surrogates_paired")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        repairs.add("line_ends_normalized")
    text, removed = _INVISIBLE.subn("", text)
    if removed:
        repairs.add("invisible_characters_removed")
    if text.count("\ufffd") > MAX_REPLACEMENT_SHARE * len(text):
        raise Drop("replacement_characters")
    if _CONTROL_TOKEN.search(text):
        raise Drop("special_token_in_text")
    return text


def clean_value(value: object, depth: int = 0) -> object:
    """A JSON value with `clean_text` on every string in it, keys included. Tuples become lists; Drop for what JSON
    cannot hold, and for nesting beyond MAX_DEPTH."""
    if isinstance(value, str):
        return clean_text(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Drop("not_a_finite_number")
        return value
    if depth >= MAX_DEPTH:
        raise Drop("nested_too_deep")
    if isinstance(value, list | tuple):
        return [clean_value(item, depth + 1) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str | int | float) for key in value):
            raise Drop("not_json")
        return {clean_text(str(key)): clean_value(item, depth + 1) for key, item in value.items()}
    raise Drop("not_json")  # bytes, dates and sets, out of Parquet or a Python literal


def content_text(content: object, role: str, repairs: set[str] | None = None) -> str:
    """The text of a message's content, whatever it was stored as. Raises Drop where there is more than text in it."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, bool):
        raise Drop("content_not_text")
    if repairs is not None:
        repairs.add("content_made_text")
    if isinstance(content, int | float):
        return json.dumps(content)
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if all(isinstance(text, str) for text in texts):
        return "\n".join(texts)
    if role == "tool":  # results are data; the model reads them as JSON
        return json.dumps(clean_value(content), ensure_ascii=False)
    raise Drop("content_not_text")


def parse_json(text: str, reason: str) -> object:
    """Embedded JSON; raw control characters inside strings are fine, clean_text takes them out. Raises Drop(reason)."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):  # ValueError: no JSON, or an integer of more than 4300 digits
        raise Drop(reason) from None


def parse_literal(text: str, reason: str = "bad_embedded_json") -> object:
    """JSON, or a Python literal where a data set stored repr(). Raises Drop(reason)."""
    try:
        return parse_json(text, reason)
    except Drop:
        if len(text) > MAX_PYTHON_CHARS:
            raise
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd escapes in other people's strings
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise Drop(reason) from None


def parse_objects(text: str, position: int = 0) -> tuple[list, int]:
    """JSON values that stand one after another, as many as there are, with spaces and commas between: (values, where
    the last one ends). Never raises."""
    decoder, values, end = json.JSONDecoder(strict=False), [], position
    while True:
        while position < len(text) and (text[position].isspace() or text[position] == ","):
            position += 1
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return values, end
        values.append(value)
        end = position
