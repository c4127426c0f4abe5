"""Does the objective matter? Drafters of SmolLM2-135M that differ in nothing else, by what they accept.

    python benchmarks/objectives.py --work runs/objectives                one H200: prepare, train, measure, table
    python benchmarks/objectives.py --work runs/objectives --size cpu     two cores: a drafter of one layer, few steps
    ... --parts train,measure,table --minutes 9                           some parts; nothing is begun after so long

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
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from objectives_measure import choices, chosen_specs, compare, decode, markdown
from objectives_plan import ARMS, BASE, SIZES, Plan, Spec
from objectives_train import copy_in_eight_bits, finished, heldout_refs, open_data, train_one, walk_one

from dflash_train import cli
from dflash_train.util.errors import UserError
from dflash_train.util.io import write_bytes, write_json
from dflash_train.util.log import say
from dflash_train.util.provenance import code_version

PARTS = ("prepare", "train", "measure", "table")


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


def train(plan: Plan, until: float) -> list[str]:
    """Every run that is not done -> what failed. Raises UserError, before any, for too few held-out samples."""
    heldout_refs(plan, open_data(plan, Spec(BASE, plan.lrs[0], 0)), choose=True)
    open_runs = [spec for spec in plan.specs() if finished(plan, spec) is None]
    say(f"train: {len(open_runs)} of {len(plan.specs())} runs of {plan.steps} steps, {plan.processes} side by side")
    return side_by_side(plan, train_one, [(spec.name, spec) for spec in open_runs], until)


def measure(plan: Plan, until: float) -> list[str]:
    """The chosen runs' walk and decoding -> what failed."""
    chosen, _, _ = choices(plan)
    specs = chosen_specs(plan, chosen)
    failed = side_by_side(plan, walk_one, [(f"walk {spec.name}", spec) for spec in specs], until)
    groups = [specs[i :: plan.processes] for i in range(plan.processes)]
    jobs = [(f"decode {', '.join(spec.name for spec in group)}", group) for group in groups if group]
    return failed + side_by_side(plan, decode, jobs, until)


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


def side_by_side(plan: Plan, work: Callable, jobs: Iterable[tuple[str, object]], until: float) -> list[str]:
    """work(plan, argument) of every job, in plan.processes processes (1: in this one) -> names of those that failed.

    A process does several jobs, one after the other, so it compiles once."""
    jobs = list(jobs)
    if plan.processes == 1:
        return [name for name, argument in jobs if not attempt(work, plan, name, argument, until)]
    with ProcessPoolExecutor(plan.processes, multiprocessing.get_context("spawn")) as pool:
        done = [pool.submit(attempt, work, plan, name, argument, until) for name, argument in jobs]
        return [name for (name, _), future in zip(jobs, done, strict=True) if not future.result()]


def attempt(work: Callable, plan: Plan, name: str, argument: object, until: float) -> bool:
    """False, and said, when it failed or was not begun: the others go on."""
    if time.time() > until:
        say(f"{name}: not begun, the time is over")
        return False
    start = time.time()
    try:
        work(plan, argument)
    except Exception:
        traceback.print_exc(limit=-6, file=sys.stdout)
        say(f"{name}: failed")
        return False
    say(f"{name}: done in {time.time() - start:.0f} s")
    return True


# ---------------------------------------------------------------- the command


def read_plan(argv: list[str]) -> tuple[Plan, list[str], float]:
    """(plan, parts, minutes). Raises UserError naming an argument that cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of answers, states, runs and results")
    parser.add_argument("--size", choices=list(SIZES), default="gpu")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--arms", help=f"of {','.join(ARMS)}; the first five unless given")
    parser.add_argument("--data", nargs="*", default=[], help="words for another mix: data=mine data.sources...")
    parser.add_argument("--minutes", type=float, default=1e6, help="nothing is begun after so long")
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
    return replace(plan, arms=arms, **changed), parts, given.minutes


def main(argv: list[str]) -> int:
    plan, parts, minutes = read_plan(argv)
    until, failed = time.time() + 60 * minutes, []
    if "prepare" in parts:
        prepare(plan)
    if "train" in parts:
        failed += train(plan, until)
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
