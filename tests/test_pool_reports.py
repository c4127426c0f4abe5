"""`benchmarks/pool_reports.py`: reports of several processes become the table of one run over all prompts."""

import json
import sys

import pytest
from helpers_decode import generation

from dflash_train import cli
from dflash_train.bench import report as reports
from dflash_train.bench.metrics import MethodResult, PromptResult

sys.path.insert(0, str(cli.ROOT / "benchmarks"))
import pool_reports

# Rounds by prompt; trees are longer than chains, on all but the last prompt.
ROUNDS = {
    "dflash": {("a", "0"): [2, 4], ("a", "1"): [3, 3, 1], ("b", "0"): [1] * 6, ("b", "1"): [4, 4]},
    "ddtree-16": {("a", "0"): [6], ("a", "1"): [4, 3], ("b", "0"): [2, 4], ("b", "1"): [3, 3, 2]},
}


def write(path, *chosen: tuple[str, str]) -> str:
    """A report of the given (method, task) pairs, as eval writes one."""
    methods = []
    for name, rounds in ROUNDS.items():
        kind = name.partition("-")[0]
        results = [PromptResult(task, id_, 0, generation(lengths)) for (task, id_), lengths in rounds.items()
                   if (name, task) in chosen]  # fmt: skip
        if results:
            methods.append(MethodResult(name, kind, {"budget": 16 * (kind == "ddtree"), "temperature": 0.0}, results))
    report = reports.build_report(methods, provenance={}, facts={}, dtype="float32", max_margin=0.0, seed=0)
    path.write_text(json.dumps(report))
    return str(path)


EVERYTHING = [(name, task) for name in ROUNDS for task in ("a", "b")]


def pooled(paths: list[str], capsys) -> str:
    pool_reports.main(paths)
    return capsys.readouterr().out


def test_pooling_the_reports_of_tasks_or_of_methods_gives_the_table_of_one_run(tmp_path, capsys):
    whole = pooled([write(tmp_path / "whole.json", *EVERYTHING)], capsys)
    by_task = [write(tmp_path / f"{t}.json", *[(name, t) for name in ROUNDS]) for t in ("a", "b")]
    each = [write(tmp_path / f"{name}-{t}.json", (name, t)) for name, t in EVERYTHING]
    assert pooled(by_task, capsys) == pooled(each, capsys) == whole


def test_the_table_has_the_figures_of_a_report_over_all_prompts(tmp_path, capsys):
    path = write(tmp_path / "whole.json", *EVERYTHING)
    report = json.loads((tmp_path / "whole.json").read_text())
    shown = pooled([path], capsys)
    for row in reports.cells(report):
        assert "| " + " | ".join(row[:5]) + " |" in shown
    assert "| dflash | all | 2.077 [" in shown, "27 tokens in 13 rounds"
    ratio = report["comparisons"][0]["ratio"]
    assert f"ddtree-16 accepts {ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] times" in shown
    assert "lower on 1 prompt(s)\n    b 1: 2.67 < 4.00" in shown


def test_a_pair_without_the_same_prompts_is_named_and_the_table_is_there(tmp_path, capsys):
    paths = [write(tmp_path / "chain.json", ("dflash", "a"), ("dflash", "b")),
             write(tmp_path / "tree.json", ("ddtree-16", "a"))]  # fmt: skip
    shown = pooled(paths, capsys)
    assert "| dflash | all |" in shown and "| ddtree-16 | a |" in shown
    assert "ddtree-16 against dflash: not compared: 2 and 4 prompts, 2 of them the same" in shown
    assert "accepts" not in shown


def test_an_answer_that_comes_twice_is_refused(tmp_path):
    paths = [write(tmp_path / f"{name}.json", ("dflash", "a")) for name in ("one", "two")]
    with pytest.raises(SystemExit, match=r"two\.json: dflash answers a 0 twice"):
        pool_reports.main(paths)
