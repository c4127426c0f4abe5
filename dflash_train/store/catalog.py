"""All markers of a store, read in bounded memory and, at scale, without a request for each.

    catalog/<split>-<n>.jsonl     the markers of shards n*1024 .. n*1024+1023 of a split, one a line, as they are

A store of 80,000 shards has 80,000 markers, and every resume and every training rank wants to know them. Extraction
leaves catalogues behind when it ends; readers list markers and objects (a thousand a request), take from a catalogue
what the listing confirms, and ask for the rest one by one. So a catalogue is a copy that may be old or gone: a line
counts only while its marker is listed with the very size of the line, and its object with the size that it names.
"""

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dflash_train.store.base import ObjectStore
from dflash_train.store.markers import SHARD_ID, InvalidMarker, Marker, marker_key, parse_marker
from dflash_train.util.errors import UserError

GROUP = 1024
"""Markers in one catalogue."""
SMALLEST = 64
"""Fewer markers are as well asked for one by one."""
THREADS = 32


@dataclass
class Group:
    """Markers of up to GROUP neighbouring shards. lines: the valid ones as they were read, by key; has_catalog: there
    is a catalogue; is_catalogued: it says exactly that."""

    name: str
    markers: list[Marker | InvalidMarker]
    lines: dict[str, bytes]
    is_catalogued: bool
    has_catalog: bool


def marker_groups(store: ObjectStore, split: str | None = None, trust_catalog: bool = True) -> Iterator[Group]:
    """Every marker, a group at a time, judged by the listing: valid when its object is there with the right size.

    Holds the listings (some 150 bytes a shard) and one group. trust_catalog=False asks the store for every marker.
    """
    prefix = f"{split}-" if split else ""
    groups = defaultdict(list)
    for key, size in store.list(f"markers/{prefix}"):
        groups[_group_name(key)].append((key, size))
    catalogued = {key for key, _ in store.list(f"catalog/{prefix}")}
    sizes = dict(store.list(f"shards/{prefix}"))  # after the markers: an object is always older than its marker
    with ThreadPoolExecutor(THREADS) as pool:
        for name, listed in groups.items():
            known = _read_catalog(store, name) if name in catalogued else {}

            def ask(key: str) -> bytes | None:
                try:
                    return store.get_bytes(key)
                except KeyError:  # removed since it was listed
                    return None

            def read(entry: tuple[str, int], known: dict[str, bytes] = known) -> tuple[str, bytes | None]:
                key, size = entry
                content = known[key] if trust_catalog and len(known.get(key, b"")) == size else ask(key)
                if (
                    content is not None
                    and content == known.get(key)
                    and isinstance(_judge(key, content, sizes), InvalidMarker)
                ):
                    content = ask(key)  # the shard may have been made anew since it was catalogued
                return key, content

            markers, lines = [], {}
            for key, content in pool.map(read, listed):
                if content is not None:
                    markers.append(_judge(key, content, sizes))
                    if isinstance(markers[-1], Marker):
                        lines[key] = content
            yield Group(name, markers, lines, known == lines, name in catalogued)


def write_catalog(store: ObjectStore, group: Group) -> None:
    """Bring a group's catalogue up to date, where it has one or is large enough for one."""
    if not group.is_catalogued and len(group.lines) >= SMALLEST:
        store.put_bytes(group.name, b"".join(line + b"\n" for line in group.lines.values()))
    elif not group.is_catalogued and group.has_catalog:
        store.delete(group.name)  # a stale line must not stand for what is written next


@dataclass
class Tally:
    """What the valid markers of a store add up to. bytes: of the shards' objects."""

    num_shards: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    bytes: int = 0
    num_invalid: int = 0


def tally(store: ObjectStore, update_catalog: bool = False) -> Tally:
    """Count the store's shards; with update_catalog also leave catalogues for the next reader (it writes)."""
    total = Tally()
    for group in marker_groups(store):
        for marker in group.markers:
            if isinstance(marker, InvalidMarker):
                total.num_invalid += 1
                continue
            total.num_shards += 1
            total.num_samples += len(marker.sample_ids)
            total.num_tokens += marker.num_tokens
            total.num_supervised += marker.num_supervised
            total.bytes += marker.bytes
        if update_catalog:
            write_catalog(store, group)
    return total


def scan_markers(store: ObjectStore, split: str | None = None) -> tuple[list[Marker], list[InvalidMarker]]:
    """All markers, sorted by shard id: those whose object is there with the right size, and the invalid ones."""
    valid, invalid = [], []
    for group in marker_groups(store, split):
        for marker in group.markers:
            (valid if isinstance(marker, Marker) else invalid).append(marker)
    return sorted(valid, key=lambda m: m.shard_id), sorted(invalid, key=lambda m: m.key)


def list_markers(store: ObjectStore, split: str | None = None) -> list[Marker]:
    """Markers of "train", "heldout" or both, sorted by shard id. Raises UserError when one is not valid."""
    valid, invalid = scan_markers(store, split)
    if invalid:
        raise UserError(f"{store.url}/{invalid[0].key}", got=f"{invalid[0].reason} ({len(invalid)} such marker(s))",
                        want="an object of that size", fix="run extract again: it redoes those shards")  # fmt: skip
    return valid


def _group_name(key: str) -> str:
    """The catalogue of a marker's key; what is no shard's marker gets a group of its own, for `_judge` to refuse."""
    shard_id = Path(key).stem
    if not SHARD_ID.fullmatch(shard_id) or key != marker_key(shard_id):
        return "catalog/none"
    split, _, number = shard_id.rpartition("-")
    return f"catalog/{split}-{int(number) // GROUP:05d}.jsonl"


def _read_catalog(store: ObjectStore, name: str) -> dict[str, bytes]:
    """Its lines by marker key; a catalogue that is gone or damaged says nothing."""
    try:
        lines = store.get_bytes(name).splitlines()
    except KeyError:
        return {}
    known = {}
    for line in lines:
        shard_id = line.rpartition(b'"shard_id":"')[2].partition(b'"')[0].decode("ascii", "replace")
        known[marker_key(shard_id)] = line
    return known


def _judge(key: str, content: bytes, sizes: dict[str, int]) -> Marker | InvalidMarker:
    marker = parse_marker(key, content)
    if isinstance(marker, Marker) and sizes.get(marker.key) != marker.bytes:
        found = f"{sizes[marker.key]} bytes" if marker.key in sizes else "absent"
        return InvalidMarker(key, f"{marker.key} is {found}, the marker says {marker.bytes} bytes", content)
    return marker
