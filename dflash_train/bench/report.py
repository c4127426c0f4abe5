"""A report of measured methods: one JSON file that holds everything, and its table, Markdown and figure."""

import re
from pathlib import Path

from dflash_train.bench import metrics
from dflash_train.bench.metrics import MethodResult, PromptResult
from dflash_train.util.io import atomic_path, write_bytes, write_json
from dflash_train.util.log import say, table

SCHEMA = 1
OVERALL = "all"
COLUMNS = ["method", "task", "acceptance length [95 %]", "macro", "rounds", "tokens/s", "speedup"]


# ---------------------------------------------------------------- from results to numbers


def task_row(results: list[PromptResult], baseline: list[PromptResult] | None, seed: int) -> dict:
    """The numbers of one method on one task (or on all): acceptance, rounds, speed; null where nothing was counted."""
    interval = metrics.pooled_interval(results, seed)
    speed = metrics.tokens_per_s(results)
    baseline_speed = metrics.tokens_per_s(baseline) if baseline else None
    generations = [result.generation for result in results]
    return {
        "prompts": len({(result.task, result.id) for result in results}),
        "answers": len(results),
        "stopped": sum(g.stopped_by == "stop" for g in generations),
        "emitted_tokens": sum(len(g.token_ids) for g in generations),
        "rounds": sum(len(g.round_lengths) for g in generations),
        "tokens": sum(sum(g.round_lengths) for g in generations),
        "acceptance_length_pooled": interval and interval.value,
        "acceptance_length_interval": interval and [interval.low, interval.high],
        "acceptance_length_macro": metrics.macro_acceptance(results),
        "acceptance_by_position": metrics.acceptance_by_position(results),
        "tokens_per_s": speed,
        "speedup": speed / baseline_speed if speed and baseline_speed else None,
        "round_ms": metrics.round_ms(results),
    }


def summarize(result: MethodResult, baseline: MethodResult | None, *, dtype: str, max_margin: float, seed: int) -> dict:
    """One method's entry of the report. baseline: the autoregressive answers to the same prompts, or None."""
    tasks = {}
    for task in result.tasks:
        tasks[task] = task_row(result.of_task(task), baseline.of_task(task) if baseline else None, seed)
    overall = task_row(result.results, baseline.results if baseline else None, seed)
    greedy = result.settings.get("temperature", 0.0) == 0
    compared = metrics.agreement(result, baseline) if baseline and baseline is not result and greedy else None
    verdict, sentence = metrics.losslessness(compared, dtype=dtype, max_margin=max_margin)
    if not greedy:
        sentence = "sampled answers follow the target's law; they are not compared token for token"
    return {
        "name": result.name,
        "method": result.method,
        "settings": result.settings,
        "tasks": tasks,
        OVERALL: overall,
        "lossless": verdict,
        "lossless_detail": sentence,
        "differences": [vars(difference) for difference in compared.differences] if compared else [],
        "slower_because": why_slower(result.name, overall, baseline and task_row(baseline.results, None, seed)),
    }


def why_slower(name: str, overall: dict, baseline: dict | None) -> str | None:
    """One sentence from the measured parts where a method is slower than autoregressive decoding, else None."""
    if not baseline or overall["speedup"] is None or overall["speedup"] >= 1 or baseline["round_ms"] is None:
        return None
    parts, one = overall["round_ms"], baseline["round_ms"]["total"]
    needed = parts["total"] / one
    extra = {"drafting": parts["propose"], "verifying more than one token": parts["verify"] - one,
             "committing": parts["commit"]}  # fmt: skip
    return (
        f"{name} is slower than autoregressive here ({overall['speedup']:.2f}x): a round takes {parts['total']:.1f} ms "
        f"(draft {parts['propose']:.1f}, verify {parts['verify']:.1f}, commit {parts['commit']:.1f}) and commits "
        f"{overall['acceptance_length_pooled']:.2f} tokens, while autoregressive takes {one:.1f} ms a token, so "
        f"{needed:.2f} tokens a round would break even; the largest extra cost is {max(extra, key=extra.get)}."
    )


