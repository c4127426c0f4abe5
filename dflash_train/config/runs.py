"""One config per stage: its groups, what every stage has, and the folders that follow from it."""

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from dflash_train.config.checks import require
from dflash_train.config.data import DataConfig
from dflash_train.config.models import DrafterConfig, HardwareConfig, TargetConfig
from dflash_train.config.outcome import EvalConfig, ExportConfig
from dflash_train.config.store import ExtractConfig, StoreConfig
from dflash_train.config.train import TrainConfig, ZeroConfig


@dataclass
class Run:
    """What every stage has. limit: at most N samples (per task in eval); such a run keeps its own folders."""

    stage: str = MISSING
    run_dir: str = MISSING
    work_dir: str = "runs"
    dry_run: bool = False
    limit: int | None = None
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    data: DataConfig = field(default_factory=DataConfig)
    target: TargetConfig = field(default_factory=TargetConfig)

    def check(self) -> None:
        """Every group's own checks."""
        require(self.limit is None or self.limit > 0, "limit", got=self.limit, want="> 0 or null")
        for value in vars(self).values():
            if hasattr(value, "check"):
                value.check()

    @property
    def limit_suffix(self) -> str:
        return f"-limit{self.limit}" if self.limit else ""

    @property
    def mix_dir(self) -> Path:
        """prompts.jsonl, heldout.jsonl, manifest.json of `mix`."""
        return Path(self.work_dir, "data", f"{self.data.name}{self.limit_suffix}")

    @property
    def answers_dir(self) -> Path:
        """samples.jsonl, heldout.jsonl, manifest.json of `regenerate`."""
        return self.mix_dir / f"answers-{self.target.name}"

    @property
    def store_name(self) -> str:
        """The store's prefix under its root."""
        return f"{self.data.name}-{self.target.name}{self.limit_suffix}"


@dataclass
class MixRun(Run):
    pass


@dataclass
class RegenerateRun(Run):
    pass


@dataclass
class ExtractRun(Run):
    extract: ExtractConfig = field(default_factory=ExtractConfig)
    store: StoreConfig = field(default_factory=StoreConfig)


@dataclass
class TrainRun(Run):
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)


@dataclass
class EvalRun(Run):
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoints_dir: str = "checkpoints"


@dataclass
class ExportRun(Run):
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    checkpoints_dir: str = "checkpoints"


@dataclass
class PlanRun(Run):
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    extract: ExtractConfig = field(default_factory=ExtractConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    samples: int | None = None  # null = what the mix has, or the recipe's total
    tokens_per_sample: float = 1800.0
