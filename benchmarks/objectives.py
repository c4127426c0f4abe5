"""Does the objective matter? Drafters of SmolLM2-135M that differ in nothing else, by what they accept.

    python benchmarks/objectives.py --work runs/objectives                one H200: prepare, train, measure, table
    python benchmarks/objectives.py --work runs/objectives --size cpu     two cores: a drafter of one layer, few steps
    ... --parts train,measure,table --minutes 9       some parts; nothing is begun that would not end within so long
    ... --parts train --train-minutes 4               as many steps as fit, by the pace of a few steps of each process

Arms (`objectives_plan.py`): this project's default, specforge's and speculators' objectives by their own code
(`make peers`), D-PACE, and eight-bit states; each with the same samples in the same order, the same initial weights and
the same number of steps, two learning rates and two seeds.

    prepare   the target answers the demo's prompts; states to <work>/store, with the last one; a copy in eight bits
    train     every run in a folder of its own, several side by side; a finished one is not trained again
    measure   the better learning rate by a walk on some held-out samples; then the walk on other ones, and the rounds
              of decoding on 32 prompts a task, replayed on the target's own answers
    table     <work>/objectives.json and objectives.md: pooled acceptance length, paired bootstrap over prompts
"""

import argparse
import math
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from objectives_measure import choices, chosen_specs, compare, decode, markdown
from objectives_plan import ARMS, BASE, SIZES, Plan, Spec
from objectives_train import copy_in_eight_bits, finished, heldout_refs, open_data, train_one, walk_one

from dflash_train import cli
from dflash_train.util.errors import UserError
from dflash_train.util.io import read_json, write_bytes, write_json
from dflash_train.util.log import say
from dflash_train.util.provenance import code_version

PARTS = ("prepare", "train", "measure", "table")
FITTED = "steps.json"
PACE_STEPS = 60
FILLED = 0.8
"""Of the time, by steps: the rest is for saving, for the walk that chooses, and for a pace that was too good."""


def prepare(plan: Plan) -> None:
    """By the command a user types: it mixes, answers and extracts what is missing."""
    words = [*plan.words, *plan.extract, f"store.root={plan.store_root()}"]
    command = [sys.executable, "-m", "dflash_train.extract", *words]
    path = os.pathsep.join(filter(None, [str(cli.ROOT), os.environ.get("PYTHONPATH")]))
    code = subprocess.run(command, cwd=cli.ROOT, env={**os.environ, "PYTHONPATH": path}).returncode
    if code:
        raise UserError("extract", got=f"exit code {code}; its message is above", want="a store")
    if any(ARMS[arm].fp8 for arm in plan.arms):
        copy_in_eight_bits(plan)


def train(plan: Plan, until: float, minutes: float | None) -> list[str]:
    """Every run that is not done -> what failed. minutes: that all may take; null: plan.steps whatever they take.
    Raises UserError, before any, for too few held-out samples."""
    heldout_refs(plan, open_data(plan, Spec(BASE, plan.lrs[0], 0)), choose=True)
    with workers(plan) as do:
        if minutes is not None:
            plan = fitted(plan, do, 60 * minutes)
        open_runs = [spec for spec in plan.specs() if finished(plan, spec) is None]
        say(f"train: {len(open_runs)} of {len(plan.specs())} runs of {plan.steps} steps, {plan.processes} side by side")
        return do(train_one, plan, [(spec.name, spec) for spec in open_runs], until)