def prompt_rows(result: MethodResult) -> list[dict]:
    """One row per answer, with its rounds, so that every figure of the report can be computed again."""
    return [
        {
            "method": result.name, "task": r.task, "id": r.id, "turn": r.turn, "stopped_by": r.generation.stopped_by,
            "prompt_tokens": len(r.generation.prompt_ids), "emitted_tokens": len(r.generation.token_ids),
            "round_lengths": r.generation.round_lengths, "draft_lengths": r.generation.draft_lengths,
            "prefill_s": round(r.generation.prefill_s, 6), "decode_s": round(r.generation.decode_s, 6),
        }
        for r in result.results
    ]  # fmt: skip


def build_report(results: list[MethodResult], *, provenance: dict, facts: dict, dtype: str, max_margin: float,
                 seed: int) -> dict:  # fmt: skip
    """The whole report as JSON-able data.

    provenance: util.provenance.provenance(...). facts: what a reader must know beside the numbers (target, drafter,
    device, sampling, skipped prompts ...). The autoregressive method, where present, is the baseline of speedups and
    agreement; the first drafting method is the one the others are compared with.
    """
    baseline = next((result for result in results if result.method == "autoregressive"), None)
    methods = [summarize(result, baseline, dtype=dtype, max_margin=max_margin, seed=seed) for result in results]
    drafted = [result for result in results if result.method != "autoregressive"]
    return {
        "schema": SCHEMA,
        "facts": facts,
        "methods": methods,
        "comparisons": list(filter(None, (comparison(other, drafted[0], seed) for other in drafted[1:]))),
        "answers": [row for result in results for row in prompt_rows(result)],
        "provenance": provenance,
    }


def comparison(a: MethodResult, b: MethodResult, seed: int) -> dict | None:
    """Pooled acceptance of a against b on the same prompts, with paired intervals, and the prompts where a is lower
    (not listed for an ablation, which is meant to be lower)."""
    paired = metrics.paired_difference(a, b, seed)
    if paired is None:
        return None
    lower = metrics.lower_prompts(a, b)
    ablated = a.settings.get("ablate", "none") != "none"
    return {"method": a.name, "against": b.name, **{key: vars(value) for key, value in paired.items()},
            "num_lower": len(lower), "lower_prompts": [] if ablated else lower}  # fmt: skip


def failed(report: dict) -> list[str]:
    """Sentences of the methods that were not lossless."""
    return [f"{m['name']}: {m['lossless_detail']}" for m in report["methods"] if m["lossless"] == "FAILED"]


# ---------------------------------------------------------------- from numbers to paper


def cells(report: dict) -> list[list[str]]:
    """The table's rows: every method on every task, then on all of them where there is more than one."""
    rows = []
    show = lambda value, pattern: "-" if value is None else format(value, pattern)
    for method in report["methods"]:
        tasks = list(method["tasks"].items())
        for task, row in [*tasks, (OVERALL, method[OVERALL])] if len(tasks) > 1 else tasks:
            acceptance = show(row["acceptance_length_pooled"], ".3f")
            if row["acceptance_length_interval"] and method["method"] != "autoregressive":
                low, high = row["acceptance_length_interval"]
                acceptance += f" [{low:.3f}, {high:.3f}]"
            speedup = f"{row['speedup']:.2f}x" if row["speedup"] else "-"
            rows.append([method["name"], task, acceptance, show(row["acceptance_length_macro"], ".3f"),
                         f"{row['rounds']:,}", show(row["tokens_per_s"], ",.1f"), speedup])  # fmt: skip
    return rows


