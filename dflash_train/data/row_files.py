"""Rows of one file: JSONL, a JSON array, Parquet, gzipped or not, streamed.

A broken line costs that line: a `Bad` stands for it, never an exception. A file cut in the middle gives every whole row
before the cut.
"""

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from dflash_train.data.forms.base import ID_KEYS

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".jsonl.gz", ".json.gz")
_CHUNK_CHARS = 1 << 20
_BETWEEN_ROWS = re.compile(r"[\s,]*")
_MAX_ROW_CHARS = 64 << 20  # a JSON array row longer than this is a cut file, not a row


class Bad:
    """Stands for a row that could not be decoded."""

    def __init__(self, reason: str):
        self.reason = reason


class Latin1Row(dict):
    """A row whose bytes were not UTF-8."""


def file_rows(path: Path, unread: Collection[str] = ()) -> Iterator[tuple[int, object]]:
    """(line or row number from 1, row) of the file. unread: columns that nobody needs, left out where that saves work
    and changes no row's id: in Parquet files with an id column."""
    return _parquet_rows(path, unread) if path.suffix == ".parquet" else _json_rows(path)


def _open(path: Path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _json_rows(path: Path) -> Iterator[tuple[int, object]]:
    """JSONL line by line; a .json file as an array, or as JSONL under the wrong name. A cut gzip ends as one bad
    row."""
    try:
        with _open(path) as f:
            head = f.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
        is_array = head.startswith(b"[") and ".json" in path.suffixes
        yield from _array_rows(path) if is_array else _line_rows(path)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        yield -1, Bad("truncated_gzip")


def _line_rows(path: Path) -> Iterator[tuple[int, object]]:
    with _open(path) as f:
        for number, line in enumerate(f, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, _decode_line(line)


def _decode_line(line: bytes) -> object:
    try:
        text, latin1 = line.decode("utf-8"), False
    except UnicodeDecodeError:
        text, latin1 = line.decode("latin-1"), True
    try:
        row = json.loads(text, strict=False)  # raw control characters inside strings are cleaned later
    except json.JSONDecodeError:
        return Bad("bad_json")
    except (RecursionError, ValueError):  # nested too deep, or an integer of more than 4300 digits
        return Bad("bad_json")
    return Latin1Row(row) if latin1 and isinstance(row, dict) else row


def _encoding(path: Path) -> str:
    """utf-8 when the whole file is (a cut last character apart), else latin-1, which reads anything."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _open(path) as f:
        try:
            while chunk := f.read(_CHUNK_CHARS):
                decoder.decode(chunk)
        except UnicodeDecodeError:
            return "latin-1"
    return "utf-8"


def _array_rows(path: Path) -> Iterator[tuple[int, object]]:
    """Rows of one JSON array, decoded one by one, so a file cut in the middle still gives every whole row before the
    cut."""
    encoding = _encoding(path)
    decode = json.JSONDecoder(strict=False).raw_decode
    reader = codecs.getincrementaldecoder(encoding)(errors="ignore")
    with _open(path) as f:
        buffer = reader.decode(f.read(_CHUNK_CHARS))
        position, number, at_end = buffer.index("[") + 1, 0, False
        while True:
            position = _BETWEEN_ROWS.match(buffer, position).end()
            if buffer.startswith("]", position):
                return
            try:
                row, end = decode(buffer, position)
                if end == len(buffer) and not at_end:  # a number or word may go on in the next chunk
                    raise ValueError
            except (ValueError, RecursionError):
                if at_end or len(buffer) - position > _MAX_ROW_CHARS:
                    yield number + 1, Bad("truncated_json")
                    return
                # As much again as is left over: a long row is retried a few times, not once per chunk.
                chunk = f.read(max(_CHUNK_CHARS, len(buffer) - position))
                at_end = not chunk
                buffer, position = buffer[position:] + reader.decode(chunk, final=at_end), 0
                continue
            position = end
            number += 1
            yield number, Latin1Row(row) if encoding == "latin-1" and isinstance(row, dict) else row


def _parquet_rows(path: Path, unread: Collection[str]) -> Iterator[tuple[int, object]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            columns = [name for name in names if name not in unread] if set(ID_KEYS) & set(names) else None
            for batch in table.iter_batches(batch_size=512, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, strip_nulls(row)
    except (pyarrow.ArrowException, OSError):
        yield number + 1, Bad("bad_parquet")


def strip_nulls(value: object) -> object:
    """Columnar formats give every row the union of all rows' nested keys, null where a row had none: take those out
    again."""
    if isinstance(value, dict):
        return {key: strip_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [strip_nulls(item) for item in value]
    return value
