"""`extract.verify=true`: read every object back, compare it with its marker, and sweep what no marker names.

Holds the listings, a thousand markers and 8 bytes a sample; a few shards at a time are on the local disk.
"""

import tempfile
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from dflash_train.records import HiddenShard
from dflash_train.store.base import ObjectStore, StoreUnavailable
from dflash_train.store.catalog import Group, marker_groups, write_catalog
from dflash_train.store.fp8 import E4M3, scale_problems
from dflash_train.store.gather import DTYPES
from dflash_train.store.hosts import process_is_gone, read_record
from dflash_train.store.markers import InvalidMarker, Marker, ShardFacts, fetch_shard, marker_key, remove_marker
from dflash_train.store.shard import read_manifest, read_shard
from dflash_train.store.target_files import check_target_files
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes
from dflash_train.util.log import Progress
from dflash_train.util.provenance import stable_hash

UNFINISHED_S = 24 * 3600.0
"""Temporary files, multipart uploads, claims and host records older than this belong to no living run."""
LIVING_S = 900.0
"""A host that extracts has written its record within so many seconds."""
DOWNLOAD_BYTES, MAX_THREADS = 4 << 30, 32
"""Shards on the local disk at a time take no more than so many bytes together (four of them in any case)."""


@dataclass
class Report:
    """problems: one line per bad thing, keys first. The rest counts what was read, removed and left."""

    problems: list[str] = field(default_factory=list)
    num_shards: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    orphans: list[str] = field(default_factory=list)
    unfinished: int = 0
    stale: list[str] = field(default_factory=list)  # claims and host records
    reopened: list[str] = field(default_factory=list)
    living: list[str] = field(default_factory=list)  # hosts that seem to extract: their objects were left alone

    def lines(self) -> list[str]:
        """The report in words."""
        swept = f"swept {len(self.orphans)} object(s) without a marker, {self.unfinished} unfinished write(s)"
        swept += f", {len(self.stale)} old claim(s) and host record(s)"
        if self.living:
            swept = f"swept nothing: {', '.join(self.living[:3])} was written within {LIVING_S / 60:.0f} minutes, so " \
                    "somebody extracts into this store"  # fmt: skip
        redo = f"verify: re-opened {len(self.reopened)} shard(s); run extract again to redo them"
        return [
            f"verify: {self.num_shards:,} shards, {self.num_samples:,} samples, {self.num_tokens:,} tokens, "
            f"{human_bytes(self.num_bytes)}",
            f"verify: {swept}",
            *[f"  BAD {problem}" for problem in self.problems],
            *[f"  re-opened {shard_id}" for shard_id in self.reopened],
            *([redo] if self.reopened else []),
            f"verify: {len(self.problems)} problem(s)" if self.problems else "verify: everything is good",
        ]


