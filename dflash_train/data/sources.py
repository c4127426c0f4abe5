"""Rows from files (JSONL, JSON, Parquet; a file, folder or glob) and from the Hugging Face hub, streamed.

A broken line costs that line: it comes back as a RawRow with its `drop` reason and location, never as an exception.
"""

import glob
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.forms import FORMS, ColumnWatch, RawRow, convert
from dflash_train.data.hub import is_hub_id
from dflash_train.data.hub.files import hub_rows
from dflash_train.data.row_files import SUFFIXES, Bad, Latin1Row, file_rows
from dflash_train.util.errors import UserError


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
    unread = set() if config.form == "auto" else {*FORMS[config.form].unread} - {*columns.values()}
    rows = hub_rows(name, config, unread) if config.kind == "hub" else _file_rows(name, config, unread)
    watch, first_bad, is_readable = ColumnWatch(name, config.form, options.prompt_field), None, False
    for location, upstream, row in rows:
        if isinstance(row, Bad):
            first_bad = first_bad or f"{row.reason} at {location}"
            yield RawRow(location, drop=row.reason, lost=(row.lost, row.unit))
            continue
        is_readable = True
        watch.see(row)
        raw = convert(row, config.form, location, upstream, **columns)
        if isinstance(row, Latin1Row):
            raw.notes += ("decoded_as_latin1",)
        yield raw
    watch.finish()
    if first_bad and not is_readable:
        raise UserError(f"data.sources.{name}", got=f"rows, none of which could be read (the first: {first_bad})",
                        want="one JSON object a line, a JSON array of them, or Parquet")  # fmt: skip


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
    kinds = ", ".join(SUFFIXES)
    if not found:
        got = f"{path} (no data files in it)" if path.is_dir() else f"{config.path} (no such file)"
        hub = f"; for a data set on the hub: data.sources.{name}.kind=hub" if is_hub_id(config.path) else ""
        raise UserError(field, got=got, want=f"a file, folder or glob of {kinds}", fix=f"{field}=my.jsonl{hub}")
    unknown = [p for p in found if not p.name.endswith(SUFFIXES)]
    if unknown:
        fix = f"convert it, one JSON object a line: {field}={unknown[0].with_suffix('.jsonl')}"
        raise UserError(field, got=f"{unknown[0]}, of a kind that is not read", want=f"one of {kinds}", fix=fix)
    if not any(p.stat().st_size for p in found):
        raise UserError(field, got=f"{config.path}, which is empty", want="rows", fix=f"{field}=my.jsonl")
    return found


def _file_rows(name: str, config: SourceConfig, unread: Collection[str]) -> Iterator[tuple[str, dict, object]]:
    for path in find_files(name, config):
        for number, row in file_rows(path, unread):
            yield f"{path}:{number}", {"dataset": path.name, "row": number}, row
