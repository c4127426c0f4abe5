"""What the README says is so: its commands compose, its make targets and files exist."""

import re
import shlex

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dflash_train import cli
from dflash_train.config import DataConfig

README = (cli.ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.S)


def commands(prefix: str) -> list[str]:
    lines = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
    return [line.split(" #")[0].strip() for line in lines if line.startswith(prefix)]


def stage_commands() -> list[tuple[str, list[str]]]:
    found = []
    for line in commands("python -m dflash_train."):
        words = shlex.split(line)
        found.append((words[2].removeprefix("dflash_train."), words[3:]))
    for line in commands("deepspeed "):
        words = shlex.split(line)
        found.append(("train", words[words.index("launch/train.py") + 1 :]))
    return found


def test_the_readme_shows_every_stage():
    assert {stage for stage, _ in stage_commands()} == set(cli.STAGES)


@pytest.mark.parametrize("stage, argv", stage_commands(), ids=lambda value: value if isinstance(value, str) else None)
def test_a_readme_command_composes_and_loads(stage, argv):
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        assert cli.build_run(stage, compose(stage, cli.rewrite_argv(argv, stage))).stage == stage


def test_the_readmes_recipe_loads_as_it_stands():
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.S)
    data = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.create(block)))
    data.check()
    assert data.sources["code"].kind == "hub" and data.sources["tickets"].form == "auto"


def test_the_readmes_make_targets_exist():
    makefile = (cli.ROOT / "Makefile").read_text("utf-8")
    targets = [shlex.split(line)[1] for line in commands("make ")]
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_files_that_the_readme_names_exist():
    named = re.findall(r"`((?:dflash_train|conf|launch|data_recipes|benchmarks|tests)/[\w./-]+)`", README)
    tree = re.search(r"## Where things are\n+```\n(.*?)```", README, re.S)[1]
    named += re.findall(r"^([\w./-]+)", tree, re.M)
    named += re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert len(named) > 10
    for name in named:
        assert (cli.ROOT / name).exists(), name


def test_every_result_row_has_hardware_commit_and_command():
    section = re.search(r"## Results\n(.*?)\n## ", README, re.S)[1]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        assert len([cell for cell in row.strip("|").split("|") if cell.strip()]) >= 5, row
