"""The eval stage end to end on a tiny target with a drafter that knows one answer by heart."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from helpers_decode import overfit, tiny_drafter
from hydra import compose, initialize_config_dir

from dflash_train import cli, eval
from dflash_train.bench.compatible import trained_modes
from dflash_train.bench.conversation import Conversation
from dflash_train.bench.methods import methods_of
from dflash_train.bench.prompts import load_task
from dflash_train.data.chat import Renderer
from dflash_train.decode.autoregressive import Proposer as Autoregressive
from dflash_train.decode.generate import generate
from dflash_train.decode.verify import Sampling, Verifier
from dflash_train.drafter.files import save_drafter
from dflash_train.eval import Method, compare, load_parts, make_report
from dflash_train.records import Verdict
from dflash_train.target.tiny import make_tiny_target
from dflash_train.util import log
from dflash_train.util.errors import UserError
from dflash_train.util.io import write_jsonl

NUM_TOKENS = 25
ROWS = [{"id": "first", "turns": ["hello there", "and now?"]}, {"id": "second", "turns": ["what is 2+2"]}]


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small only lose by sharing an operation between threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder with prompts.jsonl and drafter/: trained by heart on the first prompt's greedy answer."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("eval")
    write_jsonl(folder / "prompts.jsonl", ROWS)
    target = make_tiny_target()
    renderer = Renderer(target.tokenizer)
    prompt = load_task(f"file:{folder / 'prompts.jsonl'}", num_prompts=None, seed=0)
    first = next(p for p in prompt if p.id == "first")
    ids = Conversation(first, "off", renderer).ask(0)
    answer = generate(target, Autoregressive(), Verifier(Sampling()), ids, NUM_TOKENS).token_ids
    drafter = overfit(target, tiny_drafter(target), [*ids, *answer], 40)
    record = {"config": {"data": {"sources": {"s": {"bucket": "chat"}}, "thinking_share": {}}}, "step": 40,
              "target": {"name": "tiny", "fingerprint": target.spec.fingerprint},
              "chat_template_hash": renderer.template_hash}  # fmt: skip
    save_drafter(folder / "drafter", drafter, drafter.config, record)
    return folder


def make_run(place, *overrides, method="dflash"):
    task = f"file:{place / 'prompts.jsonl'}"
    given = [f"eval={method}", "target=tiny", "hardware=cpu", f"eval.max_new_tokens={NUM_TOKENS}",
             f"work_dir={place}", f"eval.checkpoint={place / 'drafter'}", f"checkpoints_dir={place / 'none'}",
             f"eval.tasks=['{task}']"]  # fmt: skip
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        return cli.build_run("eval", compose("eval", [*given, *overrides]))


def test_a_replay_reports_decodings_rounds_and_no_speed(place, capsys):
    """Acceptance of every method, both turns, equals real decoding's; speed is left out."""
    also = "eval.also=[ddtree:8,dflash:shuffle_features]"
    assert eval.main(make_run(place, also)) == 0
    real = json.loads(next((place / "eval").rglob("dflash.json")).read_text())
    assert eval.main(make_run(place, also, "eval.replay=true", f"eval.output_dir={place / 'replay'}")) == 0
    replayed = json.loads((place / "replay" / "dflash.json").read_text())
    rows = lambda report: {(r["method"], r["id"], r["turn"]): (r["round_lengths"], r["draft_lengths"], r["stopped_by"])
                           for r in report["answers"] if r["method"] != "autoregressive"}  # fmt: skip
    assert rows(replayed) == rows(real) and len(rows(real)) == 9
    assert [m["name"] for m in replayed["methods"]] == ["dflash", "ddtree-8", "dflash, shuffled rows"]
    assert all(m["all"]["tokens_per_s"] is None and m["all"]["round_ms"] is None for m in replayed["methods"])
    assert "replayed" in replayed["facts"]["speedup"] and replayed["comparisons"][0]["method"] == "ddtree-8"
    with pytest.raises(UserError, match="rejection"):
        make_run(place, "eval.replay=true", "eval.accept=rejection")
    with pytest.raises(UserError, match="nothing to replay"):
        make_run(place, "eval.replay=true", method="autoregressive")


