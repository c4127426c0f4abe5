"""The whole mix on synthetic sources with planted faults, at a small scale: rows and counters are exactly those that
the faults say; and the comparison itself notices a mix that is wrong."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from dflash_train import cli

BENCHMARKS = cli.ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import mix_full  # noqa: E402
import mix_full_oracle as oracle  # noqa: E402
import mix_full_rows as synthetic  # noqa: E402

SCALE = 0.0012


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    data = mix_full.recipe(SCALE, processes=1)
    mix, facts = mix_full.run_once(data, tmp_path_factory.mktemp("full"))
    return data, mix, facts, oracle.expect(data)


def test_the_rows_are_those_that_the_planted_faults_leave(built):
    data, mix, facts, expected = built
    wrong, near = mix_full.compare(data, mix, expected)
    assert wrong == [] and near["recall"] == near["precision"] == 1.0
    assert facts["rows"]["train"] == data.total and len(facts["sha256"]) == 3
    reasons = {reason for report in mix.reports.values() for reason in {**report.filtered, **report.dropped}}
    assert reasons >= {"duplicate", "over_cap", "near_duplicate", "repeated_lines", "row_not_an_object", "empty_user"}


def test_the_printed_table_accounts_for_every_row_of_every_source(built):
    data, mix, _, _ = built
    by_source, reasons = mix_full.markdown_counts(mix).split("\n\n")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in by_source.splitlines()]
    assert [line[0] for line in lines[2:]] == [*data.sources, "all"] and len({len(line) for line in lines}) == 1
    for _, read, *fates in lines[2:]:
        assert int(read.replace(",", "")) == sum(int(cell.replace(",", "")) for cell in fates)
    assert lines[-1][lines[0].index("taken")] == f"{data.total:,}" and "empty_user" in reasons


def test_runs_that_wrote_other_bytes_are_told(built, capsys):
    facts = {**built[2], "processes": 2}
    assert mix_full.same_bytes([facts, {**facts, "processes": 1}])
    assert "1 process(es) wrote the same bytes as 2" in capsys.readouterr().out
    assert not mix_full.same_bytes([facts, {**facts, "sha256": {**facts["sha256"], "train": "0"}}])


def test_a_mix_that_misses_a_row_or_has_one_too_many_is_noticed(built):
    data, mix, _, expected = built
    fewer = replace(mix, splits={**mix.splits, "train": mix.splits["train"][1:]})
    assert any("train ids" in line for line in mix_full.compare(data, fewer, expected)[0])
    swapped = replace(mix, splits={**mix.splits, "train": mix.splits["train"][::-1]})
    assert mix_full.compare(data, swapped, expected)[0] == ["train order is the seeded shuffle: got False, want True"]


def test_without_the_filter_near_duplicates_are_missed_and_said_to_be(built, tmp_path):
    data, _, _, expected = built
    off = mix_full.recipe(SCALE, processes=1)
    off.near_duplicates.buckets = []
    mix, _ = mix_full.run_once(off, tmp_path / "off")
    wrong, near = mix_full.compare(data, mix, expected)
    assert wrong and near["planted"] > 0 and near["recall"] < 0.95


def test_planted_shares_are_those_that_are_promised():
    num = 40_000
    plans = [synthetic.plan("nemo_math", row, num) for row in range(num)]
    share = lambda *faults: sum(plan.fault in faults for plan in plans) / num
    assert share("duplicate") == pytest.approx(0.03, abs=0.004) and share("near") == pytest.approx(0.01, abs=0.002)
    assert share("quote", "item") == pytest.approx(0.005, abs=0.0015)
    assert share(*synthetic.BROKEN) == pytest.approx(0.02, abs=0.003)
    for plan, row in zip(plans, range(num)):
        if plan.fault in ("near", "miss"):
            similar = oracle.true_jaccard(("nemo_math", row), plan)
            assert similar == pytest.approx(plan.jaccard, abs=0.03) and (similar >= 0.8) == (plan.fault == "near")


@pytest.mark.slow
def test_one_hundredth_is_the_same_with_two_processes_and_with_one(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "mix_full.py"), "--scale", "0.01", "--again", "1"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out.json")], cwd=cli.ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["wrong"] == [] and [run["processes"] for run in found["runs"]] == [2, 1]