def notes(report: dict) -> list[str]:
    """What must be said under the table: losslessness, comparisons, why something is slow."""
    lines = []
    for method in report["methods"]:
        if method["method"] != "autoregressive":
            lines.append(f"{method['name']}: lossless: {method['lossless']}; {method['lossless_detail']}")
    for pair in report["comparisons"]:
        value, low, high = (pair["ratio"][key] for key in ("value", "low", "high"))
        lines.append(f"{pair['method']} accepts {value:.3f} [{low:.3f}, {high:.3f}] times what {pair['against']} does "
                     f"(pooled, paired over prompts); lower on {pair['num_lower']} prompt(s)")  # fmt: skip
    return lines + [method["slower_because"] for method in report["methods"] if method["slower_because"]]


def print_report(report: dict) -> None:
    """The console table and what must be said under it."""
    table("acceptance length (tokens per verify forward, bonus included; pooled over prompts)", COLUMNS, cells(report))
    for line in notes(report):
        say(line)


def markdown(report: dict) -> str:
    """Facts, table and notes as Markdown."""
    escape = lambda text: str(text).replace("|", "\\|")
    lines = [f"- {name}: {escape(value)}" for name, value in report["facts"].items()]
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(map(escape, row))} |" for row in cells(report)]
    lines += ["", *[f"- {line}" for line in notes(report)]]
    for pair in report["comparisons"]:
        if pair["lower_prompts"]:
            listed = ", ".join(
                f"{row['task']} {row['id']} ({row[pair['method']]:.2f} < {row[pair['against']]:.2f})"
                for row in pair["lower_prompts"]
            )
            lines.append(f"- prompts on which {pair['method']} accepts less than {pair['against']}: {listed}")
    return "\n".join(lines) + "\n"


def draw_figure(report: dict, path: str | Path) -> None:
    """PNG: acceptance by draft position over all tasks, and acceptance length per task with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drafted = [m for m in report["methods"] if m["method"] != "autoregressive"] or report["methods"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for method in drafted:
        shares = method[OVERALL]["acceptance_by_position"]
        left.plot(range(1, len(shares) + 1), shares, marker="o", markersize=3, label=method["name"])
    left.set(xlabel="draft position k", ylabel="share of rounds that accepted k drafts or more", ylim=(0, 1.02))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(fontsize=8)
    tasks = list(dict.fromkeys(task for method in drafted for task in method["tasks"]))
    width = 0.8 / len(drafted)
    for i, method in enumerate(drafted):
        for j, task in enumerate(tasks):
            row = method["tasks"].get(task)
            if row is None or row["acceptance_length_pooled"] is None:
                continue
            value, (low, high) = row["acceptance_length_pooled"], row["acceptance_length_interval"]
            right.bar(j + (i - (len(drafted) - 1) / 2) * width, value, width, color=f"C{i % 10}",
                      yerr=[[max(value - low, 0)], [max(high - value, 0)]], capsize=2)  # fmt: skip
    right.axhline(1, color="grey", linewidth=0.8)
    right.set_xticks(range(len(tasks)), tasks)
    right.set_ylabel("acceptance length (pooled, 95 % interval)")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)
    plt.close(figure)


def slug(text: str) -> str:
    """'ddtree-64, shuffled rows' -> 'ddtree-64-shuffled-rows': a method's or drafter's name as a file name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")


def checkpoint_label(checkpoint: Path) -> str:
    """What a drafter is called in file names: the last two folders that say something, e.g. 'demo-best'."""
    path = checkpoint.absolute() if checkpoint.is_dir() else checkpoint.absolute().with_suffix("")
    names = [part for part in path.parts[-3:] if part not in ("drafter", "checkpoints", "/")]
    return slug("-".join(names[-2:]))


def write_report(report: dict, folder: str | Path, name: str) -> list[Path]:
    """Write <name>.json, .md and .png into folder, each atomically; returns their paths, the JSON first."""
    paths = [Path(folder, f"{name}.{ending}") for ending in ("json", "md", "png")]
    write_json(paths[0], report)
    write_bytes(paths[1], markdown(report).encode("utf-8"))
    draw_figure(report, paths[2])
    return paths
