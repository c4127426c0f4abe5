"""Which answers belong together: what must be equal for two runs' answers, and a refusal that names what is not."""

import dataclasses
from pathlib import Path

from dflash_train.config import DataConfig
from dflash_train.util.errors import UserError
from dflash_train.util.io import read_json, sha256_file, write_json

HOW = ("batch_size", "server", "client", "worker", "probe", "min_answer_tokens", "accept_stale_mix")
"""Keys of data.answers that say how answers are had, not what they are."""


def make_identity(data: DataConfig, target_dtype: str, spec, template_hash: str, mix_paths: list[Path]) -> dict:
    """What finished answers follow from, wherever they were made."""
    answers = dataclasses.asdict(data.answers)
    return {
        "target": spec.name,
        "target_fingerprint": spec.fingerprint,
        "target_dtype": target_dtype,
        "template_hash": template_hash,
        "seed": data.seed,
        "sampling": {key: value for key, value in answers.items() if key not in HOW},
        "mix": mix_facts(mix_paths),
    }


def mix_facts(mix_paths: list[Path]) -> dict[str, str]:
    return {path.name: sha256_file(path) for path in mix_paths if path.exists()}


def has_answers_of(folder: Path, mix_paths: list[Path]) -> bool:
    """Whether the folder holds answers, finished or not, of exactly these prompts."""
    parts, manifest = folder / "parts", folder / "manifest.json"
    if manifest.exists():
        identity = read_json(manifest).get("identity", {})
    elif any(path.stat().st_size for path in parts.glob("*.jsonl")):
        identity = read_json(parts / "identity.json")
    else:
        return False
    return identity.get("mix") == mix_facts(mix_paths)


def check_identity(old: dict, new: dict, folder: Path) -> None:
    """Raise UserError naming both sides of every difference. A mix that is not here is none: answers may be copied."""
    old, new = flat(old), flat(new)
    differ = [key for key in new if old.get(key) != new[key]]
    if unknown := not_recorded(old, new):
        raise UserError(f"answers in {folder}", got="an earlier version of dflash_train made them, which did not "
                        f"record {', '.join(unknown)}", want="answers of this version",
                        fix=f"delete {folder} to have them made again, or give this run another data.name and keep "
                        "them; an unfinished folder can only be finished by the version that began it")  # fmt: skip
    if differ:
        say_all = lambda facts: ", ".join(f"{key} = {facts.get(key)}" for key in differ)
        raise UserError(f"answers in {folder}", got=say_all(old), want=say_all(new) + ", as in this run",
                        fix=f"delete {folder}, or give this run another data.name or target.name")  # fmt: skip


def not_recorded(old: dict, new: dict) -> list[str]:
    """Keys that came with a later version of this program than `old`: of a group of facts that both have, old lacks
    some. (Another group is another way of answering; of the mix's files a mix need not have all.)"""
    group = lambda key: key.rpartition(".")[0]
    known = {"", *(group(key) for key in new if key in old)} - {"mix"}
    return [key for key in new if key not in old and group(key) in known]


def flat(value: dict, prefix: str = "") -> dict:
    """{'a': {'b': 1}} -> {'a.b': 1}."""
    out = {}
    for key, item in value.items():
        out |= flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {prefix + key: item}
    return out


def open_parts(folder: Path, identity: dict) -> Path:
    """The folder of the answers that are there; those of another target, template, sampling, mix or way of answering
    are refused."""
    parts = folder / "parts"
    record = parts / "identity.json"
    if record.exists():
        check_identity(read_json(record), identity, folder)
    else:
        write_json(record, identity)
    return parts
