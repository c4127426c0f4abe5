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


def main(paths: list[str]) -> None:
    methods = read_results(paths)
    order = {"autoregressive": 0, "dflash": 1, "ddtree": 2}
    methods.sort(key=lambda m: (order[m.method], m.settings.get("budget", 0), m.name))
    pooled = report.build_report(methods, provenance={}, facts={}, dtype="float32", max_margin=0.0, seed=0)
    print("| method | task | pooled [95 %] | macro | rounds |\n|---|---|---|---|---|")
    for cell in report.cells(pooled):
        print("| " + " | ".join(cell[:5]) + " |")
    for pair in pooled["comparisons"]:
        ratio = pair["ratio"]
        print(f"{pair['method']} accepts {ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] times what "
              f"{pair['against']} does (paired over prompts); lower on {pair['num_lower']} prompt(s)")  # fmt: skip
        for row in pair["lower_prompts"]:
            print(f"    {row['task']} {row['id']}: {row[pair['method']]:.2f} < {row[pair['against']]:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