def verify_store(store: ObjectStore, folder: str | Path, threads: int | None = None, sweep: bool = True,
                 reopen: bool = False) -> Report:  # fmt: skip
    """Check content, counts, layer ids, non-finite and all-zero rows of every shard, downloading into `folder`.

    reopen: markers of bad shards are removed (unless they changed meanwhile), so that the next run redoes those.
    sweep: objects that no marker names are deleted, unless a host seems to extract into this store: an upload whose
    marker is not written yet looks like an orphan. So are leftovers of runs that ended more than a day ago.
    """
    report, manifest = Report(), read_manifest(store)
    report.living = living_hosts(store) if sweep else []  # and again at the end: a host may come or go meanwhile
    objects = store.list("shards/")  # before the markers: what gets its marker meanwhile is no orphan
    threads = threads or _threads(objects)
    progress = Progress("verify", len(store.list("markers/")), "shards")
    invalid, named, samples = set(), {}, array("Q")
    with ThreadPoolExecutor(threads) as pool:
        for group in marker_groups(store, trust_catalog=False):
            invalid |= {Path(marker.key).stem for marker in group.markers if isinstance(marker, InvalidMarker)}
            named |= {marker.shard_id: marker.key for marker in group.markers if isinstance(marker, Marker)}
            check = lambda marker: (marker, _marker_problems(store, marker, manifest, folder))
            for marker, problems in pool.map(check, group.markers):
                _count(report, marker, samples, progress)
                report.problems += problems
                if problems and reopen:
                    _reopen(store, marker, group, report)
            if sweep or reopen:
                write_catalog(store, group)
    progress.close()
    report.problems += _missing(manifest, invalid | named.keys()) + _twice(store, samples) + check_target_files(store)
    if sweep:
        # What an invalid marker names is evidence until the marker is gone.
        judged = lambda shard_id: shard_id not in invalid or shard_id in report.reopened
        stays = lambda key, shard_id: named.get(shard_id) == key and shard_id not in report.reopened
        keys = [(key, Path(key).name.rpartition("-")[0]) for key, _ in objects]
        orphans = [key for key, shard_id in keys if not stays(key, shard_id) and judged(shard_id)]
        _sweep(store, [key for key in orphans if not _is_named(store, key)], report)
    return report


