"""Rows from files (JSONL, JSON, Parquet; a file, folder or glob) and from the Hugging Face hub, streamed.

A broken line costs that line: it comes back as a RawRow with its `drop` reason and location, never as an exception.
"""

import codecs
import glob
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.forms import RawRow, convert
from dflash_train.util.errors import UserError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".jsonl.gz", ".json.gz")
_CHUNK_CHARS = 1 << 20
_BETWEEN_ROWS = re.compile(r"[\s,]*")
_MAX_ROW_CHARS = 64 << 20  # a JSON array row longer than this is a cut file, not a row


@dataclass
class FileOptions:
    """Names of columns where they are not the usual ones."""

    prompt_field: str | None = None
    system_field: str | None = None
    id_field: str | None = None


@dataclass
class HubOptions(FileOptions):
    """gated: the set needs an accepted licence and a token. subsets: several configurations read one after another."""

    gated: bool = False
    subsets: list[str] | None = None


OPTIONS = {"files": FileOptions, "hub": HubOptions}


def read(name: str, config: SourceConfig, data: DataConfig) -> Iterator[RawRow]:
    """Every row of the source, in its own order. Raises UserError when the source itself cannot be reached."""
    options = OPTIONS[config.kind](**config.options)
    columns = {key: getattr(options, key) for key in ("prompt_field", "system_field", "id_field")}
    rows = _hub_rows(name, config, options) if config.kind == "hub" else _file_rows(name, config)
    for location, upstream, row in rows:
        if isinstance(row, _Bad):
            yield RawRow(location, drop=row.reason)
            continue
        raw = convert(row, config.form, location, upstream, **columns)
        if isinstance(row, _Latin1Row):
            raw.notes = ("decoded_as_latin1",)
        yield raw


class _Bad:
    """Stands for a row that could not be decoded."""

    def __init__(self, reason: str):
        self.reason = reason


class _Latin1Row(dict):
    """A row whose bytes were not UTF-8."""


# ---------------------------------------------------------------- files


def find_files(name: str, config: SourceConfig) -> list[Path]:
    """The files behind data.sources.<name>.path, sorted. Raises UserError when there are none."""
    field = f"data.sources.{name}.path"
    if not config.path:
        raise UserError(field, got="nothing", want="a file, folder or glob", fix=f"{field}=my.jsonl")
    path = Path(config.path).expanduser()
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
    else:
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    if not found:
        raise UserError(
            field,
            got=f"{config.path} (no such file)" if not path.is_dir() else f"{path} (no data files in it)",
            want=f"a file, folder or glob of {', '.join(SUFFIXES)}",
        )
    unknown = [p for p in found if not p.name.endswith(SUFFIXES)]
    if unknown:
        raise UserError(field, got=str(unknown[0]), want=f"a name that ends in one of {', '.join(SUFFIXES)}")
    return found


def _file_rows(name: str, config: SourceConfig) -> Iterator[tuple[str, dict, object]]:
    for path in find_files(name, config):
        rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
        for number, row in rows:
            yield f"{path}:{number}", {"dataset": path.name, "row": number}, row


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
    except (EOFError, gzip.BadGzipFile):
        yield -1, _Bad("truncated_gzip")


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
        return _Bad("bad_json")
    except (RecursionError, ValueError):  # nested too deep, or an integer of more than 4300 digits
        return _Bad("bad_json")
    return _Latin1Row(row) if latin1 and isinstance(row, dict) else row


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
                    yield number + 1, _Bad("truncated_json")
                    return
                # As much again as is left over: a long row is retried a few times, not once per chunk.
                chunk = f.read(max(_CHUNK_CHARS, len(buffer) - position))
                at_end = not chunk
                buffer, position = buffer[position:] + reader.decode(chunk, final=at_end), 0
                continue
            position = end
            number += 1
            yield number, _Latin1Row(row) if encoding == "latin-1" and isinstance(row, dict) else row


def _parquet_rows(path: Path) -> Iterator[tuple[int, object]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=512):
                for row in batch.to_pylist():
                    number += 1
                    yield number, strip_nulls(row)
    except (pyarrow.ArrowException, OSError):
        yield number + 1, _Bad("bad_parquet")


def strip_nulls(value: object) -> object:
    """Columnar formats give every row the union of all rows' nested keys, null where a row had none: take those out
    again."""
    if isinstance(value, dict):
        return {key: strip_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [strip_nulls(item) for item in value]
    return value


# ---------------------------------------------------------------- hub


def licence_page(dataset: str) -> str:
    return f"https://huggingface.co/datasets/{dataset}"


def _hub_rows(name: str, config: SourceConfig, options: HubOptions) -> Iterator[tuple[str, dict, object]]:
    for subset in options.subsets or [config.subset]:
        where = f"{config.path}/{subset or 'default'}/{config.split}"
        try:
            for number, row in enumerate(_open_hub(config, subset)):
                upstream = {"dataset": config.path, "config": subset, "split": config.split, "row": number}
                yield f"{where}:{number}", upstream, strip_nulls(row)
        except UserError:
            raise
        except Exception as error:  # the hub's errors come from five libraries; the user needs one message
            raise hub_error(name, config, error) from error


def _open_hub(config: SourceConfig, subset: str | None):
    import datasets

    return datasets.load_dataset(config.path, subset, split=config.split, revision=config.revision, streaming=True)


def hub_error(name: str, config: SourceConfig, error: Exception) -> UserError:
    """What went wrong with a data set, by name, with the page where its licence is accepted."""
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    gated = "gated" in str(error).lower() or "401" in str(error) or "403" in str(error)
    fix = (
        f"accept its licence at {licence_page(str(config.path))} and set HF_TOKEN"
        if gated
        else (
            f"check {licence_page(str(config.path))} (name, split '{config.split}', revision), the network, "
            f"or leave the source out: '~data.sources.{name}'"
        )
    )
    return UserError(
        f"data.sources.{name}: data set {config.path}", got=text, want="a data set this machine may read", fix=fix
    )
