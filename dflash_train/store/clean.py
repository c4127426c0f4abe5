"""`extract.clean=true`: say what a run has left in its store, and after a confirmation delete that, and nothing else.

The manifest names the shards, so it goes last: a clean that was interrupted is typed again.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dflash_train.store.base import ObjectStore
from dflash_train.store.markers import SHARD_KEY, marker_key
from dflash_train.store.shard import MANIFEST, read_manifest
from dflash_train.store.verify import living_hosts
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes
from dflash_train.util.log import say, table

OWN_FOLDERS = ("catalog", "claims", "hosts", "target", "ring", "stream")
"""Besides shards and markers; whatever lies in them was written by extract."""
SHOWN = 10


@dataclass
class Contents:
    """Keys and bytes of a store's objects, by folder; `foreign` are those that the run's manifest does not name."""

    own: dict[str, list[str]] = field(default_factory=dict)
    own_bytes: dict[str, int] = field(default_factory=dict)
    foreign: list[tuple[str, int]] = field(default_factory=list)

    def add(self, folder: str, key: str, size: int) -> None:
        self.own.setdefault(folder, []).append(key)
        self.own_bytes[folder] = self.own_bytes.get(folder, 0) + size


def clean_store(store: ObjectStore, yes: bool = False, ask: Callable[[str], str] = input) -> int:
    """Show what would go, ask unless `yes`, delete; returns the exit code: 0, or 1 when the answer was another.

    Raises UserError when nothing was extracted there, somebody extracts, or nobody can be asked.
    """
    contents = store_contents(store)
    show(store, contents)
    _refuse_living(store)
    name = Path(store.url).name
    if not yes and ask is input and not sys.stdin.isatty():
        raise UserError(
            "extract.clean", got="nobody to ask (no terminal)", want=f"{name!r} typed", fix="extract.yes=true"
        )
    if not yes and ask(f"type {name} to delete these objects for good: ").strip() != name:
        say("clean: nothing was deleted")
        return 1
    _refuse_living(store)  # the answer may have taken its time
    delete(store, contents)
    say(f"clean: deleted {sum(map(len, contents.own.values())):,} objects, "
        f"{human_bytes(sum(contents.own_bytes.values()))}, from {store.url}")  # fmt: skip
    return 0


def _refuse_living(store: ObjectStore) -> None:
    living = living_hosts(store)
    if living:
        raise UserError(store.url, got=f"{living[0]} was just written: somebody extracts into it",
                        want="a store that nobody works on", fix="stop that run, or wait some minutes")  # fmt: skip


def store_contents(store: ObjectStore) -> Contents:
    """Every object of the store, sorted into what its manifest names and what it does not."""
    counts, contents = read_manifest(store)["shards"], Contents()

    def is_named(shard_id: str) -> bool:
        split, _, number = shard_id.rpartition("-")
        return number.isdecimal() and shard_id == f"{split}-{int(number):05d}" and int(number) < counts.get(split, 0)

    for key, size in store.list():
        folder, _, name = key.partition("/")
        match = SHARD_KEY.fullmatch(key)
        named = (folder in OWN_FOLDERS and bool(name)) or key == MANIFEST or (match and is_named(match[1]))
        if named or (key == marker_key(Path(key).stem) and is_named(Path(key).stem)):
            contents.add(folder, key, size)
        else:
            contents.foreign.append((key, size))
    return contents


def show(store: ObjectStore, contents: Contents) -> None:
    """Objects and bytes by folder, and what stays."""
    rows = [[folder, f"{len(keys):,}", human_bytes(contents.own_bytes[folder])]
            for folder, keys in sorted(contents.own.items())]  # fmt: skip
    total = sum(map(len, contents.own.values())), sum(contents.own_bytes.values())
    table(f"clean: {store.url}", ["", "objects", "bytes"], [*rows, ["all", f"{total[0]:,}", human_bytes(total[1])]])
    for key, size in contents.foreign[:SHOWN]:
        say(f"  stays: {key} ({human_bytes(size)}), which this run's manifest does not name")
    if len(contents.foreign) > SHOWN:
        say(f"  stays: {len(contents.foreign) - SHOWN:,} more such objects")


def delete(store: ObjectStore, contents: Contents) -> None:
    """Markers first, so that no shard looks done whose object is gone; the manifest last."""
    order = ["markers", "shards", *OWN_FOLDERS, MANIFEST]
    for folder in sorted(contents.own, key=order.index):
        store.delete_many(contents.own[folder])
    store.drop_unfinished(0)
