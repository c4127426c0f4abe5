"""Reports: every figure follows from the answers in it, and a slow method says why."""

import json

import pytest
from helpers_decode import generation

from dflash_train.bench import report as reports
from dflash_train.bench.metrics import MethodResult, PromptResult


def method(name, kind, rounds_by_prompt, *, decode_s=1.0, tokens=None, settings=None, **parts) -> MethodResult:
    results = [
        PromptResult(task, str(i), 0, generation(lengths, decode_s=decode_s, token_ids=tokens, **parts))
        for i, (task, lengths) in enumerate(rounds_by_prompt)
    ]
    return MethodResult(name, kind, {"temperature": 0.0, **(settings or {})}, results)


def three_methods() -> list[MethodResult]:
    one = method("autoregressive", "autoregressive", [("a", [1] * 6), ("b", [1] * 6), ("b", [1] * 6)], decode_s=0.6)
    chain = method("dflash", "dflash", [("a", [2, 4]), ("b", [3, 3]), ("b", [1] * 6)], decode_s=0.4)
    tree = method("ddtree-64", "ddtree", [("a", [6]), ("b", [1, 3, 2]), ("b", [2, 4])], decode_s=0.9, propose_s=0.1,
                  verify_s=0.75, commit_s=0.05)  # fmt: skip
    return [one, chain, tree]


def build(results, dtype="float32", **changes) -> dict:
    given = {"provenance": {"code_version": "x"}, "facts": {"target": "tiny | fp"}, "max_margin": 0.25, "seed": 0}
    return reports.build_report(results, **{**given, "dtype": dtype, **changes})


def test_the_numbers_per_task_and_overall_are_those_of_the_rounds():
    report = build(three_methods())
    chain = report["methods"][1]
    assert chain["tasks"]["a"]["acceptance_length_pooled"] == 3.0
    assert chain["tasks"]["b"]["acceptance_length_pooled"] == 12 / 8
    assert chain["tasks"]["b"]["acceptance_length_macro"] == 2.0
    assert chain["all"]["acceptance_length_pooled"] == 18 / 10 and chain["all"]["rounds"] == 10
    assert chain["all"]["speedup"] == pytest.approx(1.5) and report["methods"][0]["all"]["speedup"] == 1.0
    assert chain["lossless"] == "equal" and "3 of 3" in chain["lossless_detail"]


def test_every_figure_can_be_computed_again_from_the_answers_in_the_file():
    report = json.loads(json.dumps(build(three_methods())))
    for entry in report["methods"]:
        rounds = [n for row in report["answers"] if row["method"] == entry["name"] for n in row["round_lengths"]]
        assert sum(rounds) / len(rounds) == entry["all"]["acceptance_length_pooled"]


def test_trees_are_compared_with_the_chain_and_prompts_where_they_lose_are_listed():
    """Trap 29: across prompts pooled with an interval, and prompts where the tree is lower are not hidden."""
    pair = build(three_methods())["comparisons"][0]
    assert (pair["method"], pair["against"]) == ("ddtree-64", "dflash")
    assert pair["ratio"]["value"] == pytest.approx((18 / 6) / (18 / 10))
    assert pair["ratio"]["low"] <= pair["ratio"]["value"] <= pair["ratio"]["high"]
    assert pair["num_lower"] == 1 and pair["lower_prompts"][0]["id"] == "1"
    assert "b 1 (2.00 < 3.00)" in reports.markdown(build(three_methods()))


def test_a_slower_method_says_why_in_one_sentence_from_its_measured_parts():
    report = build(three_methods())
    sentence = report["methods"][2]["slower_because"]
    assert "0.67x" in sentence and "a round takes 450.0 ms" in sentence and "autoregressive takes 100.0 ms" in sentence
    assert "4.50 tokens a round would break even" in sentence and "verifying more than one token" in sentence
    assert report["methods"][1]["slower_because"] is None and report["methods"][0]["slower_because"] is None


def test_differing_float32_answers_fail_the_report():
    one, chain, _ = three_methods()
    wrong = method("dflash", "dflash", [("a", [2, 4])], tokens=[9, 9, 9])
    report = build([one, MethodResult("dflash", "dflash", {"temperature": 0.0}, [*wrong.results, *chain.results[1:]])])
    assert len(reports.failed(report)) == 1 and "dflash" in reports.failed(report)[0]
    assert report["methods"][1]["differences"] == [{"task": "a", "id": "0", "turn": 0, "position": 0, "margin": 1.0}]


def test_sampled_answers_are_not_called_unequal():
    one, chain, _ = three_methods()
    sampled = MethodResult("dflash", "dflash", {"temperature": 1.0}, chain.results)
    assert build([one, sampled])["methods"][1]["lossless"] == "not checked"


def test_without_a_baseline_there_is_neither_speedup_nor_agreement():
    entry = build(three_methods()[1:2])["methods"][0]
    assert entry["all"]["speedup"] is None and entry["lossless"] == "not checked" and entry["slower_because"] is None


def test_a_method_without_counted_rounds_reports_nulls_not_numbers():
    empty = method("dflash", "dflash", [("a", []), ("b", []), ("b", [])], decode_s=0.0)
    report = build([three_methods()[0], three_methods()[2], empty])
    assert report["methods"][2]["all"]["acceptance_length_pooled"] is None
    assert reports.cells(report)[-1][2] == "-" and report["comparisons"] == []


def test_the_table_has_a_row_per_method_and_task_and_markdown_escapes_bars():
    report = build(three_methods())
    rows = reports.cells(report)
    assert len(rows) == 9 and rows[3][:2] == ["dflash", "a"] and rows[5][:2] == ["dflash", "all"]
    assert rows[5][2].startswith("1.800 [") and rows[5][6] == "1.50x"
    assert "tiny \\| fp" in reports.markdown(report)


def test_an_ablation_is_compared_but_its_lost_prompts_are_not_listed():
    _, chain, _ = three_methods()
    rounds = [("a", [1] * 6), ("b", [1] * 6), ("b", [1] * 6)]
    low = method("dflash, untrained", "dflash", rounds, settings={"ablate": "untrained"})
    pair = build([chain, low])["comparisons"][0]
    assert pair["num_lower"] == 2 and pair["lower_prompts"] == []


def test_json_markdown_and_figure_are_written(tmp_path):
    paths = reports.write_report(build(three_methods()), tmp_path / "deep", "ddtree-64")
    assert [path.name for path in paths] == ["ddtree-64.json", "ddtree-64.md", "ddtree-64.png"]
    assert json.loads(paths[0].read_text())["schema"] == reports.SCHEMA
    assert paths[2].read_bytes().startswith(b"\x89PNG") and paths[2].stat().st_size > 5000
    assert len(list((tmp_path / "deep").iterdir())) == 3, "nothing temporary is left"


def test_names_become_plain_file_names(tmp_path):
    assert reports.slug("ddtree-64, shuffled rows") == "ddtree-64-shuffled-rows"
    assert reports.slug("../../etc/passwd") == "etc-passwd"
    folder = tmp_path / "checkpoints" / "demo" / "step-000200" / "drafter"
    folder.mkdir(parents=True)
    assert reports.checkpoint_label(folder) == "demo-step-000200"
