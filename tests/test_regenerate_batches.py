"""The built-in generator: batches are a function of the rows, planned a window ahead; a killed run or several shares
give the same answers. And whose answers a folder holds."""

import dataclasses

import pytest
from helpers_target import one_thread  # noqa: F401
from test_regenerate import NAMES, count_answers, make_run, outputs

from dflash_train import regenerate
from dflash_train.data.answers import rules
from dflash_train.data.answers.identity import check_identity
from dflash_train.data.answers.work import Work
from dflash_train.decode import batched
from dflash_train.target import hf
from dflash_train.util.errors import UserError
from dflash_train.util.io import read_json, read_jsonl, write_json


def count_rendered(monkeypatch) -> list[int]:
    """Rows rendered from now on."""
    rows, real = [], Work.prompt
    monkeypatch.setattr(Work, "prompt", lambda self, row: rows.append(row) or real(self, row))
    return rows


def answer_until(run, monkeypatch, stop) -> list[int]:
    """Answers of `run`, killed before the first batch for which `stop(done)` holds -> prompts of each batch done."""
    real, done = hf.HFTarget.answer, []
    run.target.canary = False  # it answers, too

    def killed(self, prompts, **settings):
        if stop(done):
            raise KeyboardInterrupt
        done.append(len(prompts))
        return real(self, prompts, **settings)

    monkeypatch.setattr(hf.HFTarget, "answer", killed)
    with pytest.raises(KeyboardInterrupt):
        regenerate.ensure_answers(run)
    monkeypatch.setattr(hf.HFTarget, "answer", real)
    return done


def test_batches_are_a_function_of_the_prompts_alone():
    sampled, greedy = rules.Sampling(0.7, 0.8, 20), rules.GREEDY
    prompts = [rules.Prompt(i, [1] * (i * 37 % 19 + 1), greedy if i % 4 == 0 else sampled) for i in range(50)]
    batches = rules.plan_batches(prompts, 8, seed=3)
    assert batches == rules.plan_batches(prompts[::-1], 8, seed=3)
    assert sorted(p.row for b in batches for p in b.prompts) == list(range(50))
    assert [b.index for b in batches] == list(range(len(batches))) and len({b.seed for b in batches}) == len(batches)
    for batch in batches:
        assert {p.sampling for p in batch.prompts} == {batch.sampling} and len(batch.prompts) <= 8
        lengths = [len(p.token_ids) for p in batch.prompts]
        assert lengths == sorted(lengths, reverse=True)
    assert rules.plan_batches(prompts, 8, seed=4)[0].seed != batches[0].seed


def test_a_killed_run_resumes_losing_one_batch_at_most_and_repeats_nothing_stored(tmp_path, monkeypatch):
    whole = make_run(tmp_path / "whole")
    regenerate.ensure_answers(whole)
    run = make_run(tmp_path / "killed")
    done = answer_until(run, monkeypatch, lambda done: len(done) == 2)
    assert not (run.answers_dir / "manifest.json").exists() and not (run.answers_dir / "samples.jsonl").exists()
    calls = count_answers(monkeypatch)
    regenerate.ensure_answers(run)
    assert sum(done) + sum(calls) == 15 and len(done) == 2
    assert outputs(run) == outputs(whole)


def test_prompts_are_rendered_a_window_ahead_and_greedy_answers_do_not_depend_on_it(tmp_path, monkeypatch):
    whole = make_run(tmp_path / "whole", num_train=40, greedy_share=1.0)
    regenerate.ensure_answers(whole)
    monkeypatch.setattr(batched, "WINDOW_BATCHES", 2)
    run = make_run(tmp_path / "windows", num_train=40, greedy_share=1.0)
    run.target.canary, waiting = False, []
    rendered, calls, real = count_rendered(monkeypatch), count_answers(monkeypatch), batched.Batches.generate
    asked = lambda self, batch: waiting.append(len(rendered) - sum(calls)) or real(self, batch)
    monkeypatch.setattr(batched.Batches, "generate", asked)
    regenerate.ensure_answers(run)
    assert len(rendered) == 42 and max(waiting) == 8, "two batches of four"
    without_seed = lambda row: {**row, "regen": {**row["regen"], "sampling": None}}
    same = lambda run: [[without_seed(row) for row in read_jsonl(run.answers_dir / name)] for name in NAMES]
    assert same(run) == same(whole) and len(same(run)[0]) > 10


