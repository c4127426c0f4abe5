"""Pool reports of one drafter that were measured in several processes (a task or a method each) into one table.

    python benchmarks/pool_reports.py runs/smollm2_gpu/eval/b16-*/*.json

The answers' rounds are in every report, so nothing here averages averages: the figures are computed again over all
answers. Speeds are left out, since the processes shared a machine.
"""

import json
import sys

from dflash_train.bench import report
from dflash_train.bench.metrics import MethodResult, PromptResult
from dflash_train.records import Generation
from dflash_train.util.errors import UserError


def read_results(paths: list[str]) -> list[MethodResult]:
    """One MethodResult per method, over all files."""
    methods: dict[str, MethodResult] = {}
    for path in sorted(paths):
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        kinds = {m["name"]: (m["method"], m["settings"]) for m in data["methods"]}
        for row in data["answers"]:
            name = row["method"]
            method = methods.setdefault(name, MethodResult(name, *kinds[name]))
            result = PromptResult(row["task"], row["id"], row["turn"], counted_rounds(row))
            if any((r.task, r.id, r.turn) == (result.task, result.id, result.turn) for r in method.results):
                raise SystemExit(f"{path}: {name} answers {row['task']} {row['id']} twice; pool one drafter's reports")
            method.results.append(result)
    return list(methods.values())


def counted_rounds(row: dict) -> Generation:
    """What a report keeps of a generation: its rounds."""
    return Generation(prompt_ids=[], token_ids=[], round_lengths=row["round_lengths"],
                      draft_lengths=row["draft_lengths"], stopped_by=row["stopped_by"], prefill_s=0.0, decode_s=0.0,
                      propose_s=0.0, verify_s=0.0, commit_s=0.0, margins=[])  # fmt: skip


def comparisons(methods: list[MethodResult]) -> list[str]:
    """Every later drafting method against the first one, paired over prompts; a pair that was not measured on the same
    prompts is named instead."""
    drafted, lines = [m for m in methods if m.method != "autoregressive"], []
    for method in drafted[1:]:
        try:
            pair = report.comparison(method, drafted[0], seed=0)
        except UserError as error:
            lines.append(f"{error.field}: not compared: {error.got}")
            continue
        if pair is None:
            continue  # no prompt has a round in both
        value, low, high = (pair["ratio"][key] for key in ("value", "low", "high"))
        lines.append(f"{pair['method']} accepts {value:.3f} [{low:.3f}, {high:.3f}] times what {pair['against']} does "
                     f"(paired over prompts); lower on {pair['num_lower']} prompt(s)")  # fmt: skip
        lines += [f"    {row['task']} {row['id']}: {row[pair['method']]:.2f} < {row[pair['against']]:.2f}"
                  for row in pair["lower_prompts"]]  # fmt: skip
    return lines


def main(paths: list[str]) -> None:
    methods = read_results(paths)
    order = {"autoregressive": 0, "dflash": 1, "ddtree": 2}
    methods.sort(key=lambda m: (order[m.method], m.settings.get("budget", 0), m.name))
    # Without a baseline: no speeds, and no comparison of answers, whose tokens the reports do not have.
    rows = [report.summarize(m, None, dtype="float32", max_margin=0.0, seed=0) for m in methods]
    print("| method | task | pooled [95 %] | macro | rounds |\n|---|---|---|---|---|")
    for cell in report.cells({"methods": rows}):
        print("| " + " | ".join(cell[:5]) + " |")
    print("\n".join(["", *comparisons(methods)]))


if __name__ == "__main__":
    main(sys.argv[1:])
