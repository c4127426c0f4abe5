"""Training checkpoints: whole or absent, found again after any interruption, continued by any number of ranks and ZeRO
stage, refused where they cannot be.

    output_dir/latest.json              names the newest complete checkpoint; written last
    output_dir/step-000200/state.json   where training stands, what it was made with, size and sha256 of every file
                          /drafter/     the weights as a z-lab folder, which eval and export read
                          /training/    masters and optimizer state, whole tensors by name (state_files.py)

Training draws nothing from a random generator (anchors and order are functions of seed, epoch and step), so there is
no generator state to keep.
"""

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from dflash_train.drafter.files import LATEST, write_latest
from dflash_train.engine.agree import together, writing
from dflash_train.engine.zero import ZeroEngine
from dflash_train.util import dist
from dflash_train.util.errors import UserError
from dflash_train.util.io import free_bytes, human_bytes, read_json, sha256_file, write_json
from dflash_train.util.log import Progress, say

STATE, TRAINING = "state.json", "training"
_HASHERS, _LONG_BYTES = 4, 2_000_000_000
_STEP = re.compile(r"step-(\d{6,})")


def save_checkpoint(
    output_dir: str | Path, engine: ZeroEngine, state: dict, write_drafter: Callable[[Path, dict[str, Tensor]], object],
    *, keep: int, need_bytes: int,
) -> Path:  # fmt: skip
    """Write `step-NNNNNN` (state["step"]) under a temporary name, rename it, then point latest.json at it.

    A collective, at the end of an accumulation window. Keeps the newest `keep` of this run (state["run_id"]); those of
    an earlier run in the same folder are removed. When one rank cannot write, every rank raises UserError naming rank
    and file, and what was there before stays as it was.
    """
    output_dir = Path(output_dir)
    folder = output_dir / f"step-{state['step']:06d}"
    temporary = output_dir / f".{folder.name}.tmp"
    try:
        with together(engine.device), writing(temporary):
            if dist.is_main():
                _prepare(temporary, need_bytes)
        state = {**state, "num_steps": engine.save(temporary / TRAINING)}
        weights = engine.gathered_state_dict()
        with together(engine.device), writing(temporary):
            if dist.is_main():
                write_drafter(temporary / "drafter", weights)
                _finish(temporary, folder, state, keep)
    except UserError:
        if dist.is_main():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _prepare(temporary: Path, need_bytes: int) -> None:
    """Rank 0: an empty folder on a disk with enough room. What killed runs left half-written goes."""
    for left in temporary.parent.glob(".step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir(parents=True)
    free = free_bytes(temporary)
    if free < need_bytes:
        raise UserError("train.output_dir", got=f"{human_bytes(free)} free at {temporary.parent}",
                        want=f"{human_bytes(need_bytes)} for a checkpoint",
                        fix="free some space, train.keep_checkpoints=1, or train.output_dir=...")  # fmt: skip


def _finish(temporary: Path, folder: Path, state: dict, keep: int) -> None:
    """Rank 0, all parts written: the list of files, the final name, latest.json, and only then the old ones go."""
    paths = sorted(path for path in temporary.rglob("*") if path.is_file())
    sums = dict(zip(paths, file_sums(paths)))
    files = {str(path.relative_to(temporary)): {"bytes": path.stat().st_size, "sha256": sums[path]} for path in paths}
    write_json(temporary / STATE, {**state, "files": files})
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
    write_latest(folder.parent, folder.name)
    old = [path for path in step_folders(folder.parent) if path != folder]
    same_run = [path for path in old if _read_state(path).get("run_id") == state["run_id"]]
    for path in old:
        if path not in same_run[: keep - 1]:
            shutil.rmtree(path)


def step_folders(output_dir: str | Path) -> list[Path]:
    """Checkpoint folders, newest first; complete or not."""
    found = [path for path in Path(output_dir).glob("step-*") if path.is_dir() and _STEP.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(_STEP.fullmatch(path.name)[1]), reverse=True)


def _read_state(folder: Path) -> dict:
    try:
        return read_json(folder / STATE)
    except UserError:
        return {}


def file_sums(paths: list[Path]) -> list[str]:
    """sha256 of each file, several at a time; how far it is is said where that takes long."""
    total = sum(path.stat().st_size for path in paths)
    progress = Progress("checksums", total, "bytes") if total > _LONG_BYTES else None
    sums = []
    with ThreadPoolExecutor(_HASHERS) as pool:
        for path, found in zip(paths, pool.map(sha256_file, paths)):
            sums.append(found)
            if progress is not None:
                progress.update(path.stat().st_size)
    if progress is not None:
        progress.close()
    return sums


def missing_part(folder: Path) -> str | None:
    """None for a complete checkpoint, else what it lacks: sizes first, then the checksum of every file."""
    state = _read_state(folder)
    if not state:
        return f"no readable {STATE}"
    if "num_steps" not in state:
        return f"an earlier version wrote it; train.init_from={folder / 'drafter'} takes its weights"
    for name, facts in state["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is not there"
        if path.stat().st_size != facts["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {facts['bytes']}"
    for (name, facts), found in zip(state["files"].items(), file_sums([folder / name for name in state["files"]])):
        if found != facts["sha256"]:
            return f"{name} has changed: sha256 {found[:12]}, not {facts['sha256'][:12]}"
    return None


def find_resumable(output_dir: str | Path) -> tuple[Path, dict] | None:
    """The newest complete checkpoint that latest.json leads to, and its state; None in a folder without checkpoints.

    An incomplete one is named and the previous one of the same run taken. Raises UserError when none is complete.
    """
    output_dir = Path(output_dir)
    if not (output_dir / LATEST).exists():
        return None
    newest = output_dir / str(read_json(output_dir / LATEST).get("checkpoint"))
    step = _STEP.fullmatch(newest.name)
    older = [p for p in step_folders(output_dir) if step and int(_STEP.fullmatch(p.name)[1]) < int(step[1])]
    run_id = _read_state(newest).get("run_id")
    for folder in [newest, *older]:
        state = _read_state(folder)
        problem = missing_part(folder)
        if problem is None and run_id is not None and state["run_id"] != run_id:
            problem = "it belongs to an earlier run"
        if problem is None:
            return folder, state
        say(f"WARNING: checkpoint {folder} is not usable ({problem}); looking for the one before it")
    raise UserError(str(output_dir), got="checkpoints, but none is complete", want="one to resume from",
                    fix="train.resume=never starts anew and replaces them")  # fmt: skip


def check_resumable(state: dict, facts: dict, folder: Path) -> None:
    """Refuse to continue a checkpoint with something else than it was made with, before anything is loaded.

    facts: what this run would write, which must agree one by one.
    """
    wrong = [key for key in facts if state["facts"].get(key) != facts[key]]
    if wrong:
        raise UserError(f"train.resume: {folder}", got=_listing(facts, wrong),
                        want=f"{_listing(state['facts'], wrong)}, as it was saved",
                        fix="those values, or train.resume=never, or another train.output_dir")  # fmt: skip


def layout_change(state: dict, world_size: int, zero_stage: int) -> str | None:
    """What of ranks and stage differs from when the checkpoint was saved, in one line."""
    if (state["world_size"], state["zero_stage"]) == (world_size, zero_stage):
        return None
    return (f"saved by {state['world_size']} rank(s) at ZeRO-{state['zero_stage']}, continued by {world_size} at "
            f"ZeRO-{zero_stage}: the same training up to rounding, no longer to the bit")  # fmt: skip


def _listing(facts: dict, keys: list[str]) -> str:
    return ", ".join(f"{key}={facts.get(key)}" for key in keys)
