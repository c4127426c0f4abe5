"""The protocol that makes a shard exist: object first, marker last, first marker wins.

A shard without a valid marker does not exist; an object without a marker is an orphan (verify.py sweeps those).
"""

import json
import os
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from dflash_train.records import HiddenShard
from dflash_train.store.base import ObjectStore
from dflash_train.util.errors import UserError
from dflash_train.util.io import atomic_path, human_bytes, sha256_file
from dflash_train.util.provenance import canonical_json

SHARD_ID = re.compile(r"(train|heldout)-\d{5,}")
SHARD_KEY = re.compile(r"shards/((?:train|heldout)-\d{5,})-[0-9a-f]{12}\.safetensors")
_REDO = "run extract again: it redoes this shard"


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


def marker_key(shard_id: str) -> str:
    return f"markers/{shard_id}.json"


# ---------------------------------------------------------------- writing


def publish_shard(store: ObjectStore, path: str | Path, facts: ShardFacts) -> Marker:
    """Upload a shard file, then its marker; where another worker's marker is there already, that one is returned.

    The marker is written only after the store confirmed the object's checksum.
    """
    marker = marker_for(path, facts)
    store.put_file(marker.key, Path(path))
    return put_marker(store, marker)


def marker_for(path: str | Path, facts: ShardFacts) -> Marker:
    """The marker of a staged file, once it is uploaded. Reads the file once, for its hash."""
    sha256 = sha256_file(path)
    key = f"shards/{facts.shard_id}-{sha256[:12]}.safetensors"
    return Marker(**vars(facts), key=key, bytes=os.path.getsize(path), sha256=sha256)


def put_marker(store: ObjectStore, marker: Marker) -> Marker:
    """Write the marker of an object that is there. Returns the marker that counts: ours, or another worker's, in which
    case our object goes. Raises UserError when the other's marker cannot be read."""
    key = marker_key(marker.shard_id)
    if store.put_bytes(key, marker_bytes(marker), if_absent=True):
        return marker
    winner = parse_marker(key, store.get_bytes(key))
    if isinstance(winner, InvalidMarker):
        raise UserError(f"{store.url}/{key}", got=winner.reason, want="the marker of another worker", fix=_REDO)
    if winner.key != marker.key:
        store.delete(marker.key)  # ours is an orphan now
    return winner


def marker_bytes(marker: Marker) -> bytes:
    """One line of JSON, keys sorted."""
    return canonical_json(asdict(marker)).encode()


def remove_marker(store: ObjectStore, key: str, content: bytes) -> bool:
    """Delete a marker that still says `content`, so that its shard is done again; False when another worker has
    repaired it meanwhile."""
    try:
        if store.get_bytes(key) != content:
            return False
    except KeyError:
        return False
    store.delete(key)
    return True


# ---------------------------------------------------------------- reading


def parse_marker(key: str, content: bytes) -> Marker | InvalidMarker:
    """The marker at `key`. Keys become file names in caches, so their form is checked here, once."""
    try:
        row = json.loads(content)
        marker = Marker(**{field.name: row[field.name] for field in fields(Marker)})
    except (ValueError, KeyError, TypeError) as error:
        return InvalidMarker(key, f"not a marker ({type(error).__name__}: {error})", content)
    named = SHARD_ID.fullmatch(str(marker.shard_id)) and SHARD_KEY.fullmatch(str(marker.key))
    if not named or key != marker_key(marker.shard_id) or not marker.key.startswith(f"shards/{marker.shard_id}-"):
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
            if got != marker.sha256:
                raise UserError(
                    name, got=f"{human_bytes(temporary.stat().st_size)} with sha256 {got[:12]}...",
                    want=f"{human_bytes(marker.bytes)} with sha256 {marker.sha256[:12]}...",
                    fix="python -m dflash_train.extract verify=true reopen=true, then extract again",
                )  # fmt: skip
    except KeyError:
        raise UserError(name, got="no such object", want=f"the shard that {marker_key(marker.shard_id)} names",
                        fix=_REDO) from None  # fmt: skip
    return path