def fitted(plan: Plan, do: Callable, seconds: float) -> Plan:
    """The plan with the number of steps that fits, kept in its folder: what goes on later has as many."""
    short, specs, start = plan.short(PACE_STEPS), plan.specs(), time.time()
    side, waves = min(plan.processes, len(specs)), math.ceil(len(specs) / plan.processes)
    spread = [specs[i * len(specs) // side] for i in range(side)]  # of every arm
    do(train_one, short, [(f"pace of {spec.name}", spec) for spec in spread], math.inf)
    paces = {spec.name: record["step_s"] for spec in spread if (record := finished(short, spec))}
    if not paces:
        raise UserError("pace", got="no run that came to its end", want="one", fix="what failed is above")
    left = seconds - (time.time() - start)
    fit = int(FILLED * left / waves / max(paces.values())) // 10 * 10
    steps = min(max(PACE_STEPS, fit), plan.steps)
    write_json(plan.work / FITTED, {"steps": steps, "seconds_a_step": paces, "seconds": seconds, "left": left})
    say(f"train: {fit} steps fit into {left:.0f} s by the pace of {side} processes; {steps} are made")
    return replace(plan, steps=steps)


def measure(plan: Plan, until: float) -> list[str]:
    """The chosen runs' walk and decoding -> what failed."""
    chosen, _, _ = choices(plan)
    specs = chosen_specs(plan, chosen)
    groups = [specs[i :: plan.processes] for i in range(plan.processes)]
    jobs = [(f"decode {', '.join(spec.name for spec in group)}", group) for group in groups if group]
    with workers(plan) as do:
        failed = do(walk_one, plan, [(f"walk {spec.name}", spec) for spec in specs], until)
        return failed + do(decode, plan, jobs, until)


def table(plan: Plan) -> None:
    """objectives.json and objectives.md, of the arms whose runs are all there."""
    chosen, seen, missing = choices(plan)
    entries = compare(plan, chosen)
    records = {spec.name: finished(plan, spec) for spec in plan.specs()}
    runs = {name: {key: value for key, value in record.items() if key not in ("choose", "facts")}
            for name, record in records.items() if record}  # fmt: skip
    write_json(plan.work / "objectives.json", {
        "plan": {**vars(plan), "work": str(plan.work)}, "chosen": chosen, "choosing": seen, "missing": missing,
        "comparison": entries, "runs": runs, "code_version": code_version(),
    })  # fmt: skip
    hardware = sorted({f"{run['device']}, torch {run['torch']}, {run['dtype']}" for run in runs.values()})
    facts = [
        f"hardware: {'; '.join(hardware)}; {plan.processes} runs side by side; commit {code_version()}",
        f"runs: {plan.steps} steps, learning rates {plan.lrs}, seeds {plan.seeds}; {' '.join(plan.train)}",
        f"learning rate chosen on {plan.choose} held-out samples: {seen}",
        f"not there: {', '.join(missing) or 'nothing'}",
    ]
    text = "\n".join(f"- {fact}" for fact in facts) + "\n\n" + markdown(entries) + "\n"
    write_bytes(plan.work / "objectives.md", text.encode())
    print(text, flush=True)


# ---------------------------------------------------------------- processes


@contextmanager
def workers(plan: Plan) -> Iterator[Callable]:
    """do(work, plan, [(name, argument)], until) -> names of the jobs that failed; plan.processes of them at a time, in
    processes (1: in this one) that stay, so that each compiles once."""
    if plan.processes == 1:
        yield lambda work, plan, jobs, until: [name for name, job in jobs if not attempt(work, plan, name, job, until)]
        return

    def do(work: Callable, plan: Plan, jobs: list[tuple[str, object]], until: float) -> list[str]:
        done = [pool.submit(attempt, work, plan, name, job, until) for name, job in jobs]
        return [name for (name, _), future in zip(jobs, done, strict=True) if not future.result()]

    with ProcessPoolExecutor(plan.processes, multiprocessing.get_context("spawn")) as pool:
        yield do


LONGEST: dict[Callable, float] = {}
"""Seconds that the longest of a kind of job took in this process."""


def attempt(work: Callable, plan: Plan, name: str, argument: object, until: float) -> bool:
    """False, and said, when it failed, or was not begun since the like of it takes too long; the others go on."""
    start, length = time.time(), LONGEST.get(work, 0.0) if plan.under == "runs" else 0.0
    if start + length > until:
        say(f"{name}: not begun, {max(0, until - start):.0f} s are left of the time and it takes {length:.0f}")
        return False
    try:
        work(plan, argument)
    except Exception:
        traceback.print_exc(limit=-6, file=sys.stdout)
        say(f"{name}: failed")
        return False
    took = time.time() - start
    if plan.under == "runs":
        LONGEST[work] = max(length, took)
    say(f"{name}: done in {took:.0f} s")
    return True


# ---------------------------------------------------------------- the command


def read_plan(argv: list[str]) -> tuple[Plan, list[str], argparse.Namespace]:
    """(plan, parts, what else was given). Raises UserError naming an argument that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of answers, states, runs and results")
    parser.add_argument("--size", choices=list(SIZES), default="gpu")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--arms", help=f"of {','.join(ARMS)}; the first five unless given")
    parser.add_argument("--data", nargs="*", default=[], help="words for another mix: data=mine data.sources...")
    parser.add_argument("--minutes", type=float, default=math.inf, help="nothing is begun that takes longer")
    parser.add_argument("--train-minutes", type=float, help="that all runs may take together; --steps at most")
    for name in ("steps", "processes", "choose", "walk", "prompts"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--lrs", type=lambda text: [float(part) for part in text.split(",")])
    given = parser.parse_args(argv)
    parts, plan = given.parts.split(","), SIZES[given.size](given.work.absolute(), given.data)
    arms = given.arms.split(",") if given.arms else plan.arms
    for field, got, known in (("--parts", parts, PARTS), ("--arms", arms, tuple(ARMS))):
        unknown = [name for name in got if name not in known]
        if unknown:
            raise UserError(field, got=", ".join(unknown), want=" | ".join(known))
    if BASE not in arms:
        raise UserError("--arms", got=", ".join(arms), want=f"{BASE} among them: the others are compared with it")
    changed = {name: value for name in ("steps", "processes", "choose", "walk", "prompts", "lrs")
               if (value := getattr(given, name)) is not None}  # fmt: skip
    return replace(plan, arms=arms, **changed), parts, given


def main(argv: list[str]) -> int:
    plan, parts, given = read_plan(argv)
    until, failed = time.time() + 60 * given.minutes, []
    if given.steps is None and (plan.work / FITTED).exists():
        plan, given.train_minutes = replace(plan, steps=read_json(plan.work / FITTED)["steps"]), None
    if "prepare" in parts:
        prepare(plan)
    if "train" in parts:
        failed += train(plan, until, given.train_minutes)
    if "measure" in parts:
        failed += measure(plan, until)
    if "table" in parts:
        table(plan)
    if failed:
        say(f"failed or not begun: {'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"\n{error}")
