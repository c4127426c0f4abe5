"""Typed run configs, one dataclass per group and per stage, and the checks that need nothing but the config itself.

Not frozen, since OmegaConf merges into them; nobody changes them after `cli.py` has built them.
`options` holds what one plug-in alone has: `cli.py` checks it against that plug-in's `Options`.
"""

from dflash_train.config.checks import require, require_choice
from dflash_train.config.data import (
    AnswersConfig,
    ClientConfig,
    DataConfig,
    NearDuplicatesConfig,
    QualityConfig,
    SamplingConfig,
    SourceConfig,
)
from dflash_train.config.hardware import SPREAD_ABOVE, HardwareConfig
from dflash_train.config.models import DrafterConfig, TargetConfig, TargetShape
from dflash_train.config.outcome import EvalConfig, ExportConfig
from dflash_train.config.plan import AssumeConfig
from dflash_train.config.runs import (
    EvalRun,
    ExportRun,
    ExtractRun,
    MixRun,
    PlanRun,
    RegenerateRun,
    Run,
    TrainRun,
)
from dflash_train.config.store import ExtractConfig, MonitorConfig, StoreConfig
from dflash_train.config.train import TrainConfig, WandbConfig, ZeroConfig

__all__ = [
    "SPREAD_ABOVE",
    "AnswersConfig",
    "AssumeConfig",
    "ClientConfig",
    "DataConfig",
    "DrafterConfig",
    "EvalConfig",
    "EvalRun",
    "ExportConfig",
    "ExportRun",
    "ExtractConfig",
    "ExtractRun",
    "HardwareConfig",
    "MixRun",
    "MonitorConfig",
    "NearDuplicatesConfig",
    "PlanRun",
    "QualityConfig",
    "RegenerateRun",
    "Run",
    "SamplingConfig",
    "SourceConfig",
    "StoreConfig",
    "TargetConfig",
    "TargetShape",
    "TrainConfig",
    "TrainRun",
    "WandbConfig",
    "ZeroConfig",
    "require",
    "require_choice",
]
