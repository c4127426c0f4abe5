"""The bytes of a shard, and the protocol that makes it exist: object first, marker last, first marker wins.

    manifest.json                         what the store was made from, written before the first shard
    shards/<id>-<sha12>.safetensors       one attempt at a shard; its key carries its content's hash
    markers/<id>.json                     names the attempt that counts, with bytes, sha256, rows and counts
    target/...                            what training needs of the target (target_files.py)

A shard without a valid marker does not exist; an object without a marker is an orphan (verify.py sweeps those).
"""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_train.records import HiddenShard
from dflash_train.store.base import ObjectStore
from dflash_train.store.target_files import read_target_head, write_target_files
from dflash_train.util.errors import UserError
from dflash_train.util.io import atomic_path, human_bytes, sha256_file
from dflash_train.util.provenance import canonical_json

__all__ = [
    "HiddenShard", "InvalidMarker", "Marker", "ShardFacts", "check_shard", "fetch_shard", "list_markers",
    "non_finite_rows", "publish_shard", "put_manifest", "read_manifest", "read_shard", "read_target_head",
    "scan_markers", "write_shard", "write_target_files",
]  # fmt: skip

MANIFEST = "manifest.json"
FORMAT = "dflash_train.shard.1"
HIDDEN_DTYPES = (torch.bfloat16, torch.float32)
_BITS = {torch.bfloat16: (torch.int16, np.uint16, 0x7F80), torch.float32: (torch.int32, np.uint32, 0x7F800000)}
_SHARD_ID = re.compile(r"(train|heldout)-\d{5,}")
_SHARD_KEY = re.compile(r"shards/(train|heldout)-\d{5,}-[0-9a-f]{12}\.safetensors")
_THREADS = 16


# ---------------------------------------------------------------- bytes


def write_shard(path: str | Path, shard: HiddenShard) -> None:
    """Write a shard as one safetensors file, whole or not at all. Equal shards give equal bytes.

    Raises UserError for a shard that `check_shard` refuses, and for a full or unwritable file system.
    """
    check_shard(shard, str(path))
    tensors = {
        "token_ids": shard.token_ids.to(torch.int32),
        "loss_mask": shard.loss_mask.to(torch.uint8),
        "offsets": shard.offsets.to(torch.int64),
        "hidden": shard.hidden,
    }
    if shard.last_hidden is not None:
        tensors["last_hidden"] = shard.last_hidden
    # One metadata entry: safetensors writes several in an order that changes from process to process.
    facts = {"format": FORMAT, "sample_ids": shard.sample_ids, "provenance": shard.provenance}
    try:
        with atomic_path(path) as temporary:
            save_file({k: v.contiguous() for k, v in tensors.items()}, temporary, {"shard": canonical_json(facts)})
    except (SafetensorError, OSError) as error:  # safetensors reports ENOSPC as SafetensorError
        raise UserError(f"{path}", got=f"could not be written: {error}", want="room for one shard",
                        fix="free some space there, or store.staging_dir=<another folder>") from error  # fmt: skip