def _threads(objects: list[tuple[str, int]]) -> int:
    largest = max((size for _, size in objects), default=1)
    return max(4, min(MAX_THREADS, DOWNLOAD_BYTES // max(1, largest)))


def _count(report: Report, marker: Marker | InvalidMarker, samples: array, progress: Progress) -> None:
    if isinstance(marker, Marker):
        report.num_shards += 1
        report.num_samples += len(marker.sample_ids)
        report.num_tokens += marker.num_tokens
        report.num_bytes += marker.bytes
        samples.extend(stable_hash(sample_id) for sample_id in marker.sample_ids)
    progress.update(1, MB=marker.bytes / 1e6 if isinstance(marker, Marker) else 0)


def _reopen(store: ObjectStore, marker: Marker | InvalidMarker, group: Group, report: Report) -> None:
    """Remove a bad shard's marker, and its line from what will be catalogued."""
    key = marker.key if isinstance(marker, InvalidMarker) else marker_key(marker.shard_id)
    content = marker.content if isinstance(marker, InvalidMarker) else group.lines.pop(key)
    if remove_marker(store, key, content):
        group.is_catalogued = False
        report.reopened.append(Path(key).stem)


def _is_named(store: ObjectStore, key: str) -> bool:
    """A marker names this object now: it may have been written after the markers were listed."""
    try:
        return key.encode() in store.get_bytes(marker_key(Path(key).name.rpartition("-")[0]))
    except KeyError:
        return False


def _sweep(store: ObjectStore, orphans: list[str], report: Report) -> None:
    report.living = report.living or living_hosts(store)
    if report.living:
        return
    report.orphans = orphans
    report.stale = [key for prefix in ("claims/", "hosts/") for key in store.older(prefix, UNFINISHED_S)]
    store.delete_many(report.orphans + report.stale)
    report.unfinished = store.drop_unfinished(UNFINISHED_S)


def living_hosts(store: ObjectStore) -> list[str]:
    """Records of hosts that seem to extract: just written, and not by a process of this machine that is gone."""
    recent = {key for key, _ in store.list("hosts/")} - set(store.older("hosts/", LIVING_S))
    return sorted(key for key in recent if not process_is_gone(read_record(store, key)))


# ---------------------------------------------------------------- one shard


def _marker_problems(store: ObjectStore, marker: Marker | InvalidMarker, manifest: dict,
                     folder: str | Path) -> list[str]:  # fmt: skip
    if isinstance(marker, InvalidMarker):
        return [f"{marker.key}: {marker.reason}"]
    return shard_problems(store, marker, manifest, folder)


def shard_problems(store: ObjectStore, marker: Marker, manifest: dict, folder: str | Path) -> list[str]:
    """What is wrong with one shard, as lines that start with its key; downloads it and removes the download."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        try:
            shard = read_shard(fetch_shard(store, marker, temporary), f"{store.url}/{marker.key}")
        except StoreUnavailable:  # says nothing about the shard
            raise
        except UserError as error:
            return [f"{marker.key}: {error.got}"]
        return [f"{marker.key}: {problem}" for problem in content_problems(shard, marker, manifest)]


def content_problems(shard: HiddenShard, marker: Marker, manifest: dict) -> list[str]:
    """Differences between a shard, its marker and the store's manifest; all-zero rows; scales that fit no codes."""
    problems = []
    facts = ShardFacts.of(marker.shard_id, shard)
    for name in ("sample_ids", "lengths", "num_tokens", "num_supervised"):
        if getattr(facts, name) != getattr(marker, name):
            problems.append(f"{name} differ between object and marker")
    num_layers = len(manifest["layer_ids"])
    dtype = next((name for name, dtype in DTYPES.items() if dtype == shard.hidden.dtype), str(shard.hidden.dtype))
    got = (shard.hidden.shape[1], dtype, shard.last_hidden is not None)
    want = (num_layers * manifest["hidden_size"], manifest["dtype"], manifest["last_hidden"])
    if got != want:
        return [*problems, f"(width, dtype, last_hidden) is {got}, the manifest says {want}"]
    layer_ids = shard.provenance.get("layer_ids")
    if layer_ids != manifest["layer_ids"]:
        problems.append(f"layer ids are {layer_ids}, the manifest says {manifest['layer_ids']}")
    if shard.hidden_scale is not None and shard.hidden_scale.shape[1] != num_layers:
        return [*problems, f"{shard.hidden_scale.shape[1]} scales a row, the manifest says {num_layers} layers"]
    return problems + zero_problems(shard, num_layers) + (
        [] if shard.hidden_scale is None else scale_problems(shard.hidden, shard.hidden_scale))  # fmt: skip


def zero_problems(shard: HiddenShard, num_layers: int) -> list[str]:
    """Rows that are all zero, in a captured layer or in the last hidden state: nothing was copied there."""
    problems = []
    for name, parts in (("hidden", num_layers), ("last_hidden", 1)):
        rows = getattr(shard, name)
        if rows is None:
            continue
        bits = rows.view(torch.uint8) & 0x7F if rows.dtype == E4M3 else rows
        zeros = (bits.unflatten(1, (parts, -1)) == 0).all(-1)
        if zeros.any():
            places = zeros.any(0).nonzero().flatten().tolist()
            where = "" if name == "last_hidden" or len(places) == num_layers else f" in captured layer(s) {places}"
            problems.append(f"{int(zeros.any(1).sum())} rows of {name} are all zero{where}")
    return problems


# ---------------------------------------------------------------- the set


def _missing(manifest: dict, known: set[str]) -> list[str]:
    want = [f"{split}-{number:05d}" for split, count in manifest["shards"].items() for number in range(count)]
    absent = [shard_id for shard_id in want if shard_id not in known]
    extra = sorted(known - set(want))
    lines = [f"{len(absent)} of {len(want)} shards have no marker: {', '.join(absent[:5])}"] if absent else []
    return lines + [f"{marker_key(shard_id)}: not a shard of this store's manifest" for shard_id in extra]


def _twice(store: ObjectStore, samples: array) -> list[str]:
    """Samples that are in several shards; their names are looked up only if there are any."""
    hashes, counts = np.unique(np.frombuffer(samples, np.uint64), return_counts=True)
    several = set(hashes[counts > 1].tolist())
    if not several:
        return []
    ids = (sample_id for group in marker_groups(store) for marker in group.markers if isinstance(marker, Marker)
           for sample_id in marker.sample_ids if stable_hash(sample_id) in several)  # fmt: skip
    return [f"sample {sample_id}: in {count} shards" for sample_id, count in Counter(ids).items() if count > 1]
