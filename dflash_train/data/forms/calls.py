"""Scanners for tool calls that data sets write as text.

glaive   {"name": "f", "arguments": '{"who": "Ann's dog"}'}     JSON, but for the quotes around the arguments
toolace  [Flight Search.v2(city="Rome", days=[1, 2]), time()]   calls as in Python, of names with spaces and dots
"""

import json
import re

from dflash_train.data.text import MAX_DEPTH, Drop, parse_json

_QUOTED_ARGUMENTS = re.compile(r"\"(?:arguments|parameters)\"\s*:\s*'")
_DECODER = json.JSONDecoder(strict=False)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_WORD = re.compile(r"[A-Za-z]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def glaive_call(text: str) -> dict:
    """One call. The arguments' own quotes need not be escaped: they end where their JSON object ends. Raises Drop."""
    text = text.strip()
    found = _QUOTED_ARGUMENTS.search(text)
    if found:
        start = found.end()
        for rest in (text[start:], text[start:].replace("\\'", "'")):  # \' is no JSON escape
            try:
                arguments, end = _DECODER.raw_decode(rest.lstrip())
            except (ValueError, RecursionError):
                continue
            tail = rest.lstrip()[end:].lstrip()
            text = text[: start - 1] + json.dumps(arguments) + tail.removeprefix("'")
            break
    call = parse_json(text, "bad_tool_call")
    if not isinstance(call, dict):
        raise Drop("bad_tool_call")
    return {"name": call.get("name"), "arguments": call.get("arguments", call.get("parameters"))}


def toolace_calls(text: str, names: list[str]) -> list[dict]:
    """The calls of a bracketed list; `names` are the tools on offer, which may hold any character. Raises Drop."""
    return _Scanner(text, sorted(names, key=len, reverse=True)).calls()


class _Scanner:
    """Reads `[name(key=value, ...), ...]` from left to right; every character is looked at once or twice."""

    def __init__(self, text: str, names: list[str]):
        self.text, self.names, self.position = text, names, 0

    def calls(self) -> list[dict]:
        out = []
        self._expect("[")
        while True:
            name = self._name()
            self._expect("(")
            out.append({"name": name, "arguments": self._arguments()})
            if not self._accept(","):
                self._expect("]")
                break
        if self._skip_space() < len(self.text):
            raise Drop("bad_tool_call")
        return out

    # ------------------------------------------------ parts of a call

    def _name(self) -> str:
        start = self._skip_space()
        for name in self.names:
            end = start + len(name)
            if self.text.startswith(name, start) and self.text[end : end + 20].lstrip().startswith("("):
                self.position = end
                return name
        return self._until("(")

    def _arguments(self) -> dict:
        out: dict = {}
        if self._accept(")"):
            return out
        while True:
            key = self._until("=").strip("\"'")
            self._expect("=")
            if not key or key in out or any(mark in key for mark in "()[]{},\"'"):
                raise Drop("bad_tool_call")
            out[key] = self._value(0)
            if not self._accept(","):
                self._expect(")")
                return out

    def _value(self, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise Drop("nested_too_deep")
        start = self._skip_space()
        first = self.text[start : start + 1]
        if first in ("'", '"') and first:
            return self._string(first)
        if first in ("[", "(") and first:
            return self._items("]" if first == "[" else ")", depth)
        if first == "{":
            return self._pairs(depth)
        if number := _NUMBER.match(self.text, start):
            self.position = number.end()
            digits = number[0]
            if len(digits) > 300:
                raise Drop("bad_tool_call")
            return int(digits) if re.fullmatch(r"[+-]?\d+", digits) else float(digits)
        found = _WORD.match(self.text, start)
        if not found or found[0] not in _WORDS:
            raise Drop("bad_tool_call")
        self.position = found.end()
        return _WORDS[found[0]]

    def _items(self, close: str, depth: int) -> list:
        self.position += 1
        out: list = []
        while not self._accept(close):
            if out:
                self._expect(",")
                if self._accept(close):
                    break
            out.append(self._value(depth + 1))
        return out

    def _pairs(self, depth: int) -> dict:
        self.position += 1
        out: dict = {}
        while not self._accept("}"):
            if out:
                self._expect(",")
                if self._accept("}"):
                    break
            key = self._value(depth + 1)
            if not isinstance(key, str | int | float):
                raise Drop("bad_tool_call")
            self._expect(":")
            out[str(key)] = self._value(depth + 1)
        return out

    def _string(self, quote: str) -> str:
        parts, start = [], self.position + 1
        i = start
        while i < len(self.text):
            character = self.text[i]
            if character == quote:
                self.position = i + 1
                return "".join((*parts, self.text[start:i]))
            if character == "\\" and i + 1 < len(self.text):
                text, length = self._escape(i + 1)
                parts += [self.text[start:i], text]
                i = start = i + 1 + length
                continue
            i += 1
        raise Drop("bad_tool_call")

    def _escape(self, at: int) -> tuple[str, int]:
        """(what stands for the escape whose first character after the backslash is at `at`, its length)."""
        character = self.text[at]
        digits = self.text[at + 1 : at + 5]
        if character == "u" and re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            return chr(int(digits, 16)), 5
        if character in "\"'\\/":
            return character, 1
        return _ESCAPES.get(character, "\\" + character), 1

    # ------------------------------------------------ characters

    def _skip_space(self) -> int:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        return self.position

    def _accept(self, mark: str) -> bool:
        found = self.text.startswith(mark, self._skip_space())
        self.position += len(mark) * found
        return found

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            raise Drop("bad_tool_call")

    def _until(self, mark: str) -> str:
        """The non-empty text before `mark`."""
        end = self.text.find(mark, self.position)
        text = self.text[self.position : end].strip() if end >= 0 else ""
        if not text:
            raise Drop("bad_tool_call")
        self.position = end
        return text