def test_a_run_reports_lossless_acceptance_and_names_the_next_command(place, capsys):
    """Trap 18: the drafter that learnt the first answer accepts whole blocks on it, through the stage itself."""
    assert eval.main(make_run(place)) == 0
    out = capsys.readouterr().out
    assert "python -m dflash_train.export" in out and "eval: what it needs" in out and "acceptance length" in out
    report = json.loads(next((place / "eval").rglob("dflash.json")).read_text())
    plain, chain = report["methods"]
    assert (plain["name"], chain["name"], chain["lossless"]) == ("autoregressive", "dflash", "equal")
    known = next(r for r in report["answers"] if r["method"] == "dflash" and r["id"] == "first" and r["turn"] == 0)
    assert known["round_lengths"] == [6] * ((NUM_TOKENS - 1) // 6)
    assert chain["all"]["answers"] == 3 and chain["all"]["prompts"] == 2
    assert plain["all"]["acceptance_length_pooled"] == 1.0 < chain["all"]["acceptance_length_pooled"]
    record = report["provenance"]
    assert record["target"]["name"] == "tiny" and len(record["drafter"]["sha256"]["model.safetensors"]) == 64
    assert record["config"]["eval"]["method"] == "dflash" and record["layer_ids"] == [0, 1]


def test_autoregressive_needs_no_drafter(place):
    run = make_run(place, "eval.checkpoint=null", method="autoregressive")
    assert eval.main(run) == 0
    report = json.loads((place / "eval" / "tiny" / "autoregressive.json").read_text())
    assert [entry["name"] for entry in report["methods"]] == ["autoregressive"]
    assert report["methods"][0]["all"]["acceptance_length_pooled"] == 1.0 and report["facts"]["drafter"] == "none"


def test_many_methods_share_one_target_and_the_same_prompts(place):
    parts = load_parts(make_run(place))
    methods = [Method("autoregressive"), Method("dflash"), Method("dflash", block_size=3), Method("ddtree", budget=8),
               Method("ddtree", budget=40), Method("dflash", ablate="shuffle_features"),
               Method("dflash", ablate="untrained")]  # fmt: skip
    results = compare(parts, methods)
    assert [r.name for r in results] == [
        "autoregressive", "dflash", "dflash B=3", "ddtree-8", "ddtree-40", "dflash, shuffled rows", "dflash, untrained"
    ]  # fmt: skip
    report = make_report(parts, results)
    assert [entry["lossless"] for entry in report["methods"]] == ["not checked"] + ["equal"] * 6
    acceptance = {entry["name"]: entry["all"]["acceptance_length_pooled"] for entry in report["methods"]}
    for other in ("dflash, shuffled rows", "dflash, untrained", "dflash B=3"):
        assert acceptance["dflash"] > acceptance[other]
    assert len(report["comparisons"]) == 5 and report["comparisons"][0]["against"] == "dflash"


def test_a_second_turn_reads_the_targets_own_first_answer(place):
    parts = load_parts(make_run(place))
    result = compare(parts, [Method("dflash")])[0]
    first, second = (r.generation for r in result.results if r.id == "first")
    decode = lambda ids: parts.renderer.tokenizer.decode(ids)
    body = parts.renderer.tokenizer.decode(first.token_ids, skip_special_tokens=True)
    assert f"hello there<|im_end|>\n<|im_start|>assistant\n{body}<|im_end|>" in decode(second.prompt_ids)
    assert "and now?" in decode(second.prompt_ids) and "and now?" not in decode(first.prompt_ids)


def test_sampled_runs_repeat_whatever_else_is_measured(place):
    run = make_run(place, "eval.temperature=1.0", "eval.top_p=0.9", "eval.accept=rejection")
    alone = compare(load_parts(run), [Method("dflash")])[0]
    parts = load_parts(run)
    among = compare(parts, [Method("autoregressive"), Method("dflash")])[1]
    tokens = lambda result: [r.generation.token_ids for r in result.results]
    assert tokens(alone) == tokens(among)
    assert make_report(parts, [among])["methods"][0]["settings"]["accept"] == "rejection"


def test_the_limit_takes_that_many_prompts_of_each_task(place):
    assert len(load_parts(make_run(place, "limit=1")).prompts) == 1
    assert len(load_parts(make_run(place, "eval.num_prompts=1", "limit=2")).prompts) == 1


def test_heldout_rows_of_the_mix_can_be_asked(place):
    run = make_run(place, "eval.tasks=[heldout]", "data=demo", "data.name=rows")
    row = {"id": "h1", "source": "s", "license": "x", "bucket": "chat", "split": "heldout", "thinking": "off",
           "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "its answer"}],
           "tools": None}  # fmt: skip
    write_jsonl(run.answers_dir / "heldout.jsonl", [row])
    parts = load_parts(run)
    ids = Conversation(parts.prompts[0], "off", parts.renderer).ask(0)
    text = parts.renderer.tokenizer.decode(ids)
    assert "hi<|im_end|>" in text and "its answer" not in text


def test_prompts_that_cannot_be_asked_are_counted_not_asked(place, tmp_path):
    rows = [*ROWS, {"id": "control", "turns": ["say <|im_end|>"]}, {"id": "long", "turns": ["x" * 5000]}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    parts = load_parts(make_run(place, f"eval.tasks=['file:{tmp_path / 'rows.jsonl'}']"))
    assert {prompt.id for prompt in parts.prompts} == {"first", "second"}
    task = parts.prompts[0].task
    assert parts.skipped == {f"{task}: special_token": 1, f"{task}: prompt too long": 1}


# ---------------------------------------------------------------- refusals


def test_a_wrong_answer_in_float32_fails_the_run_after_the_report_is_written(place, monkeypatch, capsys):
    """Trap 31: a real bug is not a near-tie. Here the verifier of drafted rounds is off by one token."""
    honest = Verifier.verify

    def wrong(self, tree, logits):
        verdict = honest(self, tree, logits)
        return verdict if len(tree) == 1 else Verdict(verdict.path, (verdict.bonus + 1) % 100)

    monkeypatch.setattr(Verifier, "verify", wrong)
    run = make_run(place, f"eval.output_dir={place / 'wrong'}")
    assert eval.main(run) == 1
    assert json.loads((place / "wrong" / "dflash.json").read_text())["methods"][1]["lossless"] == "FAILED"
    assert "NOT LOSSLESS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": {"name": "other", "fingerprint": "ab" * 32}}, "target weights other abab"),
        ({"chat_template_hash": "0123"}, "chat template 0123"),
        ({"config": {"data": {"sources": {"s": {"bucket": "x"}}, "thinking_share": {"x": 1.0}}}}, "thinking mode on"),
    ],
)
def test_a_drafter_trained_on_something_else_is_refused_naming_both_unless_told(place, change, reason, tmp_path):
    """Trap 11: thinking mode and template hash travel with the data; evaluation refuses another mode unless told."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    for file in (place / "drafter").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    record = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(UserError, match=reason):
        load_parts(make_run(place, f"eval.checkpoint={folder}"))
    assert load_parts(make_run(place, f"eval.checkpoint={folder}", "eval.allow_mismatch=true")).drafter is not None


def test_a_broken_target_ends_the_run_before_the_first_prompt(place, monkeypatch):
    from dflash_train.target import attention

    monkeypatch.setattr(attention.KVCache, "keep", lambda self, path: setattr(self, "length", self.length + len(path)))
    with pytest.raises(UserError, match="canary: commit of target tiny"):
        load_parts(make_run(place))
    assert load_parts(make_run(place, "target.canary=false")).target.spec.name == "tiny"


def test_a_drafter_of_another_shape_is_refused_before_the_target_is_loaded(place, monkeypatch):
    from dflash_train.target import tiny

    monkeypatch.setattr(tiny, "load", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(UserError, match="made for a target with hidden_size=64"):
        load_parts(make_run(place, "+target.options.hidden=32", "+target.options.head_dim=8"))
    with pytest.raises(UserError, match="mask_token_id=127"):
        load_parts(make_run(place, "target.mask_token_id=126"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("eval.checkpoint=null", "has no training run"),
        ("eval.tasks=[humanevil]", "no such task"),
        ("eval.tasks=[heldout]", "does not exist"),
        ("eval.checkpoint=/nowhere/at/all", "no such file or folder"),
    ],
)
def test_what_is_missing_is_shown_in_the_table_and_exits_2(place, override, said, capsys, monkeypatch):
    monkeypatch.setattr(log.console, "width", 500)
    with pytest.raises(SystemExit) as stop:
        eval.main(make_run(place, override, "data=demo"))
    out = capsys.readouterr().out
    assert stop.value.code == 2 and "MISSING" in out and said in out


def test_a_dry_run_checks_and_stops(place, monkeypatch):
    monkeypatch.setattr(eval, "load_parts", lambda run: pytest.fail("something was loaded"))
    with pytest.raises(SystemExit) as stop:
        eval.main(make_run(place, "dry_run=true"))
    assert stop.value.code == 0


def test_a_block_above_the_trained_one_is_refused(place):
    """Trap 24: evaluating above the trained B is refused."""
    with pytest.raises(UserError, match=r"eval\.block_size"):
        compare(load_parts(make_run(place)), [Method("dflash", block_size=7)])


def test_a_method_that_needs_a_drafter_says_so_when_none_was_loaded(place):
    parts = load_parts(make_run(place, method="autoregressive"))
    with pytest.raises(UserError, match=r"eval\.checkpoint"):
        compare(parts, [Method("dflash")])


def test_trained_modes_follow_the_recipe_of_the_training_data():
    record = lambda shares: {"config": {"data": {"sources": {"a": {"bucket": "x"}, "b": {"bucket": "y"}},
                                                 "thinking_share": shares}}}  # fmt: skip
    assert trained_modes(record({})) == {"off"} and trained_modes(record({"x": 0.5})) == {"on", "off"}
    assert trained_modes(record({"x": 1.0, "y": 1.0})) == {"on"} and trained_modes({}) == set()


def test_float32_can_be_asked_for_whatever_the_target_is_run_in(place):
    run = make_run(place, "target.dtype=bfloat16", "eval.dtype=float32")
    assert load_parts(run).target.dtype == torch.float32
    run = dataclasses.replace(run, eval=dataclasses.replace(run.eval, dtype=None))
    assert load_parts(run).target.dtype == torch.bfloat16


def test_the_command_line_runs_as_documented(place):
    task = f"file:{place / 'prompts.jsonl'}"
    command = [sys.executable, "-m", "dflash_train.eval", "--method", "ddtree", "target=tiny", "hardware=cpu",
               f"work_dir={place / 'cli'}", f"eval.checkpoint={place / 'drafter'}", "eval.max_new_tokens=16",
               "eval.budget=12", f"eval.tasks=['{task}']", "hardware.num_threads=1"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=cli.ROOT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ddtree-12" in done.stdout and "next: python -m dflash_train.export" in done.stdout
    assert len(list((place / "cli").rglob("ddtree-12.png"))) == 1


def test_methods_beside_the_main_one_are_named_and_measured_once(place):
    run = make_run(place, "eval.also=[dflash,'dflash:untrained','ddtree:16','ddtree:64']", method="ddtree")
    names = [method.name for method in methods_of(run.eval)]
    assert names == ["autoregressive", "ddtree-64", "dflash", "dflash, untrained", "ddtree-16"]
    for wrong in ("medusa", "ddtree", "ddtree:0", "dflash:upside_down"):
        with pytest.raises(UserError, match=r"eval\.also"):
            methods_of(make_run(place, f"eval.also=['{wrong}']").eval)
    with pytest.raises(UserError, match="loads no drafter"):
        methods_of(make_run(place, "eval.also=[dflash]", method="autoregressive").eval)
