"""Groups extract and store: what is captured and where it is kept."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from dflash_train.config.checks import require, require_choice


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
