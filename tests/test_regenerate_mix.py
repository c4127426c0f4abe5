"""The prompts before the answers: made where they are absent, once however many come at once, and never made anew under
answers that were paid for."""

import json
import re
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers_target import one_thread  # noqa: F401
from test_regenerate import count_answers, make_run, make_sample, write_mix

from dflash_train import regenerate
from dflash_train.util.errors import UserError
from dflash_train.util.io import write_json


def test_an_absent_mix_is_made_first_and_said(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path)
    (run.mix_dir / "manifest.json").unlink()
    made = []
    monkeypatch.setattr(regenerate.mix, "checks", lambda run: [])
    fake = lambda run: made.append(1) or write_mix(run, [make_sample(i) for i in range(3)], [])
    monkeypatch.setattr(regenerate.mix, "ensure_mix", fake)
    regenerate.ensure_answers(run)
    assert made == [1] and "running mix first" in capsys.readouterr().out


def test_shares_that_start_at_once_make_one_mix_between_them(tmp_path, monkeypatch, capsys):
    run, made = make_run(tmp_path), []
    (run.mix_dir / "manifest.json").unlink()

    def make(run, problem):
        made.append(problem)
        time.sleep(0.3)
        write_mix(run, [make_sample(i) for i in range(3)], [])

    monkeypatch.setattr(regenerate.mix, "needs", lambda run: [])
    monkeypatch.setattr(regenerate.mix, "_make", make)
    shares = [threading.Thread(target=regenerate.mix.ensure_mix, args=(run,)) for _ in range(3)]
    for share in shares:
        share.start()
    for share in shares:
        share.join()
    assert len(made) == 1 and regenerate.mix.mix_problem(run) is None
    assert "waiting for the mix" in capsys.readouterr().out


def made_by_older_rules(run) -> None:
    path = run.mix_dir / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["made_of"]["rules"] = 1
    write_json(path, manifest)


STALE = [
    (lambda run: setattr(run.data.sources["mine"], "take", 3), "sources.mine.take was null, and is 3 now"),
    (lambda run: Path("x.jsonl").write_text("{}"), "inputs.mine was"),
    (lambda run: run.data.decontaminate.append("bfcl"), "bfcl"),
    (made_by_older_rules, "rules was 1, and is"),
]


@pytest.mark.parametrize("change, named", STALE)
@pytest.mark.parametrize("finished", (True, False))
def test_prompts_that_were_paid_for_are_not_made_anew_unasked(tmp_path, monkeypatch, capsys, change, named, finished):
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text("")
    run = make_run(tmp_path)
    made, real = [], merge_fails(monkeypatch, finished)
    monkeypatch.setattr(regenerate.mix, "ensure_mix", made.append)
    with nullcontext() if finished else pytest.raises(KeyboardInterrupt):
        regenerate.ensure_answers(run)
    monkeypatch.setattr(regenerate, "merge", real)
    change(run)
    with pytest.raises(UserError, match=f"out of date: .*{named}(.|\n)*accept_stale_mix=true"):
        regenerate.ensure_answers(run)
    run.data.answers.accept_stale_mix = True
    calls = count_answers(monkeypatch)
    run.target.canary = False
    regenerate.ensure_answers(run)
    assert made == calls == [] and f"{named}" in capsys.readouterr().out


def merge_fails(monkeypatch, finished: bool):
    """Where answers are to stay unfinished, whole but for the merge."""
    real = regenerate.merge

    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(regenerate, "merge", real if finished else stopped)
    return real


@pytest.mark.parametrize("change, named", STALE)
def test_a_mix_out_of_date_without_answers_is_made_again(tmp_path, monkeypatch, capsys, change, named):
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl").write_text("")
    run, made = make_run(tmp_path), []
    change(run)
    fake = lambda run: made.append(1) or write_mix(run, [make_sample(i) for i in range(3)], [])
    monkeypatch.setattr(regenerate.mix, "ensure_mix", fake)
    monkeypatch.setattr(regenerate.mix, "checks", lambda run: [])
    regenerate.ensure_answers(run)
    assert made == [1] and re.search(f"{named}.*: running mix first", capsys.readouterr().out)
