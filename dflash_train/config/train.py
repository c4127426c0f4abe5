"""Groups train and zero: the objective, the optimizer, and how training is watched and sharded."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from dflash_train.config.checks import require, require_choice


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
    head_chunk_blocks: int = 256  # whole blocks per head chunk; bounds the logits in memory
    attention: str = "auto"  # auto | sdpa | flex
    kernels: str = "auto"  # auto | fused | torch: between matrix products; fused = Triton, on CUDA alone
    activation_checkpointing: bool = False  # a quarter of the activations for a third more work
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
        require_choice(self.kernels, ("auto", "fused", "torch"), "train.kernels")
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
