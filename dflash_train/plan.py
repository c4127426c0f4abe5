"""What a stage needs, checked before it costs anything; and, as a command, what a whole run will take."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from dflash_train.config import Run
from dflash_train.util.device import cuda_problem
from dflash_train.util.io import free_bytes, human_bytes
from dflash_train.util.log import say, table


@dataclass(frozen=True)
class Check:
    """One need: fix says what to type when it is not met."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def preflight(run: Run, checks: list[Check], todo: list[str]) -> None:
    """Print what the stage will do and whether it can; exit 2 when something is missing, 0 after a dry run."""
    for line in todo:
        say(line)
    rows = [[check.name, "ok" if check.ok else "MISSING", check.detail, "" if check.ok else check.fix] for check in checks]
    table(f"{run.stage}: what it needs", ["need", "", "found", "fix"], rows)
    if not all(check.ok for check in checks):
        say(f"{run.stage} was not started: {sum(not check.ok for check in checks)} need(s) above are missing.")
        sys.exit(2)
    if run.dry_run:
        say("dry_run: everything is there; nothing was done.")
        sys.exit(0)


def check_file(name: str, path: str | Path, fix: str) -> Check:
    """An input that an earlier stage writes."""
    exists = Path(path).exists()
    return Check(name, exists, str(path) if exists else f"{path} does not exist", fix)


def check_disk(path: str | Path, need_bytes: int, fix: str = "free some space, or choose another folder") -> Check:
    free = free_bytes(path)
    return Check("disk", free >= need_bytes, f"{human_bytes(free)} free at {path}, {human_bytes(need_bytes)} needed", fix)


def check_memory(need_bytes: int) -> Check:
    available = psutil.virtual_memory().available
    return Check("memory", available >= need_bytes,
                 f"{human_bytes(available)} available, about {human_bytes(need_bytes)} needed",
                 "close other programs, or use a smaller model or batch")  # fmt: skip


def check_device(run: Run) -> Check:
    """The wished device works. A CPU is fine unless hardware.device=cuda."""
    problem = cuda_problem() if run.hardware.device != "cpu" else None
    if run.hardware.device == "cpu" or (problem and run.hardware.device == "auto"):
        return Check("device", True, f"CPU, {os.cpu_count()} cores" + (f" ({problem})" if problem else ""))
    return Check("device", problem is None, problem or "GPU", "hardware=cpu")
