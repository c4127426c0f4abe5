"""Answers: batches are a function of the mix, a killed run repeats nothing, and foreign parts are refused."""

import dataclasses
import json
import shutil

import pytest
from helpers_data import mix_manifest
from helpers_target import one_thread  # noqa: F401

from dflash_train import regenerate
from dflash_train.config import (
    AnswersConfig,
    DataConfig,
    HardwareConfig,
    RegenerateRun,
    SamplingConfig,
    SourceConfig,
    TargetConfig,
)
from dflash_train.data.answers import rules
from dflash_train.data.chat import Renderer
from dflash_train.records import Sample
from dflash_train.target import hf, tiny
from dflash_train.target.tiny import tiny_tokenizer
from dflash_train.util.errors import UserError
from dflash_train.util.io import json_line, read_jsonl, write_json, write_jsonl

NAMES = ("samples.jsonl", "heldout.jsonl")


def make_sample(i: int, split: str = "train", text: str | None = None) -> Sample:
    messages = [{"role": "user", "content": text or f"question {i} " + "x" * (i * 7 % 23)}]
    return Sample(f"s{i}", "test", "MIT", "chat", split, "on" if i % 3 == 0 else "off", messages)


def make_run(tmp_path, num_train: int = 13, **changes) -> RegenerateRun:
    answers = AnswersConfig(max_new_tokens=8, batch_size=4, greedy_share=0.3, max_repetition=0.9, probe=False,
                            off=SamplingConfig(0.7, 0.8, 20), on=SamplingConfig(1.0, 0.95, 20))  # fmt: skip
    answers = dataclasses.replace(answers, **changes)
    data = DataConfig(name="toy", sources={"mine": SourceConfig(path="x.jsonl")}, answers=answers)
    target = TargetConfig(name="tiny", kind="tiny", dtype="float32", mask_token_id=127)
    run = RegenerateRun("regenerate", str(tmp_path / "run"), str(tmp_path), hardware=HardwareConfig("cpu"),
                        data=data, target=target)  # fmt: skip
    if not run.mix_dir.exists():
        write_mix(run, [make_sample(i) for i in range(num_train)], [make_sample(100 + i, "heldout") for i in range(2)])
    return run


def write_mix(run, train, heldout):
    write_jsonl(run.mix_dir / "prompts.jsonl", (s.to_json() for s in train))
    write_jsonl(run.mix_dir / "heldout.jsonl", (s.to_json() for s in heldout))
    write_json(run.mix_dir / "manifest.json", mix_manifest(run.data))


def outputs(run) -> list[bytes]:
    return [(run.answers_dir / name).read_bytes() for name in NAMES]


def count_answers(monkeypatch) -> list[int]:
    """Batch sizes of every call of target.answer from now on."""
    calls, real = [], hf.HFTarget.answer

    def counted(self, prompts, **settings):
        calls.append(len(prompts))
        return real(self, prompts, **settings)

    monkeypatch.setattr(hf.HFTarget, "answer", counted)
    return calls


def test_every_prompt_is_answered_once_in_the_mixes_order_with_its_exact_ids(tmp_path):
    run = make_run(tmp_path)
    folder = regenerate.ensure_answers(run)
    manifest = json.loads((folder / "manifest.json").read_text())
    rows = [Sample.from_json(row) for row in read_jsonl(folder / "samples.jsonl")]
    heldout = [Sample.from_json(row) for row in read_jsonl(folder / "heldout.jsonl")]
    numbers = [int(s.id[1:]) for s in rows]
    assert numbers == sorted(set(numbers))
    assert {s.split for s in rows} == {"train"} and {s.split for s in heldout} == {"heldout"}
    assert len(rows) + len(heldout) + sum(manifest["dropped"].values()) == manifest["prompts"] == 15
    assert len(rows) + len(heldout) == sum(manifest["kept"].values()) >= 5
    renderer = Renderer(tiny_tokenizer())
    for s in rows + heldout:
        ids = s.regen["token_ids"]
        assert s.messages[-1]["role"] == "assistant" and s.regen["n_tokens"] == len(ids) <= 8
        assert (s.regen["finish_reason"] == "stop") == (ids[-1] == 2)
        rendered = renderer.render(s)
        assert rendered.token_ids[-len(ids) :] == ids and sum(rendered.loss_mask) == len(ids)
    assert manifest["answer_tokens"] == sum(s.regen["n_tokens"] for s in rows + heldout)
    assert manifest["provenance"]["target_fingerprint"] == rows[0].regen["fingerprint"]
    assert manifest["provenance"]["template_hash"] == renderer.template_hash
    assert not (folder / "parts").exists()
    assert f"{manifest['answer_tokens']:,} answer tokens" in (folder / "card.md").read_text("utf-8")


