"""Groups eval and export: how a drafter is measured and for whom it is written."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from dflash_train.config.checks import require, require_choice


@dataclass
class EvalConfig:
    """How acceptance is measured."""

    method: str = MISSING  # autoregressive | dflash | ddtree
    checkpoint: str | None = None  # exported folder, *.safetensors or training checkpoint; null = newest
    block_size: int | None = None  # below the trained one caps the draft; above is refused
    budget: int = 64  # ddtree: nodes beside the root
    tasks: list[str] = field(default_factory=lambda: ["humaneval", "gsm8k", "mtbench"])
    num_prompts: int | None = None  # per task, seeded choice; null = all
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    accept: str = "sample"  # sample: follow the target's sample | rejection: chains only
    thinking: str = "off"
    dtype: str | None = None  # null = target.dtype
    seed: int = 0
    baseline: bool = True  # also run autoregressive: speedup and losslessness
    max_margin: float = 0.25  # a first difference at a larger logit margin fails the run
    ablate: str = "none"  # none | shuffle_features | untrained
    also: list[str] = field(default_factory=list)  # more methods on the same prompts: dflash:untrained, ddtree:16, ...
    replay: bool = False  # acceptance only, many times faster: rounds replayed on answers written in batches
    replay_batch_size: int = 32
    allow_mismatch: bool = False  # also with another target's weights, template or thinking mode than it was trained on
    output_dir: str | None = None

    def check(self) -> None:
        require_choice(self.method, ("autoregressive", "dflash", "ddtree"), "eval.method")
        require_choice(self.accept, ("sample", "rejection"), "eval.accept")
        require_choice(self.ablate, ("none", "shuffle_features", "untrained"), "eval.ablate")
        require_choice(self.thinking, ("on", "off"), "eval.thinking")
        require(self.temperature >= 0, "eval.temperature", got=self.temperature, want=">= 0")
        require(0 < self.top_p <= 1, "eval.top_p", got=self.top_p, want="0 < x <= 1")
        require(self.top_k >= 0, "eval.top_k", got=self.top_k, want=">= 0 (0 = off)")
        require(self.budget >= 1, "eval.budget", got=self.budget, want=">= 1")
        require(self.max_new_tokens >= 2, "eval.max_new_tokens", got=self.max_new_tokens, want=">= 2")
        require(not (self.accept == "rejection" and self.method == "ddtree"), "eval.accept",
                got="rejection with ddtree", want="sample (rejection is defined for chains)")  # fmt: skip
        require(not (self.replay and self.accept == "rejection"), "eval.replay", got="true with accept=rejection",
                want="accept=sample (rejection draws its tokens while it verifies)")  # fmt: skip
        require(not (self.replay and self.method == "autoregressive"), "eval.replay", got="true with autoregressive",
                want="a drafting method: there is nothing to replay")  # fmt: skip
        require(self.replay_batch_size >= 1, "eval.replay_batch_size", got=self.replay_batch_size, want=">= 1")


@dataclass
class ExportConfig:
    """What to write for whom."""

    format: str = "zlab"  # zlab | vllm | sglang | speculators
    checkpoint: str | None = None
    output_dir: str | None = None
    dtype: str = "bfloat16"

    def check(self) -> None:
        require_choice(self.format, ("zlab", "vllm", "sglang", "speculators"), "export.format")
        require_choice(self.dtype, ("bfloat16", "float32"), "export.dtype")