def read_shard(path: str | Path, key: str | None = None) -> HiddenShard:
    """Read and check a shard; hidden rows are mapped, not copied. `key` names it in errors.

    Raises UserError naming the key for a file that is cut, not a shard, inconsistent or not finite.
    """
    name = key or str(path)
    try:
        with safe_open(path, framework="pt") as f:
            facts = json.loads((f.metadata() or {}).get("shard", "{}"))
            tensors = {tensor: f.get_tensor(tensor) for tensor in f.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise UserError(name, got=f"not a whole shard: {error}", want="a safetensors file written by extract",
                        fix="python -m dflash_train.extract ... extract.verify=true") from error  # fmt: skip
    missing = {"token_ids", "loss_mask", "offsets", "hidden"} - tensors.keys()
    if facts.get("format") != FORMAT or missing:
        raise UserError(name, got=f"format {facts.get('format')}, tensors {sorted(tensors)}", want=f"format {FORMAT}")
    shard = HiddenShard(
        facts["sample_ids"], tensors["token_ids"], tensors["loss_mask"].bool(), tensors["offsets"], tensors["hidden"],
        tensors.get("last_hidden"), facts["provenance"],
    )  # fmt: skip
    check_shard(shard, name)
    return shard


def check_shard(shard: HiddenShard, name: str) -> None:
    """Raise UserError naming the shard unless shapes, dtypes and offsets agree and every row is finite."""
    num_tokens = shard.token_ids.shape[0]
    rows = {"loss_mask": shard.loss_mask, "hidden": shard.hidden}
    if shard.last_hidden is not None:
        rows["last_hidden"] = shard.last_hidden
    for field, tensor in rows.items():
        _require(tensor.shape[0] == num_tokens, name, f"{tensor.shape[0]} rows of {field}", f"{num_tokens} (tokens)")
        if field != "loss_mask":
            _require(tensor.dim() == 2, name, f"{field} of shape {list(tensor.shape)}", "[tokens, width]")
            _require(tensor.dtype in HIDDEN_DTYPES, name, f"{field} as {tensor.dtype}", "bfloat16 or float32")
    offsets = shard.offsets
    _require(offsets.shape[0] == len(shard.sample_ids) + 1, name, f"{offsets.shape[0]} offsets",
             f"{len(shard.sample_ids) + 1}, samples + 1")  # fmt: skip
    _require(bool(offsets[0] == 0) and bool(offsets[-1] == num_tokens) and bool((offsets.diff() > 0).all()), name,
             "offsets that do not rise from 0 to the number of tokens", f"0 < ... < {num_tokens}")  # fmt: skip
    _require(len(set(shard.sample_ids)) == len(shard.sample_ids), name, "a sample id twice", "each sample once")
    for field in ("hidden", "last_hidden"):
        tensor = getattr(shard, field)
        bad = [] if tensor is None else non_finite_rows(tensor)
        if bad:
            owners = torch.bucketize(torch.tensor(bad), offsets, right=True) - 1
            samples = sorted({shard.sample_ids[i] for i in owners.tolist()})
            _require(False, name, f"{len(bad)} rows of {field} with NaN or Inf, samples {samples[:5]}", "finite rows")


def non_finite_rows(rows: Tensor) -> list[int]:
    """Indices of CPU rows [T, D] (bfloat16 or float32) that hold a NaN or an infinity."""
    return [] if _all_finite(rows) else (~torch.isfinite(rows).all(-1)).nonzero().flatten().tolist()


def _all_finite(rows: Tensor) -> bool:
    """Two passes over the bits, no temporary: NaN and Inf are the largest of their sign when read as integers."""
    signed, unsigned, infinity = _BITS[rows.dtype]
    bits = rows.view(signed).numpy()
    sign = 1 << (8 * rows.element_size() - 1)
    return rows.numel() == 0 or bool(bits.max() < infinity and bits.view(unsigned).max() < infinity + sign)


def _require(ok: bool, name: str, got: str, want: str) -> None:
    if not ok:
        raise UserError(name, got=got, want=want)


# ---------------------------------------------------------------- markers


@dataclass(frozen=True)
class ShardFacts:
    """What a marker says about a shard's content. lengths: tokens per sample, in the shard's order."""

    shard_id: str
    split: str
    sample_ids: list[str]
    lengths: list[int]
    num_tokens: int
    num_supervised: int

    @classmethod
    def of(cls, shard_id: str, shard: HiddenShard) -> "ShardFacts":
        lengths = shard.offsets.diff().tolist()
        return cls(shard_id, shard_id.split("-")[0], list(shard.sample_ids), lengths, sum(lengths),
                   int(shard.loss_mask.sum()))  # fmt: skip


@dataclass(frozen=True)
class Marker(ShardFacts):
    """A shard that is done: the object's key, its size and its hash."""

    key: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class InvalidMarker:
    """A marker that names no good object; `content` is the marker as it was read."""

    key: str
    reason: str
    content: bytes


def publish_shard(store: ObjectStore, path: str | Path, facts: ShardFacts) -> Marker:
    """Upload a shard file, then its marker; where another worker's marker is there already, that one is returned.

    The marker is written only after the store confirmed the object's checksum.
    """
    sha256 = sha256_file(path)
    key = f"shards/{facts.shard_id}-{sha256[:12]}.safetensors"
    marker = Marker(**asdict(facts), key=key, bytes=os.path.getsize(path), sha256=sha256)
    store.put_file(key, Path(path))
    marker_key = f"markers/{facts.shard_id}.json"
    if store.put_bytes(marker_key, canonical_json(asdict(marker)).encode(), if_absent=True):
        return marker
    winner = _parse_marker(marker_key, store.get_bytes(marker_key))
    if isinstance(winner, InvalidMarker):
        raise UserError(f"{store.url}/{winner.key}", got=winner.reason, want="the marker of another worker",
                        fix="run extract again: it redoes this shard")  # fmt: skip
    if winner.key != key:
        store.delete(key)  # ours is an orphan now
    return winner


def scan_markers(store: ObjectStore) -> tuple[list[Marker], list[InvalidMarker]]:
    """All markers, sorted by shard id: those whose object is there with the right size, and the invalid ones."""
    keys = [key for key, _ in store.list("markers/")]
    with ThreadPoolExecutor(_THREADS) as pool:
        contents = list(pool.map(store.get_bytes, keys))
    sizes = dict(store.list("shards/"))  # after the markers: an object is always older than its marker
    valid, invalid = [], []
    for key, content in zip(keys, contents):
        marker = _parse_marker(key, content)
        if isinstance(marker, Marker) and sizes.get(marker.key) != marker.bytes:
            found = f"{sizes[marker.key]} bytes" if marker.key in sizes else "absent"
            marker = InvalidMarker(key, f"{marker.key} is {found}, the marker says {marker.bytes} bytes", content)
        (valid if isinstance(marker, Marker) else invalid).append(marker)
    return valid, invalid


def list_markers(store: ObjectStore, split: str | None = None) -> list[Marker]:
    """Markers of "train", "heldout" or both, sorted by shard id. Raises UserError when one is not valid."""
    valid, invalid = scan_markers(store)
    if invalid:
        raise UserError(f"{store.url}/{invalid[0].key}", got=f"{invalid[0].reason} ({len(invalid)} such marker(s))",
                        want="an object of that size", fix="run extract again: it redoes those shards")  # fmt: skip
    return [marker for marker in valid if split in (None, marker.split)]


def _parse_marker(key: str, content: bytes) -> Marker | InvalidMarker:
    try:
        row = json.loads(content)
        marker = Marker(**{field.name: row[field.name] for field in fields(Marker)})
    except (ValueError, KeyError, TypeError) as error:
        return InvalidMarker(key, f"not a marker ({type(error).__name__}: {error})", content)
    # Keys become file names in caches, so their form is checked here, once.
    named = _SHARD_ID.fullmatch(str(marker.shard_id)) and _SHARD_KEY.fullmatch(str(marker.key))
    if not named or key != f"markers/{marker.shard_id}.json" or not marker.key.startswith(f"shards/{marker.shard_id}-"):
        return InvalidMarker(key, f"it names shard {marker.shard_id!r} at {marker.key!r}", content)
    if len(marker.lengths) != len(marker.sample_ids) or sum(marker.lengths) != marker.num_tokens:
        return InvalidMarker(key, "its counts disagree with each other", content)
    return marker


def fetch_shard(store: ObjectStore, marker: Marker, cache_dir: str | Path) -> Path:
    """The shard's file in `cache_dir`, downloaded unless it is there; it gets its name after its sha256 was checked.

    Raises UserError naming the key when the object is gone or its content is not what the marker says.
    """
    path = Path(cache_dir, Path(marker.key).name)  # carries the hash, so the name and size of a finished file suffice
    if path.exists() and path.stat().st_size == marker.bytes:
        return path
    name = f"{store.url}/{marker.key}"
    try:
        with atomic_path(path) as temporary:
            store.get_file(marker.key, temporary)
            got = sha256_file(temporary)
            _require(got == marker.sha256, name, f"{human_bytes(temporary.stat().st_size)} with sha256 {got[:12]}...",
                     f"{human_bytes(marker.bytes)} with sha256 {marker.sha256[:12]}...")  # fmt: skip
    except KeyError:
        raise UserError(name, got="no such object", want=f"the shard that markers/{marker.shard_id}.json names",
                        fix="run extract again: it redoes this shard") from None  # fmt: skip
    return path


# ---------------------------------------------------------------- manifest


def read_manifest(store: ObjectStore) -> dict:
    """manifest.json of the store. Raises UserError when nothing was extracted there."""
    try:
        return json.loads(store.get_bytes(MANIFEST))
    except KeyError:
        raise UserError(f"{store.url}/{MANIFEST}", got="no such object", want="a store that extract has filled",
                        fix="python -m dflash_train.extract, same data, target and store") from None  # fmt: skip
    except ValueError as error:
        raise UserError(f"{store.url}/{MANIFEST}", got=f"not valid JSON ({error})", want="a manifest") from error


def put_manifest(store: ObjectStore, manifest: dict, must_agree: tuple[str, ...]) -> dict:
    """Write the manifest unless there is one; the one that counts is returned.

    Raises UserError naming both values when an existing one differs in an entry of `must_agree` ("target.fingerprint").
    """
    if store.put_bytes(MANIFEST, (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode(), if_absent=True):
        return manifest
    existing = read_manifest(store)
    for field in must_agree:
        here, there = _entry(manifest, field), _entry(existing, field)
        if here != there:
            raise UserError(f"{store.url}/{MANIFEST}: {field}", got=f"{here} in this run",
                            want=f"{there}, from which the store was made",
                            fix="store.root=<another place>, or the configuration the store was made with")  # fmt: skip
    return existing


def _entry(manifest: dict, path: str) -> object:
    for part in path.split("."):
        manifest = manifest.get(part) if isinstance(manifest, dict) else None
    return manifest