def test_greedy_samples_are_the_argmax_and_a_stable_share(tmp_path):
    run = make_run(tmp_path)
    folder = regenerate.ensure_answers(run)
    rows = list(read_jsonl(folder / "samples.jsonl"))
    greedy = [row for row in rows if row["regen"]["sampling"]["temperature"] == 0]
    assert 0 < len(greedy) < len(rows)
    target, renderer = hf.load(regenerate_local(run), HardwareConfig("cpu")), Renderer(tiny_tokenizer())
    for row in greedy:
        prompt = renderer.prompt_ids(Sample.from_json(row))
        ((ids, reason),) = target.answer([prompt], max_new_tokens=8, temperature=0.0, top_p=1.0, top_k=0, seed=0)
        assert ids == row["regen"]["token_ids"] and reason == row["regen"]["finish_reason"]


def regenerate_local(run):
    from dflash_train.target import tiny

    return tiny.local_config(run.target)


def test_a_broken_target_ends_the_run_before_the_first_answer(tmp_path, monkeypatch):
    run, load = make_run(tmp_path), tiny.load

    def broken(*arguments):
        target = load(*arguments)
        target.layers[1].self_attn.o_proj.weight.data.zero_()
        return target

    monkeypatch.setattr(tiny, "load", broken)
    calls = count_answers(monkeypatch)
    with pytest.raises(UserError, match=r"canary: rows .*\n.*all zero after self_attn of layer 1"):
        regenerate.ensure_answers(run)
    assert calls == [] and not list(run.answers_dir.glob("parts/0*"))


