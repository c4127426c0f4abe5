"""Rows of one file: JSONL, a JSON array, Parquet, gzipped or not, streamed.

A broken line costs that line: a `Bad` stands for it, never an exception. A file cut in the middle gives every whole row
before the cut.
"""

import codecs
import gzip
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from dflash_train.data.forms.base import ID_KEYS
from dflash_train.data.json_arrays import DAMAGED_GZIP, Bad, array_rows

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".jsonl.gz", ".json.gz")
_HEAD_BYTES, _CHUNK_BYTES = 4096, 1 << 20


class Latin1Row(dict):
    """A row whose bytes were not UTF-8."""


def file_rows(path: Path, unread: Collection[str] = ()) -> Iterator[tuple[int, object]]:
    """(line or row number from 1, row) of the file. unread: columns that nobody needs, left out where that saves work
    and changes no row's id: in Parquet files with an id column."""
    return _parquet_rows(path, unread) if path.suffix == ".parquet" else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[int, object]]:
    """JSONL line by line; a .json file as an array, or as JSONL under the wrong name. Damaged gzip ends as one bad
    row."""
    with open(path, "rb") as file:
        f = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
        try:
            head = f.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
            f.seek(0)
            is_array = head.startswith(b"[") and ".json" in path.suffixes
            yield from _array_rows(f) if is_array else _line_rows(f)
        except DAMAGED_GZIP:
            yield -1, Bad("truncated_gzip", path.stat().st_size - file.tell(), "bytes of the .gz")


def _line_rows(f: IO[bytes]) -> Iterator[tuple[int, object]]:
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
    except (RecursionError, ValueError):  # no JSON, nested too deep, or an integer of more than 4300 digits
        return Bad("bad_json", len(line))
    return Latin1Row(row) if latin1 and isinstance(row, dict) else row


def _array_rows(f: IO[bytes]) -> Iterator[tuple[int, object]]:
    encoding = _encoding(f)
    f.seek(0)
    for number, row in enumerate(array_rows(f, encoding), 1):
        yield number, Latin1Row(row) if encoding == "latin-1" and isinstance(row, dict) else row


def _encoding(f: IO[bytes]) -> str:
    """utf-8 when the whole file is, as far as it can be read (a cut last character apart), else latin-1, which reads
    anything."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while chunk := f.read1(_CHUNK_BYTES):
            decoder.decode(chunk)
    except UnicodeDecodeError:
        return "latin-1"
    except DAMAGED_GZIP:
        pass
    return "utf-8"


def _parquet_rows(path: Path, unread: Collection[str]) -> Iterator[tuple[int, object]]:
    import pyarrow
    import pyarrow.parquet

    number = num_rows = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            num_rows = table.metadata.num_rows
            names = table.schema_arrow.names
            columns = [name for name in names if name not in unread] if set(ID_KEYS) & set(names) else None
            for batch in table.iter_batches(batch_size=512, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, strip_nulls(row)
    except (pyarrow.ArrowException, OSError):
        yield number + 1, Bad("bad_parquet", max(num_rows - number, 0), "rows")


def strip_nulls(value: object) -> object:
    """Columnar formats give every row the union of all rows' nested keys, null where a row had none: take those out
    again."""
    if isinstance(value, dict):
        return {key: strip_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [strip_nulls(item) for item in value]
    return value
