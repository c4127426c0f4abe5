"""An adversarial file per importer: nothing crashes, every row is counted once, and what is kept is well formed."""

import json

import pytest
from helpers_adversary import broken_lines, mutated_rows
from helpers_data import mixed, read_all, recipe
from helpers_forms import NAMED_FORMS, check_grammar, fixture_rows, result

from dflash_train.data.forms import convert

CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "name": "weather", "content": '{"temp": 3}'},
    {"role": "assistant", "content": "3 degrees.", "reasoning_content": "cold"},
    {"role": "user", "content": [{"type": "text", "text": "And tomorrow?"}]},
]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "str"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "W.", "parameters": PARAMETERS}}]
SHAREGPT = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}, {"from": "human", "value": "Why?"}]
GENERAL = {
    "messages": [{"id": "m", "messages": TURNS, "tools": TOOLS, "license": "MIT"}],
    "native": [{"id": "n", "source": "s", "license": "MIT", "bucket": "chat", "split": "train", "thinking": "on",
                "messages": TURNS, "tools": TOOLS, "upstream": {}, "regen": None}],
    "sharegpt": [{"id": "s", "system": "Be kind.", "conversations": SHAREGPT, "tools": json.dumps(TOOLS)}],
    "alpaca": [{"id": "a", "instruction": "Sort these.", "input": "3 1 2", "output": "1 2 3"}],
    "prompt": [{"id": "p", "prompt": "Why is the sky blue?", "system": "Be brief."}, {"turns": ["One?", "Two?"]}],
    "auto": [{"id": "x", "messages": TURNS, "tools": TOOLS}, {"conversations": SHAREGPT}, {"instruction": "Go?"}],
}  # fmt: skip
ALL_FORMS = (*GENERAL, *NAMED_FORMS)


def good_rows(form: str) -> list[dict]:
    rows = GENERAL.get(form) or fixture_rows(form)
    return [row for row in rows if "messages" in result(convert(row, form, "", {}))]


@pytest.fixture(scope="module")
def adversarial(tmp_path_factory):
    """form -> (its file, the lines of good rows in it); made once a module."""
    made = {}

    def make(form: str):
        if form not in made:
            rows = good_rows(form)
            plain = [json.dumps(row).encode() for row in rows]
            bad = [json.dumps(row).encode() for row in mutated_rows(rows, seed=7, num_nested=300)]
            bad += broken_lines(rows, seed=7)
            lines, good_at = [], {}
            for number, line in enumerate(bad):
                if number % 50 == 0:  # a good row between the bad ones, to see that none is lost with them
                    good_at[len(lines) + 1] = (number // 50) % len(plain)
                    lines.append(plain[good_at[len(lines) + 1]])
                lines.append(line.replace(b"\n", b" "))
            path = tmp_path_factory.mktemp(form) / "rows.jsonl"
            path.write_bytes(b"".join(line + b"\n" for line in lines))
            made[form] = path, good_at, len(lines)
        return made[form]

    return make


@pytest.mark.parametrize("form", ALL_FORMS)
def test_nothing_but_reasons_comes_out_of_an_adversarial_file(form, adversarial):
    """Trap 13: one bad row must not stop a million; what survives is what a template may take for granted."""
    path, good_at, num_lines = adversarial(form)
    expected = [result(convert(row, form, "", {})) for row in good_rows(form)]
    rows = read_all(path, form=form)
    outcomes = {int(row.location.rpartition(":")[2]): result(row) for row in rows}
    assert len(rows) == len(outcomes) == num_lines > 700
    for number, row in good_at.items():
        assert outcomes[number] == expected[row], f"line {number}"
    reasons = {outcome.get("drop", outcome.get("skip")) for outcome in outcomes.values()} - {None}
    kept = [outcome for outcome in outcomes.values() if "messages" in outcome]
    for outcome in kept:
        check_grammar(outcome["messages"], outcome.get("tools"))
    assert len(reasons) >= 8 and all(isinstance(reason, str) and " " not in reason for reason in reasons)
    assert len(good_at) < len(kept) < num_lines - 100


@pytest.mark.parametrize("form", ALL_FORMS)
def test_the_mixer_counts_every_adversarial_row_exactly_once(form, adversarial, tmp_path):
    path, good_at, num_lines = adversarial(form)
    data = recipe({"s": {"path": str(path), "form": form}}, max_prompt_chars=10_000_000)
    train, _, mix = mixed(data, tmp_path / "w")
    report = mix.reports["s"]
    assert report.read == num_lines
    assert report.read == report.converted + sum(report.skipped.values()) + sum(report.dropped.values())
    assert sum(report.dropped.values()) > 100 and len(train) >= len({*good_at.values()})
    for row in train:
        check_grammar(row["messages"], row["tools"])
