"""The command line: every group entry composes and loads, argv spellings, one-message errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dflash_train import cli
from dflash_train.config import TrainConfig
from dflash_train.util.errors import UserError

FILL = {"hf": ["target.path=some/model"], "mine": ["+data.sources.mine.path=my.jsonl"]}


def build(stage: str, *overrides: str):
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        return cli.build_run(stage, compose(stage, cli.rewrite_argv(list(overrides))))


def group_entries() -> list[tuple[str, str]]:
    entries = [(path.parent.name, path.stem) for path in cli.CONF_DIR.glob("*/*.yaml") if path.stem != "base"]
    return entries + [("data", path.stem) for path in cli.RECIPES_DIR.glob("*.yaml")]


@pytest.mark.parametrize("stage", cli.STAGES)
def test_every_stage_loads_with_its_defaults(stage):
    run = build(stage)
    assert run.stage == stage
    assert run.target.name == "qwen3_6_27b" and run.data.name == "mix914k"


@pytest.mark.parametrize("group, name", group_entries())
def test_every_group_entry_loads_in_every_stage_that_has_the_group(group, name):
    stages = [stage for stage, kind in cli.STAGES.items() if group in kind.__dataclass_fields__]
    assert stages
    for stage in stages:
        build(stage, f"{group}={name}", *FILL.get(name, []))


def test_both_spellings_of_a_group_choice_mean_the_same():
    assert build("extract", "+data=demo") == build("extract", "data=demo")


@pytest.mark.parametrize(
    "argv",
    [
        ["--local_rank=0", "train.lr=1"],
        ["train.lr=1", "--local-rank=0"],
        ["--local_rank", "0", "train.lr=1"],
        ["train.lr=1", "--local_rank", "3"],
    ],
)
def test_the_launchers_rank_argument_is_dropped_and_overrides_survive(argv):
    """Trap 36."""
    assert cli.rewrite_argv(argv) == ["train.lr=1"]


def test_method_becomes_the_eval_group():
    assert cli.rewrite_argv(["--method", "dflash", "eval.budget=3"]) == ["eval=dflash", "eval.budget=3"]
    assert build("eval", "--method=autoregressive").eval.method == "autoregressive"


def run_stage(stage: str, *argv: str) -> subprocess.CompletedProcess:
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(cli.ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", f"dflash_train.{stage}", *argv], capture_output=True, text=True, env=env, cwd=cli.ROOT
    )


@pytest.mark.parametrize(
    "argv, words",
    [
        (["train.lrr=1"], ["train.lrr"]),
        (["train.lr=fast"], ["train.lr", "fast"]),
        (["data=nope"], ["demo", "mix914k"]),
        (["eval=tree"], ["eval"]),
        (["train.loss=mse"], ["train.loss", "mse", "ce_decay"]),
        (["+store.options.colour=red"], ["store.options.colour"]),
    ],
)
def test_a_typo_is_one_message_and_exit_2(argv, words):
    """Trap 36."""
    result = run_stage("train", *argv)
    text = result.stdout + result.stderr
    assert result.returncode == 2, text
    assert "Traceback" not in text
    for word in words:
        assert word in text


def test_help_lists_every_group():
    text = run_stage("plan", "--help").stdout
    for group in cli.GROUPS:
        if group != "eval":  # plan has no eval group; `eval --help` does
            assert f"\n{group}: " in text
    assert "\neval: autoregressive, ddtree, dflash" in run_stage("eval", "--help").stdout.replace(" base,", "")


def test_values_with_special_characters_need_quotes_and_then_work():
    """Trap 36."""
    run = build("extract", 'store.root="s3://b/run=1/x"', "store=s3")
    assert run.store.root == "s3://b/run=1/x"
    with pytest.raises(Exception, match=r"mismatched|extraneous|NoViableAlt|no viable"):
        build("extract", "target.chat_template=<|mask|>")
    assert build("extract", 'target.chat_template="<|mask|>"').target.chat_template == "<|mask|>"


def test_batch_numbers_that_do_not_divide_are_refused_with_a_fix():
    """Trap 37: before any model is loaded."""
    train = TrainConfig(global_batch=7, micro_batch=2, output_dir="x")
    with pytest.raises(UserError, match=r"7 rows with micro_batch=2 on 1 rank(.|\n)*train.global_batch=8"):
        train.check_world(1)
    assert TrainConfig(global_batch=8, micro_batch=2, output_dir="x").check_world(2) == 2


def test_sources_are_a_mapping_by_name():
    run = build("mix", "data=demo", "+data.sources.mine.path=x.jsonl", "~data.sources.evals")
    assert "evals" not in run.data.sources and run.data.sources["mine"].path == "x.jsonl"


def test_a_limited_run_keeps_its_own_folders():
    assert build("extract", "data=demo", "limit=5").store_name != build("extract", "data=demo").store_name
    assert Path(build("mix", "data=demo", "limit=5").mix_dir).name == "demo-limit5"


def test_the_next_command_is_one_that_composes():
    run = build("extract", "data=demo")
    assert cli.next_command("train", run).startswith("deepspeed launch/train.py")
