"""Typed run configs, one dataclass per group and per stage, and the checks that need nothing but the config itself.

Not frozen, since OmegaConf merges into them; nobody changes them after `cli.py` has built them.
`options` holds what one plug-in alone has: `cli.py` checks it against that plug-in's `Options`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from dflash_train.util.errors import UserError


def require(ok: bool, name: str, *, got: object, want: object, fix: str | None = None) -> None:
    """Raise UserError for config key `name` unless ok."""
    if not ok:
        raise UserError(name, got=got, want=want, fix=fix)


def require_choice(value: str, choices: tuple[str, ...], name: str) -> None:
    require(value in choices, name, got=value, want=" | ".join(choices))


# ---------------------------------------------------------------- data


@dataclass
class SourceConfig:
    """One source of the mix. kind: how it is reached (a key of data.SOURCES); form: what its rows look like."""

    kind: str = "files"
    path: str | None = None  # file, folder or glob (files); data set id (hub)
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    form: str = "auto"  # a form of data/forms.py; `mix` refuses others, so that a recipe loads before its forms exist
    license: str = "unknown"
    bucket: str = "chat"
    take: int | None = None  # rows after filters; null = all
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class SamplingConfig:
    """How the target answers in one thinking mode."""

    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20


@dataclass
class AnswersConfig:
    """Regeneration: the target answers the mix."""

    max_new_tokens: int = 4096
    batch_size: int = 64
    greedy_share: float = 0.1
    max_repetition: float = 0.5  # drop an answer in which more than this share of 8-grams repeats
    off: SamplingConfig = field(default_factory=SamplingConfig)
    on: SamplingConfig = field(default_factory=lambda: SamplingConfig(1.0, 0.95, 20))


@dataclass
class DataConfig:
    """A recipe: data_recipes/<name>.yaml."""

    name: str = MISSING
    seed: int = 0
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    total: int | None = None  # refuse a mix of another size, unless allow_short
    allow_short: bool = False
    strict: bool = False  # stop at the first bad row instead of counting it
    heldout_fraction: float = 0.005  # per source, by stable hash, before anything is taken
    thinking_share: dict[str, float] = field(default_factory=dict)  # by bucket; absent = 0
    min_prompt_chars: int = 1
    max_prompt_chars: int = 100_000
    turns: str = "one"  # one | all assistant turns of a conversation
    decontaminate: list[str] = field(default_factory=lambda: ["humaneval", "gsm8k", "mtbench"])
    answers: AnswersConfig = field(default_factory=AnswersConfig)

    def check(self) -> None:
        require(bool(self.sources), "data.sources", got="{}", want="at least one source",
                fix="+data.sources.mine.path=my.jsonl")  # fmt: skip
        require(0 <= self.heldout_fraction < 1, "data.heldout_fraction", got=self.heldout_fraction, want="0 <= x < 1")
        require_choice(self.turns, ("one", "all"), "data.turns")
        for name, source in self.sources.items():
            key = f"data.sources.{name}"
            require(source.take is None or source.take >= 0, f"{key}.take", got=source.take, want=">= 0 or null")
            require(bool(source.path) or source.kind not in ("files", "hub"), f"{key}.path", got="nothing",
                    want="a file, folder or glob (kind files), or a data set id (kind hub)",
                    fix=f"{key}.path=my.jsonl")  # fmt: skip
        for bucket, share in self.thinking_share.items():
            require(0 <= share <= 1, f"data.thinking_share.{bucket}", got=share, want="0..1")
        answers = self.answers
        require(answers.max_new_tokens > 1, "data.answers.max_new_tokens", got=answers.max_new_tokens, want="> 1")
        require(answers.batch_size > 0, "data.answers.batch_size", got=answers.batch_size, want="> 0")


# ---------------------------------------------------------------- target, drafter


@dataclass
class TargetConfig:
    """The frozen model. The sizes serve `plan` before anything is downloaded; a loaded model must agree with them."""

    name: str = MISSING
    kind: str = MISSING
    path: str | None = None  # local folder or hub id
    revision: str | None = None
    dtype: str = "bfloat16"  # bfloat16 | float32
    mask_token_id: int | None = None  # a real embedding row that never occurs in text
    chat_template: str | None = None  # path of a Jinja file; null = the tokenizer's own
    trust_remote_code: bool = False
    num_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_parameters: int | None = None
    max_context: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        require_choice(self.dtype, ("bfloat16", "float32"), "target.dtype")


@dataclass
class DrafterConfig:
    """Shape and semantics of a drafter. null = follow the target (`resolve_drafter`)."""

    name: str = MISSING
    kind: str = "dflash"
    num_layers: int = 5
    block_size: int = 16
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    layer_types: list[str] | None = None  # full_attention | sliding_attention per layer; null = all full
    sliding_window: int | None = None
    is_causal: bool | None = None  # null = per layer: full bidirectional, sliding causal
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    max_position_embeddings: int | None = None
    initializer_range: float = 0.02
    # Facts of the target it is for:
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    vocab_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        require(self.block_size >= 2, "drafter.block_size", got=self.block_size, want=">= 2 (slot 0 is the anchor)")
        require(self.num_layers >= 1, "drafter.num_layers", got=self.num_layers, want=">= 1")
        types = self.layer_types or ["full_attention"] * self.num_layers
        require(len(types) == self.num_layers, "drafter.layer_types", got=f"{len(types)} entries",
                want=f"{self.num_layers}, one per layer")  # fmt: skip
        for kind in types:
            require_choice(kind, ("full_attention", "sliding_attention"), "drafter.layer_types")
        if "sliding_attention" in types:
            require(bool(self.sliding_window), "drafter.sliding_window", got=self.sliding_window,
                    want="a window, since layer_types has sliding_attention")  # fmt: skip
        if self.num_heads and self.num_kv_heads:
            require(self.num_heads % self.num_kv_heads == 0, "drafter.num_heads", got=self.num_heads,
                    want=f"a multiple of drafter.num_kv_heads={self.num_kv_heads}")  # fmt: skip


# ---------------------------------------------------------------- extract, store


@dataclass
class ExtractConfig:
    """Capture. layer_ids null = the formula with num_taps."""

    layer_ids: list[int] | None = None
    num_taps: int = 5
    max_tokens: int = 4096  # longer samples are cut there (counted)
    batch_tokens: int = 16384  # padded tokens per forward
    window_samples: int = 4096  # length bucketing happens inside windows of this many samples
    verify: bool = False  # only re-check the store

    def check(self) -> None:
        require(self.batch_tokens >= self.max_tokens, "extract.batch_tokens", got=self.batch_tokens,
                want=f">= extract.max_tokens={self.max_tokens}")  # fmt: skip
        require(self.window_samples > 0, "extract.window_samples", got=self.window_samples, want="> 0")


@dataclass
class StoreConfig:
    """Where shards live: <root>/<data>-<target>/."""

    kind: str = MISSING
    root: str = MISSING  # folder, or s3://bucket/prefix
    dtype: str = "bfloat16"  # of hidden rows
    last_hidden: bool = False  # also the last state after the final norm (for loss=kl)
    shard_bytes: int = 1 << 30
    max_bytes: int | None = None  # null = 80 % of free disk (local), 1 TB (s3)
    staging_dir: str | None = None  # null = /dev/shm where it is large enough, else the system's temporary folder
    cache_dir: str | None = None  # downloaded shards; null = <work_dir>/cache
    cache_bytes: int = 50_000_000_000
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        require_choice(self.dtype, ("bfloat16", "float32"), "store.dtype")
        require(self.shard_bytes > 0, "store.shard_bytes", got=self.shard_bytes, want="> 0")


# ---------------------------------------------------------------- train


@dataclass
class WandbConfig:
    """mode auto = online with a key in the environment, else offline."""

    mode: str = "auto"  # auto | online | offline | disabled
    project: str = "dflash_train"
    name: str | None = None


@dataclass
class TrainConfig:
    """The optimizer's view. One row = row_tokens packed tokens; global_batch rows make one step."""

    seed: int = 0  # of the initial weights, the order and the anchors
    loss: str = "ce_decay"  # ce_decay | dpace | kl
    gamma: float | None = None  # of ce_decay; null = 7 / 5 / 4 for block_size 16 / 10 / 8, else block_size / 2
    dpace_alpha: float = 0.5
    epochs: float = 6.0
    max_steps: int | None = None  # stops earlier and shortens the schedule
    global_batch: int = 64
    micro_batch: int = 1
    row_tokens: int = 4096
    long_samples: str = "error"  # error | cut, for samples over row_tokens
    num_anchors: int = 512  # per row
    lr: float = 6e-4
    min_lr_ratio: float = 0.0
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    dtype: str = "bfloat16"  # compute; masters are always float32
    head_chunk_blocks: int = 128  # whole blocks per head chunk; bounds the logits in memory
    attention: str = "auto"  # auto | sdpa | flex
    init_from: str | None = None
    output_dir: str = MISSING
    resume: str = "auto"  # auto | never
    save_every: int = 200
    keep_checkpoints: int = 2
    log_every: int = 10
    eval_every: int = 200
    eval_samples: int = 64
    max_minutes: float | None = None  # stop at the next window end after this long; the schedule follows the clock
    prefetch_rows: int = 16
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def check(self) -> None:
        require_choice(self.loss, ("ce_decay", "dpace", "kl"), "train.loss")
        require_choice(self.dtype, ("bfloat16", "float32"), "train.dtype")
        require_choice(self.resume, ("auto", "never"), "train.resume")
        require_choice(self.long_samples, ("error", "cut"), "train.long_samples")
        require_choice(self.attention, ("auto", "sdpa", "flex"), "train.attention")
        for name in ("global_batch", "micro_batch", "row_tokens", "num_anchors", "head_chunk_blocks", "save_every",
                     "keep_checkpoints", "log_every", "eval_every", "prefetch_rows"):  # fmt: skip
            require(getattr(self, name) > 0, f"train.{name}", got=getattr(self, name), want="> 0")
        require(0 <= self.warmup_ratio < 1, "train.warmup_ratio", got=self.warmup_ratio, want="0 <= x < 1")
        require(self.lr > 0, "train.lr", got=self.lr, want="> 0")

    def check_world(self, world_size: int) -> int:
        """Micro-batches per rank and step. Refuses numbers that do not divide, before any model is loaded."""
        per_pass = self.micro_batch * world_size
        require(self.global_batch % per_pass == 0, "train.global_batch",
                got=f"{self.global_batch} rows with micro_batch={self.micro_batch} on {world_size} rank(s)",
                want=f"a multiple of {per_pass}",
                fix=f"train.global_batch={-(-self.global_batch // per_pass) * per_pass}")  # fmt: skip
        return self.global_batch // per_pass


@dataclass
class ZeroConfig:
    """DeepSpeed ZeRO."""

    stage: int = 1

    def check(self) -> None:
        require(self.stage in (1, 2, 3), "zero.stage", got=self.stage, want="1 | 2 | 3")


# ---------------------------------------------------------------- eval, export, hardware


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


@dataclass
class HardwareConfig:
    """Which device this process uses."""

    device: str = "auto"  # auto | cpu | cuda
    num_threads: int | None = None  # CPU threads; null = all

    def check(self) -> None:
        require_choice(self.device, ("auto", "cpu", "cuda"), "hardware.device")


# ---------------------------------------------------------------- runs


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
