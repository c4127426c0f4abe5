"""Is the mix in a folder the one that a recipe asks for? One rule, for the stage that makes it and for those after it.

A mix is stale where a file of it is missing or cut, or where it was made of another recipe, by other rules, or of an
input that is here and no longer what it was. An input that is not here (a mix that came from another machine, a hub out
of reach, another Python's library) is no reason: nothing better could be made of it.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data.answers.mix_rows import FILES
from dflash_train.data.hub import pin, recorded_revisions
from dflash_train.data.sources import find_files
from dflash_train.util.errors import UserError
from dflash_train.util.io import read_json
from dflash_train.util.provenance import canonical_json, digest, redact

# Raise it when cleaning, forms, filters, evaluation texts or order change what a recipe yields.
RULES_VERSION = 3
NO_PART_OF_A_MIX = ("name", "answers", "num_processes")  # of DataConfig: where it goes, what comes after, how fast


def made_of(data: DataConfig, limit: int | None, evaluation: dict[str, str | None]) -> dict:
    """All that a mix's rows follow from, as plain JSON. data: the recipe, hub revisions as commits; evaluation: what is
    known here of each evaluation set. An input that cannot be looked at here is null."""
    recipe = {key: value for key, value in asdict(data).items() if key not in NO_PART_OF_A_MIX}
    inputs = {name: _files_state(name, source) for name, source in data.sources.items() if source.kind == "files"}
    record = {"rules": RULES_VERSION, "data": redact(recipe), "order": list(data.sources), "limit": limit,
              "python": _python(data), "inputs": inputs, "evaluation": evaluation}  # fmt: skip
    return json.loads(canonical_json(record))


def recipe_hash(record: dict) -> str:
    """Short name of what `made_of` gives: equal exactly where two mixes are the same."""
    return digest(record)


def why_stale(folder: Path, data: DataConfig, limit: int | None, evaluation: dict[str, str | None]) -> str | None:
    """Why the mix in `folder` is not the recipe's, in words; None where it is. Needs no source and no network.

    Arguments as for made_of, but revisions that the recipe leaves open are those of the mix: a newer commit does not
    undo it."""
    if not (folder / "manifest.json").exists():
        return f"there is no mix in {folder}"
    manifest = read_json(folder / "manifest.json")
    kept = {name: fact["bytes"] for name, fact in manifest["files"].items()}
    for name in dict.fromkeys([FILES["train"], FILES["heldout"], *kept]):
        path = folder / name
        if not path.exists() or path.stat().st_size != kept.get(name, path.stat().st_size):
            return f"{path} is missing or cut"
    if "made_of" not in manifest:
        return "it was made by an earlier version"
    return difference(manifest["made_of"], made_of(pin(data, recorded_revisions(folder, data)), limit, evaluation))


def difference(made: dict, wanted: dict, key: str = "") -> str | None:
    """The first value that differs, by its full key and with both; None where only inputs do that are not here."""
    for name in dict.fromkeys([*wanted, *made]):
        old, new, full = made.get(name), wanted.get(name), f"{key}{name}"
        not_here = full == "python" or (new is None and key in ("inputs.", "evaluation."))
        if old == new or not_here:
            continue
        found = f"{full} was {_short(old)}, and is {_short(new)} now"
        if isinstance(old, dict) and isinstance(new, dict):
            found = difference(old, new, f"{full}.")
        if found:
            return found
    return None


def _short(value: object, most: int = 80) -> str:
    text = canonical_json(value)
    return text if len(text) <= most else text[:most] + "..."


def _files_state(name: str, source: SourceConfig) -> list | None:
    """Names, sizes and times of a source's files, where they are here; the hub's are named by their commit."""
    try:
        return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in find_files(name, source)]
    except UserError:
        return None


def _python(data: DataConfig) -> str | None:
    """The Python whose own library is a source, where it is."""
    shipped = any(source.kind in ("stdlib_code", "pydoc") for source in data.sources.values())
    return f"{sys.version_info.major}.{sys.version_info.minor}" if shipped else None
