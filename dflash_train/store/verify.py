"""`extract.verify=true`: read every object back, compare it with its marker, and sweep what no marker names."""

import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from dflash_train.records import HiddenShard
from dflash_train.store.base import ObjectStore
from dflash_train.store.shard import (
    InvalidMarker,
    Marker,
    ShardFacts,
    fetch_shard,
    read_manifest,
    read_shard,
    scan_markers,
)
from dflash_train.store.target_files import check_target_files
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes

UNFINISHED_S = 24 * 3600.0
"""Temporary files and multipart uploads older than this belong to no living run."""


@dataclass
class Report:
    """problems: one line per bad thing, keys first. The rest counts what was read."""

    problems: list[str] = field(default_factory=list)
    num_shards: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    orphans: list[str] = field(default_factory=list)
    unfinished: int = 0

    def lines(self) -> list[str]:
        """The report in words."""
        return [
            f"verify: {self.num_shards} shards, {self.num_samples:,} samples, {self.num_tokens:,} tokens, "
            f"{human_bytes(self.num_bytes)}",
            f"verify: swept {len(self.orphans)} object(s) without a marker, {self.unfinished} unfinished write(s)",
            *[f"  BAD {problem}" for problem in self.problems],
            f"verify: {len(self.problems)} problem(s)" if self.problems else "verify: everything is good",
        ]


def verify_store(store: ObjectStore, folder: str | Path, threads: int = 4, sweep: bool = True) -> Report:
    """Check content, counts, non-finite and all-zero rows of every shard, downloading into `folder`; remove orphans.

    Run it while nobody extracts into this store: an upload whose marker is not written yet looks like an orphan.
    """
    report = Report()
    manifest = read_manifest(store)
    objects = store.list("shards/")  # before the markers: what gets its marker meanwhile is no orphan
    valid, invalid = scan_markers(store)
    report.problems += [f"{marker.key}: {marker.reason}" for marker in invalid]
    report.problems += _missing(manifest, valid, invalid)
    counts = Counter(sample_id for marker in valid for sample_id in marker.sample_ids)
    report.problems += [f"sample {sample_id}: in {n} shards" for sample_id, n in counts.items() if n > 1]
    with ThreadPoolExecutor(threads) as pool:
        for problems in pool.map(lambda marker: shard_problems(store, marker, manifest, folder), valid):
            report.problems += problems
    report.problems += check_target_files(store)
    report.num_shards, report.num_samples = len(valid), len(counts)
    report.num_tokens, report.num_bytes = sum(m.num_tokens for m in valid), sum(m.bytes for m in valid)
    if sweep:
        named = {marker.key for marker in valid}
        report.orphans = [key for key, _ in objects if key not in named]
        for key in report.orphans:
            store.delete(key)
        report.unfinished = store.drop_unfinished(UNFINISHED_S)
    return report


def shard_problems(store: ObjectStore, marker: Marker, manifest: dict, folder: str | Path) -> list[str]:
    """What is wrong with one shard, as lines that start with its key; downloads it and removes the download."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        try:
            shard = read_shard(fetch_shard(store, marker, temporary), f"{store.url}/{marker.key}")
        except UserError as error:
            return [f"{marker.key}: {error.got}"]
        return [f"{marker.key}: {problem}" for problem in content_problems(shard, marker, manifest)]


def content_problems(shard: HiddenShard, marker: Marker, manifest: dict) -> list[str]:
    """Differences between a shard, its marker and the store's manifest; all-zero rows."""
    problems = []
    facts = ShardFacts.of(marker.shard_id, shard)
    for name in ("sample_ids", "lengths", "num_tokens", "num_supervised"):
        if getattr(facts, name) != getattr(marker, name):
            problems.append(f"{name} differ between object and marker")
    width = len(manifest["layer_ids"]) * manifest["hidden_size"]
    got = (shard.hidden.shape[1], str(shard.hidden.dtype).removeprefix("torch."), shard.last_hidden is not None)
    want = (width, manifest["dtype"], manifest["last_hidden"])
    if got != want:
        problems.append(f"(width, dtype, last_hidden) is {got}, the manifest says {want}")
    for name in ("hidden", "last_hidden"):
        rows = getattr(shard, name)
        zeros = 0 if rows is None else int((~rows.any(-1)).sum())
        if zeros:
            problems.append(f"{zeros} rows of {name} are all zero")
    return problems


def _missing(manifest: dict, valid: list[Marker], invalid: list[InvalidMarker]) -> list[str]:
    known = {marker.shard_id for marker in valid} | {Path(marker.key).stem for marker in invalid}
    want = [f"{split}-{number:05d}" for split, count in manifest["shards"].items() for number in range(count)]
    absent = [shard_id for shard_id in want if shard_id not in known]
    extra = sorted(known - set(want))
    lines = [f"{len(absent)} of {len(want)} shards have no marker: {', '.join(absent[:5])}"] if absent else []
    return lines + [f"markers/{shard_id}.json: not a shard of this store's manifest" for shard_id in extra]
