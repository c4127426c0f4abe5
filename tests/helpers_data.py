"""What the data tests share: recipes from plain dicts, rows to files, a mix in memory, package wheels that need no
index."""

import json
from dataclasses import asdict
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dflash_train import cli
from dflash_train.bench.contamination import evaluation_facts
from dflash_train.config import DataConfig, Run, SourceConfig
from dflash_train.data.clean import Drop, clean_messages
from dflash_train.data.forms import RawRow
from dflash_train.data.mixture import Mix, build_mix
from dflash_train.data.recipe import read_source
from dflash_train.data.staleness import made_of

FIXTURES = Path(__file__).parent / "fixtures" / "data"


def recipe(sources: dict[str, dict], **values) -> DataConfig:
    """A typed DataConfig of the given sources, nothing decontaminated unless asked for."""
    plain = {"name": "test", "decontaminate": [], "heldout_fraction": 0.0, "num_processes": 1, **values}
    plain["sources"] = sources
    data = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.create(plain)))
    data.check()
    return data


def make_run(tmp_path: Path, *overrides: str, stage: str = "mix") -> Run:
    """A typed run the way the command line builds it, `+data=` spellings included."""
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        cfg = compose(stage, cli.rewrite_argv([*overrides, f"work_dir={tmp_path / 'runs'}"]))
    return cli.build_run(stage, cfg)


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def prompts(count: int, word: str = "question", start: int = 0) -> list[dict]:
    return [{"id": f"{word}{i}", "prompt": f"{word} number {i}, please?"} for i in range(start, start + count)]


def read_all(path: Path, kind: str = "files", form: str = "auto", **options) -> list[RawRow]:
    config = SourceConfig(kind=kind, path=str(path), form=form, options=options)
    return list(read_source("mine", config, recipe({"mine": {"path": str(path)}})))


def outcome(raw: RawRow) -> str | list[dict]:
    """The drop reason of a row, or its clean messages."""
    try:
        return raw.drop or clean_messages(raw.messages)
    except Drop as drop:
        return drop.reason


def mixed(
    data: DataConfig, workspace: Path, evaluation: dict | None = None, limit: int | None = None
) -> tuple[list, list, Mix]:
    """(train rows, held-out rows, the mix)."""
    workspace.mkdir(parents=True, exist_ok=True)
    mix = build_mix(data, evaluation or {}, workspace, limit=limit)
    return list(mix.rows("train")), list(mix.rows("heldout")), mix


def fake_wheel(cache: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Put an unzipped wheel where fetch_wheel looks first."""
    for relative, text in files.items():
        path = cache / "wheels" / f"{name}-{version}" / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def mix_manifest(data: DataConfig) -> dict:
    """A manifest of a mix of these sources, as far as later stages and the card read it, that counted nothing."""
    zero = dict.fromkeys(("read", "not_needed", "kept"), 0)
    none = {key: {} for key in ("skipped", "dropped", "lost", "filtered", "repaired", "contaminated")}
    written = {"train": 0, "heldout": 0}
    facts = lambda source: {"kind": source.kind, "license": source.license, "bucket": source.bucket,
                            "revision": None, "wanted": source.take, **zero, **none, "written": written}  # fmt: skip
    return {
        "recipe": data.name,
        "recipe_hash": "0",
        "seed": data.seed,
        "code_version": "0",
        "limit": None,
        "config": {"data": asdict(data)},
        "made_of": made_of(data, None, evaluation_facts(data.decontaminate)),
        "sources": {name: facts(source) for name, source in data.sources.items()},
        **{
            key: {}
            for key in ("dropped", "duplicates", "near_duplicates", "contamination", "evaluation_commits", "files")
        },
        "evaluation_items": {},
        "evaluation_wrappers": 0,
    }
