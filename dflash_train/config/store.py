"""Groups extract and store: what is captured and where it is kept."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from dflash_train.config.checks import require, require_choice


@dataclass
class MonitorConfig:
    """The page that shows a running extraction. It has no password: leave it on localhost and tunnel."""

    enabled: bool = False
    host: str = "127.0.0.1"
    port: int = 8321  # taken: the next free one; 0 = any

    def check(self) -> None:
        require(0 <= self.port < 65536, "extract.monitor.port", got=self.port, want="0..65535")


@dataclass
class ExtractConfig:
    """Capture. layer_ids null = the formula with num_taps. What is below `verify` decides no content of the
    store."""

    layer_ids: list[int] | None = None
    num_taps: int = 5
    max_tokens: int = 4096  # longer samples are cut there (counted)
    batch_tokens: int = 16384  # padded tokens per forward
    window_samples: int = 4096  # length bucketing happens inside windows of this many samples
    verify: bool = False  # only re-check the store
    reopen: bool = False  # with verify: bad shards lose their markers, so that the next run redoes them
    clean: bool = False  # only show what this run has left in the store, ask, and delete that
    yes: bool = False  # with clean: do not ask
    num_workers: int | None = None  # processes that capture; null = one per visible GPU (or group), 0 = none but this
    gpus_per_worker: int = 1  # more: they share out the target's heads (tensor parallel); rows differ by rounding
    max_restarts: int = 3  # of each worker; the same number of deaths condemns a shard
    hang_s: float = 900.0  # a worker with a shard in hand that says nothing for so long is killed
    load_s: float = 3600.0  # a worker that takes longer to load the target is killed
    stop_s: float = 60.0  # after SIGTERM or Ctrl-C: so long to finish batches and write files, and so long to upload
    lease_s: float = 60.0  # a host without a sign of life for so long loses its claims to the others
    monitor: MonitorConfig = field(default_factory=MonitorConfig)

    def check(self) -> None:
        require(self.batch_tokens >= self.max_tokens, "extract.batch_tokens", got=self.batch_tokens,
                want=f">= extract.max_tokens={self.max_tokens}")  # fmt: skip
        require(self.verify or not self.reopen, "extract.reopen", got="without extract.verify=true", want="both")
        require(not (self.verify and self.clean), "extract.clean", got="with extract.verify=true", want="one of them")
        require(self.window_samples > 0, "extract.window_samples", got=self.window_samples, want="> 0")
        require(self.num_workers is None or self.num_workers >= 0, "extract.num_workers", got=self.num_workers,
                want=">= 0, or null for one per visible GPU")  # fmt: skip
        require(self.gpus_per_worker >= 1, "extract.gpus_per_worker", got=self.gpus_per_worker, want=">= 1")
        require(self.max_restarts >= 0, "extract.max_restarts", got=self.max_restarts, want=">= 0")
        for key in ("hang_s", "load_s", "stop_s", "lease_s"):
            require(vars(self)[key] > 0, f"extract.{key}", got=vars(self)[key], want="> 0")
        self.monitor.check()


@dataclass
class StoreConfig:
    """Where shards live: <root>/<data>-<target>/."""

    kind: str = MISSING
    root: str = MISSING  # folder, or s3://bucket/prefix
    dtype: str = (
        "bfloat16"  # of hidden rows: bfloat16 | float32 | fp8 (e4m3, a scale per token and layer: half the bytes)
    )
    last_hidden: bool = False  # also the last state after the final norm (for loss=kl); bfloat16 in an fp8 store
    shard_bytes: int = 1 << 30
    max_bytes: int | None = None  # null = 80 % of free disk (local), 1 TB (s3)
    upload_threads: int = 4  # shards on their way at once
    staging_dir: str | None = None  # null = /dev/shm where it is large enough, else the system's temporary folder
    cache_dir: str | None = None  # downloaded shards; null = <work_dir>/cache
    cache_bytes: int = 50_000_000_000
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        require_choice(self.dtype, ("bfloat16", "float32", "fp8"), "store.dtype")
        require(self.upload_threads > 0, "store.upload_threads", got=self.upload_threads, want="> 0")
        require(self.shard_bytes > 0, "store.shard_bytes", got=self.shard_bytes, want="> 0")
