"""What the trained drafters of `objectives.py` accept: replayed decoding of the tasks, and the comparison of the arms.

The learning rate of an arm is the one whose two seeds together accept more on the choosing samples; the arms are then
compared on other samples and on the tasks' prompts. Intervals resample prompts, each with both seeds' rounds, so they
say how far the figure depends on the prompts; how far it depends on the seed, the two seeds' own figures show.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import torch
from objectives_plan import BASE, Plan, Spec
from objectives_train import finished

from dflash_train import eval as evaluation
from dflash_train.bench.methods import method_of
from dflash_train.bench.metrics import MethodResult, PromptResult, paired_difference, pooled_acceptance, pooled_interval
from dflash_train.drafter.files import load_drafter
from dflash_train.records import Generation
from dflash_train.util.io import read_json, write_json

WALK = "held-out walk"
COLUMNS = ["measured on", "objective", "learning rate", "acceptance length [95 %]", "by seed",
           f"{BASE} minus it [95 %]", "rounds"]  # fmt: skip


def pooled(rounds: Iterable[list[int]]) -> float:
    """Tokens a round."""
    lengths = [length for sample in rounds for length in sample]
    return sum(lengths) / max(len(lengths), 1)


# ---------------------------------------------------------------- which learning rate


def choices(plan: Plan) -> tuple[dict[str, float], dict[str, dict[str, float]], list[str]]:
    """(arm -> its learning rate, arm -> acceptance by learning rate, runs that are not there). Arms with a run missing
    are in the last alone."""
    chosen, seen, missing = {}, {}, []
    for arm in plan.arms:
        records = {spec: finished(plan, spec) for spec in plan.specs() if spec.arm == arm}
        missing += [spec.name for spec, record in records.items() if record is None]
        if None in records.values():
            continue
        by_lr = {lr: pooled(rounds for spec, record in records.items() if spec.lr == lr
                            for rounds in record["choose"].values()) for lr in plan.lrs}  # fmt: skip
        chosen[arm] = max(by_lr, key=by_lr.get)
        seen[arm] = {f"{lr:g}": value for lr, value in by_lr.items()}
    return chosen, seen, missing


def chosen_specs(plan: Plan, chosen: dict[str, float]) -> list[Spec]:
    return [Spec(arm, lr, seed) for arm, lr in chosen.items() for seed in plan.seeds]


# ---------------------------------------------------------------- decoding, replayed


def decode(plan: Plan, specs: list[Spec]) -> None:
    """decode.json of each: its rounds on the tasks' prompts, on answers that the target writes once for all of them."""
    paths = {spec: plan.folder(spec) / "decode.json" for spec in specs}
    asked = {"tasks": plan.tasks, "prompts": plan.prompts, "new_tokens": plan.new_tokens}
    specs = [spec for spec in specs if not paths[spec].exists() or read_json(paths[spec])["asked"] != asked]
    if not specs:
        return
    if plan.threads:
        torch.set_num_threads(plan.threads)
    folders = {spec: plan.folder(spec) / "drafter" for spec in specs}
    tasks = ",".join(f"'{task}'" for task in plan.tasks)
    run = plan.build("eval", [
        "eval=dflash", "eval.replay=true", "eval.dtype=float32", "eval.replay_batch_size=128",
        f"eval.tasks=[{tasks}]", f"eval.num_prompts={plan.prompts}", f"eval.max_new_tokens={plan.new_tokens}",
        f"eval.checkpoint={folders[specs[0]]}", *(word for word in plan.train if word.startswith("drafter=")),
    ])  # fmt: skip
    parts, method = evaluation.load_parts(run), method_of(run.eval)
    proposers, results = {}, {}
    for spec in specs:
        drafter, _ = load_drafter(folders[spec], dtype=torch.float32)
        own = replace(parts, drafter=drafter.to(parts.target.device).eval())
        proposers[spec.name] = evaluation.make_proposer(own, method)
        results[spec.name] = MethodResult(spec.name, method.kind)
    evaluation.replay_turns(parts, proposers, results)
    for spec in specs:
        rows = [[r.task, r.id, r.turn, r.generation.round_lengths] for r in results[spec.name].results]
        write_json(paths[spec], {"asked": asked, "rounds": rows})


# ---------------------------------------------------------------- the comparison


def answers_of(plan: Plan, spec: Spec) -> list[PromptResult]:
    """The walk's samples and the decoded prompts of one run, as far as they are there."""
    folder, rows = plan.folder(spec), []
    if (folder / "walk.json").exists():
        rows += [(WALK, name, 0, rounds) for name, rounds in read_json(folder / "walk.json").items()]
    if (folder / "decode.json").exists():
        rows += read_json(folder / "decode.json")["rounds"]
    return [PromptResult(task, name, turn, rounds_alone(rounds)) for task, name, turn, rounds in rows]


def rounds_alone(rounds: list[int]) -> Generation:
    """An answer of which the rounds alone are known."""
    return Generation([], [], rounds, [], "", 0.0, 0.0, 0.0, 0.0, 0.0, [])


def compare(plan: Plan, chosen: dict[str, float]) -> list[dict]:
    """One entry for each measure and each arm whose every seed has it: interval, each seed's figure, and the default's
    lead over it."""
    by_seed = {arm: [answers_of(plan, Spec(arm, lr, seed)) for seed in plan.seeds] for arm, lr in chosen.items()}
    tasks = list(dict.fromkeys(a.task for seeds in by_seed.values() for answers in seeds for a in answers))
    decoded = [task for task in tasks if task != WALK]
    groups = {task: [task] for task in tasks} | ({"all tasks": decoded} if len(decoded) > 1 else {})
    entries = []
    for measure, names in groups.items():
        of_names = {arm: [[a for a in answers if a.task in names] for answers in seeds]
                    for arm, seeds in by_seed.items()}  # fmt: skip
        part = {arm: MethodResult(arm, "dflash", results=[*chain(*seeds)]) for arm, seeds in of_names.items()
                if all(seeds)}  # fmt: skip
        for arm, result in part.items():
            answers = result.results
            entry = {"measure": measure, "arm": arm, "lr": chosen[arm],
                     "prompts": len({(a.task, a.id) for a in answers}),
                     "acceptance": interval(pooled_interval(answers)),
                     "by_seed": [pooled_acceptance(alone) for alone in of_names[arm]],
                     "rounds": sum(len(a.generation.round_lengths) for a in answers)}  # fmt: skip
            if arm != BASE and BASE in part:
                pair = paired_difference(part[BASE], part[arm])
                entry |= {name: interval(value) for name, value in (pair or {}).items()}
            entries.append(entry)
    return entries


def interval(value) -> list[float] | None:
    return None if value is None else [value.value, value.low, value.high]


def markdown(entries: list[dict]) -> str:
    """The table under COLUMNS."""
    show = lambda v, sign="": "-" if v is None else f"{v[0]:{sign}.3f} [{v[1]:{sign}.3f}, {v[2]:{sign}.3f}]"
    rows = [
        [f"{e['measure']} ({e['prompts']} prompts)", e["arm"], f"{e['lr']:g}", show(e["acceptance"]),
         ", ".join("-" if v is None else f"{v:.3f}" for v in e["by_seed"]), show(e.get("difference"), "+"),
         f"{e['rounds']:,}"]
        for e in entries
    ]  # fmt: skip
    lines = [f"| {' | '.join(row)} |" for row in (COLUMNS, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(COLUMNS), *lines[1:]])
