"""The bytes of a shard and of the store's manifest; FORMAT.md is the format for readers that know safetensors alone.

manifest.json                         what the store was made from, written before the first shard
shards/<id>-<sha12>.safetensors       one attempt at a shard; its key carries its content's hash
markers/<id>.json                     names the attempt that counts, with bytes, sha256, rows and counts (markers.py)
catalog/<split>-<n>.jsonl             a thousand markers in one object, only to read them faster (catalog.py)
claims/, hosts/                       who is making which shard (claims.py)
target/...                            what training needs of the target (target_files.py)
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_train.records import HiddenShard
from dflash_train.store.base import ObjectStore
from dflash_train.store.catalog import list_markers, scan_markers
from dflash_train.store.fp8 import E4M3
from dflash_train.store.markers import InvalidMarker, Marker, ShardFacts, fetch_shard, publish_shard
from dflash_train.store.target_files import read_target_head, write_target_files
from dflash_train.util.errors import UserError
from dflash_train.util.io import atomic_path
from dflash_train.util.provenance import canonical_json

__all__ = [
    "HiddenShard", "InvalidMarker", "Marker", "ShardFacts", "check_shard", "fetch_shard", "list_markers",
    "non_finite_rows", "publish_shard", "put_manifest", "read_manifest", "read_shard", "read_target_head",
    "scan_markers", "write_shard", "write_target_files",
]  # fmt: skip

MANIFEST = "manifest.json"
ROWS = ("hidden", "hidden_scale", "last_hidden")
"""Fields of a shard that have numbers for every token."""
FORMAT = "dflash_train.shard.1"
HIDDEN_DTYPES = (torch.bfloat16, torch.float32)
_BITS = {  # as signed, as unsigned, the smallest pattern that is not finite
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
    E4M3: (torch.int8, np.uint8, 0x7F),
}


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
    for name in ("hidden_scale", "last_hidden"):
        if getattr(shard, name) is not None:
            tensors[name] = getattr(shard, name)
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
        tensors.get("last_hidden"), facts["provenance"], tensors.get("hidden_scale"),
    )  # fmt: skip
    check_shard(shard, name)
    return shard


def check_shard(shard: HiddenShard, name: str) -> None:
    """Raise UserError naming the shard unless shapes, dtypes and offsets agree and every row is finite."""
    num_tokens = shard.token_ids.shape[0]
    _check_rows(shard, name, num_tokens)
    offsets = shard.offsets
    _require(offsets.shape[0] == len(shard.sample_ids) + 1, name, f"{offsets.shape[0]} offsets",
             f"{len(shard.sample_ids) + 1}, samples + 1")  # fmt: skip
    _require(bool(offsets[0] == 0) and bool(offsets[-1] == num_tokens) and bool((offsets.diff() > 0).all()), name,
             "offsets that do not rise from 0 to the number of tokens", f"0 < ... < {num_tokens}")  # fmt: skip
    _require(len(set(shard.sample_ids)) == len(shard.sample_ids), name, "a sample id twice", "each sample once")
    for field in ROWS:
        tensor = getattr(shard, field)
        bad = [] if tensor is None else non_finite_rows(tensor)
        if bad:
            owners = torch.bucketize(torch.tensor(bad), offsets, right=True) - 1
            samples = sorted({shard.sample_ids[i] for i in owners.tolist()})
            _require(False, name, f"{len(bad)} rows of {field} with NaN or Inf, samples {samples[:5]}", "finite rows")


def _check_rows(shard: HiddenShard, name: str, num_tokens: int) -> None:
    """Shapes and dtypes of what has a row per token; codes have scales that divide their columns, others have none."""
    dtypes = {"hidden": (*HIDDEN_DTYPES, E4M3), "hidden_scale": (torch.float32,), "last_hidden": HIDDEN_DTYPES}
    for field in ("loss_mask", *ROWS):
        tensor = getattr(shard, field)
        if tensor is None:
            continue
        _require(tensor.shape[0] == num_tokens, name, f"{tensor.shape[0]} rows of {field}", f"{num_tokens} (tokens)")
        if field != "loss_mask":
            _require(tensor.dim() == 2, name, f"{field} of shape {list(tensor.shape)}", "[tokens, width]")
            want = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes[field])
            _require(tensor.dtype in dtypes[field], name, f"{field} as {tensor.dtype}", want)
    scaled = shard.hidden_scale is not None
    _require((shard.hidden.dtype == E4M3) == scaled, name, f"hidden as {shard.hidden.dtype}, "
             f"{'with' if scaled else 'without'} hidden_scale", "hidden_scale just with float8_e4m3fn")  # fmt: skip
    if scaled:
        layers, width = shard.hidden_scale.shape[1], shard.hidden.shape[1]
        _require(layers > 0 and width % layers == 0, name, f"{layers} scales for {width} columns", "one a layer")
        bad = int((shard.hidden_scale <= 0).any(1).sum())  # one that is no number is found below, with its sample
        _require(bad == 0, name, f"{bad} rows with a hidden_scale that is not positive", "amax / 448, or 1")


def non_finite_rows(rows: Tensor) -> list[int]:
    """Indices of CPU rows [T, D] (bfloat16, float32 or float8_e4m3fn) that hold a NaN or an infinity."""
    if _all_finite(rows):
        return []
    finite = (rows.view(torch.uint8) & 0x7F) != 0x7F if rows.dtype == E4M3 else torch.isfinite(rows)
    return (~finite.all(-1)).nonzero().flatten().tolist()


def _all_finite(rows: Tensor) -> bool:
    """Two passes over the bits, no temporary: NaN and Inf are the largest of their sign when read as integers."""
    signed, unsigned, infinity = _BITS[rows.dtype]
    bits = rows.view(signed).numpy()
    sign = 1 << (8 * rows.element_size() - 1)
    return rows.numel() == 0 or bool(bits.max() < infinity and bits.view(unsigned).max() < infinity + sign)


def _require(ok: bool, name: str, got: str, want: str) -> None:
    if not ok:
        raise UserError(name, got=got, want=want)


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