def test_a_killed_run_of_several_windows_gives_the_same_answers_and_renders_no_finished_window(tmp_path, monkeypatch):
    """Sampled answers: what is drawn depends on the batch, so the batches must be the same ones."""
    monkeypatch.setattr(batched, "WINDOW_BATCHES", 2)
    sizes = {"num_train": 30, "greedy_share": 0.2}
    whole, run = make_run(tmp_path / "whole", **sizes), make_run(tmp_path / "killed", **sizes)
    regenerate.ensure_answers(whole)
    done = answer_until(run, monkeypatch, lambda done: sum(done) >= 18)
    rendered, calls = count_rendered(monkeypatch), count_answers(monkeypatch)
    regenerate.ensure_answers(run)
    assert min(rendered) == 16 and sum(done) + sum(calls) == 32
    assert outputs(run) == outputs(whole)


def test_every_batch_of_every_window_is_one_shares_and_shares_are_even():
    for num_shares in (1, 3, 8, 32):
        owners = [batched.share_of(window * batched.WINDOW_NUMBERS + i, num_shares)
                  for window in range(64) for i in range(batched.WINDOW_BATCHES + 2)]  # fmt: skip
        counts = [owners.count(share) for share in range(num_shares)]
        assert sum(counts) == len(owners) and max(counts) - min(counts) <= len(owners) * 0.05 / num_shares + 1
        first = [batched.share_of(window * batched.WINDOW_NUMBERS, num_shares) for window in range(num_shares)]
        assert set(first) == set(range(num_shares)), "nobody has the longest prompts of all windows"


def test_shares_of_the_built_in_generator_merge_into_what_one_process_gives(tmp_path, monkeypatch):
    monkeypatch.setattr(batched, "WINDOW_BATCHES", 2)
    whole, run = make_run(tmp_path / "whole", num_train=30), make_run(tmp_path / "shares", num_train=30)
    regenerate.ensure_answers(whole)
    calls = count_answers(monkeypatch)
    for share in ("1/2", "0/2"):
        regenerate.main(dataclasses.replace(run, data=dataclasses.replace(
            run.data, answers=dataclasses.replace(run.data.answers, worker=share))))  # fmt: skip
    run.target.canary, before = False, sum(calls)
    regenerate.ensure_answers(run)
    assert sum(calls) == before, "nothing was left to the run that merges"
    assert outputs(run) == outputs(whole)


# ---------------------------------------------------------------- whose answers they are


@pytest.mark.parametrize("forget", [["target_dtype"], ["sampling", "max_repetition"], None])
def test_answers_of_an_earlier_version_are_refused_saying_so(tmp_path, forget):
    """None: that version had no record at all."""
    run = make_run(tmp_path)
    path = regenerate.ensure_answers(run) / "manifest.json"
    manifest = read_json(path)
    if forget is None:
        del manifest["identity"]
    else:
        *groups, key = forget
        facts = manifest["identity"]
        del (facts[groups[0]] if groups else facts)[key]
    write_json(path, manifest)
    with pytest.raises(UserError, match=r"an earlier version of dflash_train made them(.|\n)*data\.name") as error:
        regenerate.ensure_answers(run)
    assert ".".join(forget or ["target_fingerprint"]) in str(error.value)


def test_unfinished_answers_of_another_version_or_another_way_are_told_apart(tmp_path):
    """Batches of an earlier version were planned otherwise; a server's answers are no matter of version."""
    new = {"target": "t", "answered_by": {"batch_size": 4, "window_rows": 256}}
    with pytest.raises(UserError, match=r"earlier version(.|\n)*answered_by\.window_rows"):
        check_identity({"target": "t", "answered_by": {"batch_size": 4}}, new, tmp_path)
    with pytest.raises(UserError, match=r"answered_by\.batch_size = None(.|\n)*answered_by\.batch_size = 4"):
        check_identity({"target": "t", "answered_by": {"model": "m"}}, new, tmp_path)
    check_identity(new, new, tmp_path)
