"""What the store keeps of the target, so that the bucket alone is enough to train: the head, and small files.

target/target_head.safetensors    embedding, head (only when untied), final_norm; norm's offset and eps as metadata
target/config.json                of the text model
target/...                        tokenizer files, chat_template.jinja
target/files.json                 bytes and sha256 of each, written last: without it there are no target files
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dflash_train.records import TargetHead
from dflash_train.store.base import ObjectStore
from dflash_train.util.errors import UserError
from dflash_train.util.io import free_bytes, human_bytes, sha256_file
from dflash_train.util.provenance import canonical_json

HEAD = "target_head.safetensors"
INDEX = "target/files.json"
_NOT_THERE = {"want": "the target's files, written by extract", "fix": "run extract again: it writes what is missing"}


def has_target_files(store: ObjectStore) -> bool:
    """The index is there, and every file it names has its size."""
    try:
        index = json.loads(store.get_bytes(INDEX))
    except (KeyError, ValueError):
        return False
    sizes = dict(store.list("target/"))
    return all(sizes.get(f"target/{name}") == entry["bytes"] for name, entry in index.items())


def ensure_target_files(store: ObjectStore, head: TargetHead, files: dict[str, bytes], staging_dir: str | Path) -> None:
    """write_target_files, unless they are there."""
    if not has_target_files(store):
        write_target_files(store, head, files, staging_dir)


def write_target_files(
    store: ObjectStore, head: TargetHead, files: dict[str, bytes], staging_dir: str | Path | None = None
) -> None:
    """Store the head's tensors (as they are: dtype kept) and small `files` by name, then the index.

    `staging_dir` holds the head's file for a moment (2.5-5 GB at 27B size), in a folder that carries this process's id:
    what a killed worker leaves goes with its other unfinished files. Raises UserError where it has no room.
    """
    index = {}
    tensors = {"embedding": head.embedding, "final_norm": head.final_norm}
    if head.head is not head.embedding:
        tensors["head"] = head.head
    folder = tempfile.TemporaryDirectory(dir=staging_dir, prefix=".target-", suffix=f".{os.getpid()}.tmp")
    with folder as name:
        path = Path(name, HEAD)
        need, free = sum(tensor.nbytes for tensor in tensors.values()), free_bytes(name)
        if need > free:
            raise UserError(name, got=f"{human_bytes(free)} free", want=f"{human_bytes(need)} for the target's head",
                            fix="store.staging_dir=<another folder>")  # fmt: skip
        facts = {"final_norm_offset": head.final_norm_offset, "final_norm_eps": head.final_norm_eps}
        cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            save_file(cpu, path, {"target_head": canonical_json(facts)})
        except SafetensorError as error:
            raise UserError(str(path), got=f"could not be written: {error}", want="room for the target's head",
                            fix="store.staging_dir=<another folder>") from error  # fmt: skip
        index[HEAD] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        store.put_file(f"target/{HEAD}", path)
    for name, data in files.items():
        assert "/" not in name and not name.startswith("."), name
        index[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        store.put_bytes(f"target/{name}", data)
    store.put_bytes(INDEX, canonical_json(index).encode())


def read_target_head(store: ObjectStore, cache_dir: str | Path | None = None) -> TargetHead:
    """The target's frozen embedding, head and final norm, checksum verified.

    With `cache_dir` the file is kept there under its hash. Raises UserError when the store does not have it.
    """
    entry = _index(store).get(HEAD)
    if entry is None:
        raise UserError(f"{store.url}/target/{HEAD}", got="not in files.json", **_NOT_THERE)
    if cache_dir is not None:
        return _load_head(_fetch(store, HEAD, entry, Path(cache_dir, f"{entry['sha256'][:12]}-{HEAD}")))
    with tempfile.TemporaryDirectory() as folder:  # the tensors stay mapped after the file's name is gone
        return _load_head(_fetch(store, HEAD, entry, Path(folder, HEAD)))


def read_target_config(store: ObjectStore) -> dict:
    """config.json of the target's text model."""
    try:
        return json.loads(store.get_bytes("target/config.json"))
    except KeyError:
        raise UserError(f"{store.url}/target/config.json", got="no such object", **_NOT_THERE) from None


def fetch_target_files(store: ObjectStore, folder: str | Path) -> Path:
    """Download the small files (config, tokenizer, template; not the head) into `folder`, checksum verified."""
    for name, entry in _index(store).items():
        if name != HEAD:
            _fetch(store, name, entry, Path(folder, Path(name).name))
    return Path(folder)


def check_target_files(store: ObjectStore) -> list[str]:
    """Reads every target file back; one line per bad one."""
    try:
        index = _index(store)
    except UserError as error:
        return [f"{INDEX}: {error.got}"]
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        for name, entry in index.items():
            try:
                _fetch(store, name, entry, Path(folder, Path(name).name)).unlink()
            except UserError as error:
                problems.append(f"target/{name}: {error.got}")
    return problems


def _index(store: ObjectStore) -> dict:
    try:
        return json.loads(store.get_bytes(INDEX))
    except KeyError:
        raise UserError(f"{store.url}/{INDEX}", got="no such object", **_NOT_THERE) from None


def _fetch(store: ObjectStore, name: str, entry: dict, path: Path) -> Path:
    if path.exists() and path.stat().st_size == entry["bytes"]:
        return path
    try:
        store.get_file(f"target/{name}", path)
    except KeyError:
        raise UserError(f"{store.url}/target/{name}", got="no such object", **_NOT_THERE) from None
    got = sha256_file(path)
    if got != entry["sha256"]:
        path.unlink()
        raise UserError(f"{store.url}/target/{name}", got=f"sha256 {got[:12]}...", want=f"{entry['sha256'][:12]}...",
                        fix="delete the store's target/ folder and run extract again")  # fmt: skip
    return path


def _load_head(path: Path) -> TargetHead:
    with safe_open(path, framework="pt") as f:
        facts = json.loads(f.metadata()["target_head"])
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
    embedding = tensors["embedding"]
    return TargetHead(embedding, tensors.get("head", embedding), tensors["final_norm"], facts["final_norm_offset"],
                      facts["final_norm_eps"])  # fmt: skip
