"""What a stage needs, checked before it costs anything."""

import os
import sys
from pathlib import Path

import psutil

from dflash_train.config import Run
from dflash_train.planning.machine import describe, gpus_at_hand, profile_problem
from dflash_train.util.checks import Check
from dflash_train.util.device import cuda_problem
from dflash_train.util.dist import local_rank, world_size
from dflash_train.util.errors import UserError
from dflash_train.util.io import free_bytes, human_bytes
from dflash_train.util.log import say, table


def preflight(run: Run, checks: list[Check], todo: list[str]) -> None:
    """Print what the stage will do and whether it can; exit 2 when something is missing, 0 after a dry run."""
    for line in todo:
        say(line)
    rows = [[c.name, "ok" if c.ok else "MISSING", c.detail, "" if c.ok else c.fix] for c in checks]
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
    detail = f"{human_bytes(free)} free at {path}, {human_bytes(need_bytes)} needed"
    return Check("disk", free >= need_bytes, detail, fix)


def check_memory(need_bytes: int) -> Check:
    available = psutil.virtual_memory().available
    return Check("memory", available >= need_bytes,
                 f"{human_bytes(available)} available, about {human_bytes(need_bytes)} needed",
                 "close other programs, or use a smaller model or batch")  # fmt: skip


def check_store(store) -> Check:
    """The store (store.base.ObjectStore) exists and takes our writes."""
    try:
        store.check()
    except UserError as error:
        return Check("store", False, f"{error.field}: {error.got}", error.fix or f"want: {error.want}")
    return Check("store", True, store.url)


def check_device(run: Run) -> Check:
    """The wished device works, and it is the machine that hardware=<profile> describes; a profile of another machine
    is refused, since everything `plan` said was about that one. A CPU is fine unless hardware.device=cuda."""
    problem = cuda_problem() if run.hardware.device != "cpu" else None
    if run.hardware.device == "cpu" or (problem and run.hardware.device == "auto"):
        return Check("device", True, f"CPU, {os.cpu_count()} cores" + (f" ({problem})" if problem else ""))
    if problem:
        return Check("device", False, problem, "hardware=cpu")
    gpus = gpus_at_hand()
    other = profile_problem(run.hardware, gpus)
    return Check("device", other is None, other or describe(gpus), "hardware=auto, or the profile of this machine")


def check_gpu_memory(run: Run, need_bytes: int, fix: str, num_gpus: int | None = None) -> list[Check]:
    """One row where a GPU will be used, none elsewhere. num_gpus: those that hold a copy of the target together; null:
    a process alone has all visible ones, and a target too large for one is spread over them."""
    if run.hardware.device == "cpu" or cuda_problem():
        return []
    gpus = gpus_at_hand()
    mine = gpus[:num_gpus] if world_size() == 1 else gpus[local_rank() : local_rank() + 1]
    total = sum(gpu.memory_bytes for gpu in mine)
    return [Check("GPU memory", total >= need_bytes, f"{human_bytes(total)} on {describe(mine)}, about "
                  f"{human_bytes(need_bytes)} needed", fix)]  # fmt: skip
