"""What a stage needs, checked before it costs anything; and, as a command, what a whole run will take."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from dflash_train import cli
from dflash_train.config import PlanRun, Run
from dflash_train.store import STORES, budget
from dflash_train.util.checks import Check
from dflash_train.util.device import cuda_problem, pick_device
from dflash_train.util.errors import UserError
from dflash_train.util.io import free_bytes, human_bytes, read_json
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
    """The wished device works. A CPU is fine unless hardware.device=cuda."""
    problem = cuda_problem() if run.hardware.device != "cpu" else None
    if run.hardware.device == "cpu" or (problem and run.hardware.device == "auto"):
        return Check("device", True, f"CPU, {os.cpu_count()} cores" + (f" ({problem})" if problem else ""))
    return Check("device", problem is None, problem or "GPU", "hardware=cpu")


def check_gpu_memory(run: Run, need_bytes: int, fix: str) -> list[Check]:
    """One row where a GPU will be used, none elsewhere."""
    if run.hardware.device == "cpu" or cuda_problem():
        return []
    total = torch.cuda.mem_get_info(pick_device(run.hardware.device))[1]
    return [Check("GPU memory", total >= need_bytes,
                  f"{human_bytes(total)} on the card, about {human_bytes(need_bytes)} needed", fix)]  # fmt: skip


# ---------------------------------------------------------------- the command


def planned_samples(run: PlanRun) -> tuple[int | None, str]:
    """(number of samples, where that number comes from)."""
    if run.samples is not None:
        return run.samples, "samples=..."
    manifest = run.mix_dir / "manifest.json"
    if manifest.exists():
        return read_json(manifest)["rows"]["train"], str(manifest)
    if run.data.total is not None:
        return min(run.data.total, run.limit or run.data.total), "data.total"
    takes = [source.take for source in run.data.sources.values()]
    if takes and None not in takes:
        return min(sum(takes), run.limit or sum(takes)), "the sources' takes"
    return None, "unknown until the mix is made"


def drafter_parameters(run: PlanRun) -> int | None:
    """Parameters of the drafter, or None where its sizes follow a target that is not known yet."""
    needed = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "target_hidden_size")
    sizes = replace(run.drafter, target_hidden_size=run.drafter.target_hidden_size or run.target.hidden_size)
    if any(getattr(sizes, name) is None for name in needed):
        return None
    if sizes.target_layer_ids is None:
        sizes = replace(sizes, target_layer_ids=run.extract.layer_ids or list(range(run.extract.num_taps)))
    from dflash_train.drafter.dflash import DFlashDrafter  # here: every stage imports this file, few need the model

    with torch.device("meta"):
        return sum(p.numel() for p in DFlashDrafter(sizes).parameters())


def plan_rows(run: PlanRun) -> list[list[str]]:
    """The table: [what, how much, how it follows]."""
    target, parameters = run.target, drafter_parameters(run)
    rows = []
    if target.num_parameters:
        size = target.num_parameters * {"bfloat16": 2, "float32": 4}[target.dtype]
        rows.append(["target", f"{target.num_parameters:,} parameters", f"{human_bytes(size)} as {target.dtype}"])
    if parameters:
        rows.append(["drafter", f"{parameters:,} parameters", f"{human_bytes(parameters * 2)} as bfloat16"])
    else:
        rows.append(["drafter", "follows the target", "its sizes are null: known once a store exists"])
    if not target.hidden_size:
        return [*rows, ["storage", "unknown", "target.hidden_size is null: known once the target is there"]]
    return rows + storage_rows(run)


def storage_rows(run: PlanRun) -> list[list[str]]:
    """Bytes a token, a sample and in all, and whether the local disk holds them."""
    target, store = run.target, run.store
    layers = len(run.extract.layer_ids or range(run.extract.num_taps))
    per_token = budget.row_bytes(target.hidden_size, layers, store)
    last = " + last hidden" if store.last_hidden else ""
    how = f"{layers} layers x {target.hidden_size} x {store.dtype}{last}"
    rows = [["hidden rows", f"{per_token:,} B a token", how]]
    samples, why = planned_samples(run)
    if samples is None:
        return [*rows, ["storage", "unknown", why]]
    tokens = samples * run.tokens_per_sample
    total = int(per_token * tokens)
    shards = max(1, round(total / store.shard_bytes))
    rows.append(["tokens", f"{tokens:,.0f}", f"{samples:,} samples ({why}) x {run.tokens_per_sample:g}"])
    rows.append(["storage", human_bytes(total), f"{human_bytes(per_token * run.tokens_per_sample)} a sample, "
                 f"{shards:,} shards of {human_bytes(store.shard_bytes)}"])  # fmt: skip
    opened = cli.plugin(STORES, store.kind, "store.kind").open_store(store, run.store_name)
    limit = budget.max_bytes(store, opened, present_bytes=0)
    ways_out = budget.too_much(total, limit)
    verdict = f"does not fit: {ways_out}" if ways_out else "fits"
    rows.append(["room", f"{human_bytes(limit[0])} at {opened.url} ({limit[1]})", verdict])
    return rows


def main(run: PlanRun) -> None:
    """Print what the run will take."""
    table(f"plan: {run.data.name} on {run.target.name}", ["what", "how much", "how"], plan_rows(run))
    if run.dry_run:
        return
    say("next: " + cli.next_command("mix", run))


if __name__ == "__main__":
    cli.main("plan", main)
