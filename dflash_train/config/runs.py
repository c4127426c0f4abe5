"""One config per stage: its groups, what every stage has, and the folders that follow from it."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from omegaconf import MISSING

from dflash_train.config.checks import require
from dflash_train.config.data import DataConfig
from dflash_train.config.hardware import HardwareConfig
from dflash_train.config.models import DrafterConfig, TargetConfig
from dflash_train.config.outcome import EvalConfig, ExportConfig
from dflash_train.config.plan import AssumeConfig
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

    @property
    def dtype(self) -> str:
        """What target and drafter compute in."""
        return self.eval.dtype or self.target.dtype

    @property
    def eval_target(self) -> TargetConfig:
        """The target, in that dtype."""
        return replace(self.target, dtype=self.dtype)

    @property
    def num_prompts(self) -> int | None:
        """Prompts a task: the smaller of eval.num_prompts and limit."""
        return min((n for n in (self.eval.num_prompts, self.limit) if n is not None), default=None)

    @property
    def heldout_path(self) -> Path:
        """Held-out rows with the target's answers where there are some (those that were kept), else as mixed."""
        answered = self.answers_dir / "heldout.jsonl"
        return answered if answered.exists() else self.mix_dir / "heldout.jsonl"


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
    context: int = 4096  # tokens of the sequence being decoded
    budget: int = 64  # tree nodes beside the root
    assume: AssumeConfig = field(default_factory=AssumeConfig)

    def check(self) -> None:
        super().check()
        require(self.context > 0, "context", got=self.context, want="> 0")
        require(self.budget >= 1, "budget", got=self.budget, want=">= 1")
