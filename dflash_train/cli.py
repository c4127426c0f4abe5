"""Hydra glue: absolute conf path, argv spellings, typed config with plug-in options, one-message errors, next
command."""

import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflash_train import config as configs
from dflash_train.util.errors import UserError
from dflash_train.util.log import say
from dflash_train.util.plugins import plugin

ROOT = Path(__file__).resolve().parents[1]
CONF_DIR = ROOT / "conf"
RECIPES_DIR = ROOT / "data_recipes"
STAGES = {
    "mix": configs.MixRun,
    "regenerate": configs.RegenerateRun,
    "extract": configs.ExtractRun,
    "train": configs.TrainRun,
    "eval": configs.EvalRun,
    "export": configs.ExportRun,
    "plan": configs.PlanRun,
}
STORE_ERRANDS = ("verify", "reopen", "clean", "yes")
"""Keys of the extract group that the extract stage also takes without its name."""
GROUPS = ("data", "target", "drafter", "extract", "store", "train", "zero", "eval", "hardware")


def stage_command(stage: str) -> str:
    """How a person starts the stage."""
    return "deepspeed launch/train.py" if stage == "train" else f"python -m dflash_train.{stage}"


def rewrite_argv(argv: list[str], stage: str = "") -> list[str]:
    """Turn what people and launchers type into what Hydra takes.

    Drops deepspeed's --local_rank in every spelling, turns `--method X` into `eval=X`, and `+group=x` into `group=x`
    for groups that are already in the defaults list (both spellings are documented); `extract verify=true` is
    `extract.verify=true`, and so are the other things to do with a store.
    """
    out, i = [], 0
    while i < len(argv):
        word = argv[i]
        if re.fullmatch(r"--local[_-]rank", word):
            i += 2
            continue
        if re.fullmatch(r"--local[_-]rank=.*", word):
            i += 1
            continue
        if word == "--method":
            if i + 1 >= len(argv):
                raise UserError("--method", got="nothing", want="autoregressive | dflash | ddtree")
            out.append(f"eval={argv[i + 1]}")
            i += 2
            continue
        if word.startswith("--method="):
            word = "eval=" + word.removeprefix("--method=")
        if stage == "extract" and word.split("=")[0] in STORE_ERRANDS:
            word = f"extract.{word}"
        match = re.fullmatch(r"\+(\w+)=(.*)", word)
        out.append(f"{match[1]}={match[2]}" if match and match[1] in GROUPS else word)
        i += 1
    return out


def register_recipes() -> None:
    """Every data_recipes/<name>.yaml is `data=<name>`, filled up with DataConfig's defaults so that any key of it can
    be set."""
    defaults = OmegaConf.to_container(OmegaConf.structured(configs.DataConfig))
    for path in sorted(RECIPES_DIR.glob("*.yaml")):
        node = OmegaConf.merge(defaults, OmegaConf.load(path))
        ConfigStore.instance().store(group="data", name=path.stem, node=node)


def _typed_options(node, table: dict[str, str], field: str) -> None:
    """Second typed pass: `options` merged into the plug-in's Options, so an unknown key fails by its full name.

    A module with several small plug-ins has OPTIONS by kind instead of one Options.
    """
    module = plugin(table, node.kind, f"{field}.kind")
    schema = OmegaConf.structured(module.OPTIONS[node.kind] if hasattr(module, "OPTIONS") else module.Options)
    try:
        merged = OmegaConf.merge(schema, node.options)
        node.options = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _config_error(error, prefix=f"{field}.options.") from None


def _config_error(error: OmegaConfBaseException, prefix: str = "") -> UserError:
    key = error.full_key or error.key or "?"
    first = str(error).strip().splitlines()[0]
    known = ""
    if getattr(error, "object_type", None) is not None and hasattr(error.object_type, "__dataclass_fields__"):
        known = ", ".join(error.object_type.__dataclass_fields__)
    return UserError(f"{prefix}{key}", got=first, want=f"one of: {known}" if known else None)


def build_run(stage: str, cfg: DictConfig) -> configs.Run:
    """Composed Hydra config -> typed, checked run config. Raises UserError naming the full key."""
    from dflash_train.data import SOURCES
    from dflash_train.drafter import DRAFTERS
    from dflash_train.store import STORES
    from dflash_train.target import TARGETS

    try:
        run = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(STAGES[stage]), cfg))
    except OmegaConfBaseException as error:
        raise _config_error(error) from None
    run.check()
    for field, table in (("target", TARGETS), ("store", STORES), ("drafter", DRAFTERS)):
        if hasattr(run, field):
            _typed_options(getattr(run, field), table, field)
    for name, source in run.data.sources.items():
        _typed_options(source, SOURCES, f"data.sources.{name}")
    return run


def next_command(stage: str, run: configs.Run, **changes: str) -> str:
    """The command to type next, with those of this command's overrides that the next stage also has."""
    fields = STAGES[stage].__dataclass_fields__
    try:
        typed = list(HydraConfig.get().overrides.task)
    except ValueError:  # not started by Hydra (tests, one stage calling another)
        typed = []
    keep = []
    for text in typed:
        key = re.match(r"[~+]*([\w.]+)", text)[1]
        if key.split(".")[0] in fields and key not in changes and key not in ("dry_run", "run_dir"):
            keep.append(shlex.quote(text))
    keep += [f"{key}={value}" for key, value in changes.items()]
    return " ".join([stage_command(stage), *keep])


def config_dict(run: configs.Run) -> dict:
    """The resolved config as plain dicts, for provenance."""
    return asdict(run)


def main(stage: str, body: Callable[[configs.Run], int | None]) -> None:
    """Run a stage as a command. Exit codes: 0 done, 1 failed on the way and may go on, 2 refused."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    register_recipes()

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=stage)
    def entry(cfg: DictConfig) -> None:
        try:
            code = body(build_run(stage, cfg))
        except UserError as error:  # here, not outside: Hydra would print a traceback first
            _fail(str(error), error.exit_code)
        if code:
            sys.exit(code)

    try:
        sys.argv[1:] = rewrite_argv(sys.argv[1:], stage)
        entry()
    except UserError as error:
        _fail(str(error))
    except hydra.errors.HydraException as error:
        _fail(f"{error}{_known_keys(stage, str(error))}")
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)


def _known_keys(stage: str, message: str) -> str:
    """For Hydra's "Could not override 'a.b'": what a has."""
    match = re.search(r"Could not override '([\w.]+)'", message)
    if not match or "." not in match[1]:
        return ""
    parent = match[1].rpartition(".")[0]
    node = OmegaConf.select(OmegaConf.structured(STAGES[stage]), parent)
    return f"\n{parent} has: {', '.join(node.keys())}" if isinstance(node, DictConfig) and len(node) else ""


def _fail(message: str, exit_code: int = 2) -> None:
    print(f"\n{message}", file=sys.stderr, flush=True)
    sys.exit(exit_code)
