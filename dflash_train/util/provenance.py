"""Who made this file: resolved config, its hash, code version, seed. Carries no credentials."""

import hashlib
import json
import subprocess
from functools import cache
from pathlib import Path

from dflash_train import __version__

_SECRET_WORDS = ("secret", "password", "token_file", "api_key", "access_key", "credential")


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def stable_hash(*parts: object) -> int:
    """64-bit integer from sha256 of the parts joined by '|': the same on every machine, process and Python."""
    text = "|".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def digest(value: object, length: int = 16) -> str:
    """Short hex sha256 of a JSON-able value."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()[:length]


def template_hash(tokenizer) -> str:
    """Short sha256 of a tokenizer's chat template (a text, or named texts)."""
    return digest(tokenizer.chat_template)


def redact(value: object) -> object:
    """Copy with the values of credential-like keys replaced."""
    if isinstance(value, dict):
        return {
            key: "<redacted>" if any(word in str(key).lower() for word in _SECRET_WORDS) else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value


@cache
def code_version() -> str:
    """Package version plus the git commit ('0.1.0+1a2b3c4d5e6f', '-dirty' appended), where there is one."""
    root = Path(__file__).parents[2]
    try:
        run = lambda *args: subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10)
        commit = run("rev-parse", "--short=12", "HEAD")
        if commit.returncode != 0:
            return __version__
        dirty = "-dirty" if run("status", "--porcelain", "--untracked-files=no").stdout.strip() else ""
        return f"{__version__}+{commit.stdout.strip()}{dirty}"
    except (OSError, subprocess.TimeoutExpired):
        return __version__


def provenance(config: dict, **facts: object) -> dict:
    """Record that every shard, checkpoint and report carries.

    `config` is the resolved run config as plain dicts; `facts` are e.g. target_fingerprint, layer_ids, template_hash.
    """
    config = redact(config)
    return {"code_version": code_version(), "config": config, "config_hash": digest(config), **facts}
