"""Is this drafter made for this target? What its shapes say, and what its provenance says where there is one."""

from pathlib import Path

from dflash_train.config import DrafterConfig
from dflash_train.data.chat import Renderer
from dflash_train.drafter.files import PROVENANCE
from dflash_train.drafter.resolve import check_compatible
from dflash_train.target.files import TargetFiles
from dflash_train.target.mask_token import check_mask_token
from dflash_train.util.errors import UserError
from dflash_train.util.io import read_json


def read_record(checkpoint: Path) -> dict:
    """provenance.json beside a drafter of ours; {} for others' drafters, which have none."""
    path = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / PROVENANCE
    return read_json(path) if path.exists() else {}


def check_drafter(config: DrafterConfig, record: dict, files: TargetFiles, renderer: Renderer, *, thinking: str,
                  mask_token_id: int | None, allow_mismatch: bool) -> None:  # fmt: skip
    """Refuse, by name, a drafter made for another target.

    Width, depth, vocabulary and mask token always; weights, chat template and thinking mode where `record` (its
    provenance) knows them, unless allow_mismatch. mask_token_id: the run's, or None to take the drafter's.
    """
    spec = files.spec
    check_compatible(config, name=spec.name, hidden_size=spec.hidden_size, num_layers=spec.num_layers,
                     vocab_size=spec.vocab_size, mask_token_id=mask_token_id)  # fmt: skip
    check_mask_token(config.mask_token_id, files)
    problems = []  # (what, as trained, as asked for)
    trained = record.get("target", {})
    if trained.get("fingerprint") not in (None, spec.fingerprint):
        was, now = f"{trained.get('name')} {trained['fingerprint'][:16]}", f"{spec.name} {spec.fingerprint[:16]}"
        problems.append(("target weights", was, now))
    if record.get("chat_template_hash") not in (None, renderer.template_hash):
        problems.append(("chat template", record["chat_template_hash"], renderer.template_hash))
    modes = trained_modes(record)
    if renderer.has_thinking_modes and modes and thinking not in modes:
        problems.append(("thinking mode", " and ".join(sorted(modes)), thinking))
    if problems and not allow_mismatch:
        raise UserError(f"drafter {config.name}",
                        got=", ".join(f"trained on {what} {was}" for what, was, _ in problems),
                        want=", ".join(f"{what} {now}" for what, _, now in problems),
                        fix="use what it was trained on, or eval.allow_mismatch=true")  # fmt: skip


def trained_modes(record: dict) -> set[str]:
    """Thinking modes ("on", "off") among the training data, from the recipe in the provenance; empty when unknown."""
    data = record.get("config", {}).get("data", {})
    if not data.get("sources"):
        return set()
    shares = [data.get("thinking_share", {}).get(source["bucket"], 0.0) for source in data["sources"].values()]
    return {mode for mode, found in (("on", max(shares) > 0), ("off", min(shares) < 1)) if found}
