"""Group assume: what `plan` can neither compute nor look up."""

from dataclasses import dataclass

from dflash_train.config.checks import require


@dataclass
class AssumeConfig:
    """Each with where its default comes from in conf/plan.yaml."""

    prompt_tokens: float = 300.0  # of tokens_per_sample, not written by the target
    extract_mfu: float = 0.75  # share of the matrix rate that capture reaches
    train_mfu: float = 0.5
    launch_s_per_layer: float = 0.0019  # a pass of this version cannot be faster: Python launches every kernel
    usd_per_gb_month: float = 0.023  # the store's price
    months: float = 1.0  # that the shards are kept

    def check(self) -> None:
        for name in ("extract_mfu", "train_mfu"):
            require(0 < getattr(self, name) <= 1, f"assume.{name}", got=getattr(self, name), want="0 < x <= 1")
        for name in ("prompt_tokens", "launch_s_per_layer", "usd_per_gb_month", "months"):
            require(getattr(self, name) >= 0, f"assume.{name}", got=getattr(self, name), want=">= 0")
