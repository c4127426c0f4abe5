"""Rows of one JSON array, decoded one by one, so a file larger than memory can be read, and a cut one up to the cut.

An element that is no JSON costs itself: reading goes on at the next one. Where that begins is told by brackets and
strings; where one of those is missing, by the key that rows begin with.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from typing import IO

CHUNK_BYTES = 1 << 20
MAX_ROW_CHARS = 64 << 20  # what is longer is no row, but the rest of a file in which a quote is missing
_LOOK_CHARS = 4 << 20  # behind a mistake, for the end of its element
_TAIL_CHARS = 16  # a word, number or escape that goes on in the next chunk is noticed so far before its end
_HEAD_CHARS = 1 << 10  # of a row's beginning, which two chunks may share
_TO_ARRAY, _BETWEEN_ROWS, _AFTER_ARRAY, _JUNK = map(re.compile, (r"[^\[]*\[", r"[\s,]*", r"\]\s*", r"[\s,\[]*"))
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{},]', re.DOTALL)
_ROW_AT_ITS_END = re.compile(r'[,\[]\s*(\{)\s*"$')
_FIRST_KEY = re.compile(r'\{\s*("[^"\\]*+(?:\\.[^"\\]*+)*+")\s*:')
_BROKEN = -1
DAMAGED_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)


class Bad:
    """Stands for a row that could not be decoded. lost: how much was passed over with it."""

    def __init__(self, reason: str, lost: int = 0, unit: str = "bytes"):
        self.reason, self.lost, self.unit = reason, lost, unit


class _Window:
    """The text of a file from `position` on, as far as it was read."""

    def __init__(self, f: IO[bytes], encoding: str):
        self.f, self.encoding = f, encoding
        self.decoder = codecs.getincrementaldecoder(encoding)(errors="ignore")
        self.text, self.position, self.num_bytes, self.at_end = "", 0, 0, False

    @property
    def left(self) -> int:
        return len(self.text) - self.position

    def offset(self) -> int:
        """Of `position`, in bytes of the file (unzipped)."""
        return self.num_bytes - len(self.text[self.position :].encode(self.encoding))

    def more(self) -> None:
        """As much again as is left over, so that a long row is looked at a few times and not once a chunk."""
        chunk = self._read(max(CHUNK_BYTES, self.left))
        self.num_bytes += len(chunk)
        self.at_end = not chunk
        self.text = self.text[self.position :] + self.decoder.decode(chunk, final=self.at_end)
        self.position = 0

    def _read(self, size: int) -> bytes:
        """What comes before the file's damage; the damage is raised by the call after."""
        parts = []
        while size > 0:
            try:
                part = self.f.read1(size)
            except DAMAGED_GZIP:
                if not parts:
                    raise
                break
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def skip(self, pattern: re.Pattern) -> str:
        """Go to the pattern's end, as far as that may be; returns the character there, "" at the end of the file."""
        while True:
            found = pattern.match(self.text, self.position)
            if self.at_end or (found and found.end() < len(self.text)):
                self.position = found.end() if found else len(self.text)
                return self.text[self.position : self.position + 1]
            self.more()


def array_rows(f: IO[bytes], encoding: str) -> Iterator[object]:
    """Every row of the array in `f`, in order, and a Bad in place of each that is none."""
    window, key = _Window(f, encoding), None
    window.skip(_TO_ARRAY)
    while True:
        following = window.skip(_BETWEEN_ROWS)
        if following == "":
            yield Bad("truncated_json")
            return
        if following == "]":
            if window.skip(_AFTER_ARRAY) == "":
                return
            yield Bad("bad_json")  # there should be no more: a bracket too many, or several arrays in one file
            window.skip(_JUNK)
            continue
        row = _row(window, key)
        key = next(iter(row), key) if isinstance(row, dict) else key
        yield row
        if isinstance(row, Bad) and row.reason == "truncated_json":
            return


def _row(window: _Window, key: str | None) -> object:
    """The row at the window's position, or a Bad; the position is behind it then."""
    while True:
        mistake, cut = 0, False
        try:
            row, end = json.JSONDecoder(strict=False).raw_decode(window.text, window.position)
            cut = end == len(window.text)
        except json.JSONDecodeError as error:
            mistake = error.pos - window.position + 1
            cut = error.pos >= len(window.text) - _TAIL_CHARS or error.msg.startswith("Unterminated string")
        except (ValueError, RecursionError):  # an integer of more than 4300 digits, nested too deep
            mistake = 1
        if cut and not window.at_end and window.left <= MAX_ROW_CHARS:
            window.more()
        elif mistake:
            return _pass_over(window, key, mistake, cut)
        else:
            window.position = end
            return row


def _pass_over(window: _Window, key: str | None, mistake: int, cut: bool) -> Bad:
    """Go to the end of the element in which characters `mistake` characters on are wrong, or to the next one's
    beginning. cut: it may be sound as far as it goes."""
    start, begins = window.offset(), _beginning(window, key)
    while (end := _end(window.text, window.position, begins)) is None:
        if window.at_end or window.left > mistake + _LOOK_CHARS:
            break
        window.more()
    if end is not None and end != _BROKEN:
        window.position = end
    elif window.at_end and cut:
        window.position = len(window.text)
    else:
        comma = window.text.rfind(",", window.position, window.position + mistake)  # the next row may be the mistake
        window.position = max(comma, window.position + 1)
        _seek(window, re.compile(rf",\s*({begins.pattern})"))
    return Bad("bad_json" if window.left else "truncated_json", window.offset() - start)


def _seek(window: _Window, pattern: re.Pattern) -> None:
    """Go to the next row that begins like the others, or to the end of the file; holds only a chunk."""
    while not (found := pattern.search(window.text, window.position)):
        if window.at_end:
            window.position = len(window.text)
            return
        window.position = max(window.position, len(window.text) - _HEAD_CHARS)
        window.more()
    window.position = found.start(1)


def _beginning(window: _Window, key: str | None) -> re.Pattern:
    """How rows begin: with the key of the last good one, else with the bad one's own."""
    own = _FIRST_KEY.match(window.text, window.position)
    text = own[1] if own and key is None else json.dumps(key, ensure_ascii=False)
    return re.compile(r"\{" if key is None and not own else rf"\{{\s*{re.escape(text)}\s*:")


def _end(text: str, start: int, begins: re.Pattern) -> int | None:
    """Where the element at `start` ends by its brackets and strings, or the next row begins in what looks like one of
    its strings, because a quote is missing; _BROKEN where brackets do not match, None where the text ends before."""
    opened = []
    for token in _TOKEN.finditer(text, start):
        mark = token[0][0]
        if mark == '"':
            row = _ROW_AT_ITS_END.search(token[0])
            if row and begins.match(text, token.start() + row.start(1)):
                return token.start() + row.start(1)
        elif mark in "[{":
            opened.append(mark)
        elif not opened and mark in ",]":
            return token.start()
        elif mark in "]}" and opened and opened.pop() + mark not in ("[]", "{}"):
            return _BROKEN
    return None
