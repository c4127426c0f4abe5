"""The demo's commands compose and load, on a CPU and on a GPU, and each stage reads where the one before wrote."""

import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dflash_train import cli

sys.path.insert(0, str(cli.ROOT / "launch"))


@pytest.mark.parametrize("gpu", [False, True])
def test_the_demos_commands_compose_and_follow_one_another(gpu, monkeypatch):
    import demo

    monkeypatch.setenv("DFLASH_STORE", "s3://bucket/store")
    cli.register_recipes()
    runs = {}
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        for title, overrides in demo.settings(gpu, Path("work"), Path("checkpoints")).items():
            stage = title.split(",")[0]
            method = ["--method", "dflash"] if stage == "eval" else []
            runs[title] = cli.build_run(stage, compose(stage, cli.rewrite_argv([*method, *overrides])))
    assert len({run.answers_dir for run in runs.values()}) == 1
    assert runs["extract"].store_name == runs["train"].store_name
    trained = runs["train"].train.output_dir + runs["train"].limit_suffix
    assert runs["eval"].eval.checkpoint == runs["export"].export.checkpoint == f"{trained}/best"
    replayed, decoded = runs["eval, replayed"].eval, runs["eval"].eval
    assert replayed.replay and not decoded.replay and replayed.checkpoint == decoded.checkpoint
    assert replayed.num_prompts > decoded.num_prompts and replayed.output_dir != decoded.output_dir
    assert runs["train"].train.loss == "ce_decay" and runs["train"].store.kind == "s3"