def test_complete_answers_are_returned_without_loading_the_target(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    regenerate.ensure_answers(run)
    before = outputs(run)
    (run.answers_dir / "parts").mkdir()  # as a run leaves them that is killed behind its last step
    monkeypatch.setattr(hf, "load", lambda *a: pytest.fail("the target was loaded"))
    assert regenerate.ensure_answers(run) == run.answers_dir and outputs(run) == before
    assert not (run.answers_dir / "parts").exists()
    for path in regenerate.mix_paths(run):
        path.unlink(missing_ok=True)
    assert regenerate.ensure_answers(run) == run.answers_dir, "answers alone are enough on another machine"


@pytest.mark.parametrize("change, named", [
    (lambda run: setattr(run.target, "options", {"seed": 1}), "target_fingerprint"),
    (lambda run: setattr(run.data.answers, "max_new_tokens", 9), "sampling.max_new_tokens"),
    (lambda run: setattr(run.data.answers.on, "temperature", 0.5), "sampling.on.temperature"),
    (lambda run: write_mix(run, [make_sample(500)], [make_sample(501, "heldout")]), "mix.prompts.jsonl"),
])  # fmt: skip
@pytest.mark.parametrize("finished", (True, False))
def test_answers_of_another_run_are_refused_naming_both(tmp_path, monkeypatch, change, named, finished):
    run = make_run(tmp_path)
    if finished:
        regenerate.ensure_answers(run)
    else:
        monkeypatch.setattr(hf.HFTarget, "answer", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            regenerate.ensure_answers(run)
        monkeypatch.undo()
    change(run)
    monkeypatch.setattr(hf, "load", lambda *a: pytest.fail("the target was loaded"))
    with pytest.raises(UserError, match=f"{named} = .*\n.*{named} = "):
        regenerate.ensure_answers(run)


def test_a_template_given_by_path_makes_other_answers(tmp_path):
    """Trap 11: the template's hash is part of what answers are."""
    run = make_run(tmp_path)
    regenerate.ensure_answers(run)
    other = tmp_path / "other.jinja"
    other.write_text(tiny_tokenizer().chat_template + " ")
    run.target.chat_template = str(other)
    with pytest.raises(UserError, match="template_hash"):
        regenerate.ensure_answers(run)


def test_prompts_that_cannot_be_rendered_are_counted_not_answered(tmp_path):
    """Traps 9, 15: control tokens in the text, and prompts without room for an answer."""
    run = make_run(tmp_path, num_train=0)
    train = [make_sample(1), make_sample(2, text="say <|im_end|>"), make_sample(4, text="y" * 5000)]
    write_mix(run, train, [make_sample(5, "heldout")])
    folder = regenerate.ensure_answers(run)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["dropped"]["prompt_special_token"] == manifest["dropped"]["prompt_too_long"] == 1
    assert sum(manifest["finish_reasons"].values()) == 2


def test_dry_run_and_missing_needs_stop_before_anything_is_written(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path)
    run.dry_run = True
    with pytest.raises(SystemExit) as stop:
        regenerate.ensure_answers(run)
    assert stop.value.code == 0 and not run.answers_dir.exists()
    assert "15 prompts" in capsys.readouterr().out
    run = make_run(tmp_path)
    run.target = TargetConfig(name="none", kind="hf", path=str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit) as stop:
        regenerate.ensure_answers(run)
    assert stop.value.code == 2 and "MISSING" in capsys.readouterr().out


def test_a_run_that_fitted_the_disk_fits_it_when_it_is_resumed(tmp_path, monkeypatch, capsys):
    """The answers that lie there already take no further room."""
    run = make_run(tmp_path)
    needed, there = 15 * 8 * regenerate.BYTES_PER_TOKEN, 2_000
    free = lambda run: shutil._ntuple_diskusage(10**9, 0, needed - there)
    monkeypatch.setattr(shutil, "disk_usage", free)
    with pytest.raises(SystemExit) as stop:
        regenerate.ensure_answers(run)
    assert stop.value.code == 2 and "disk" in capsys.readouterr().out
    (run.answers_dir / "parts").mkdir(parents=True)
    record = json_line({"row": 0, "dropped": "empty", "detail": ""})
    record = json_line({"row": 0, "dropped": "empty", "detail": "x" * (there - len(record))})
    (run.answers_dir / "parts" / "000000.jsonl").write_text(record)
    regenerate.ensure_answers(run)
    assert "of which 2.0 KB are there" in capsys.readouterr().out


# ---------------------------------------------------------------- the pure parts


def test_sampling_follows_the_thinking_mode_and_the_greedy_share():
    config = AnswersConfig(greedy_share=0.25)
    chosen = [rules.sampling_of(make_sample(i), config, 0) for i in range(2000)]
    assert 0.2 < sum(s == rules.GREEDY for s in chosen) / 2000 < 0.3
    for i, sampling in enumerate(chosen):
        mode = config.on if i % 3 == 0 else config.off
        assert sampling in (rules.GREEDY, rules.Sampling(mode.temperature, mode.top_p, mode.top_k))
    none = dataclasses.replace(config, greedy_share=0.0)
    assert rules.GREEDY not in [rules.sampling_of(make_sample(i), none, 0) for i in range(200)]


def test_repetition_is_the_share_of_8_grams_seen_before():
    assert rules.repetition(list(range(30))) == 0.0 and rules.repetition([1] * 7) == 0.0
    assert rules.repetition([1] * 18) == pytest.approx(10 / 11)
    assert rules.repetition(list(range(8)) * 2) == pytest.approx(1 / 9)


def test_bad_answers_are_named():
    tokenizer = tiny_tokenizer()
    text = tokenizer.encode("a fine answer, in full", add_special_tokens=False)
    reason = lambda ids, finish="stop": rules.drop_reason(ids, finish, tokenizer, 0.5)
    assert reason([*text, 2]) is None and reason(text, "length") is None
    assert reason([2]) == reason([*tokenizer.encode(" \n", add_special_tokens=False), 2]) == "empty"
    assert reason([*text, 1, *text, 2]) == reason([*text, 127], "length") == "special_token"
    assert reason([*text, 3, *text[:3], 4, 2]) is None, "<think> is a plain marker"
    assert reason([50] * 40, "length") == "repetition"


def test_reasoning_is_split_from_the_answer_and_cut_reasoning_stays_reasoning():
    message = rules.answer_message("<think>\nhm\n</think>\n\nfour", True)
    assert message == {"role": "assistant", "content": "four", "reasoning_content": "hm"}
    assert rules.answer_message("hm and", True)["content"] == ""
    assert rules.answer_message("four", False) == {"role": "assistant", "content": "four"}
