"""How much a store will take, said before anything is loaded, and refused when it is too much."""

from dflash_train.config import StoreConfig
from dflash_train.store.base import ObjectStore
from dflash_train.store.gather import RowLayout
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes

S3_BYTES = 1_000_000_000_000
DISK_SHARE = 0.8
TOKEN_BYTES = 5
"""token id (int32) and loss mask (uint8) beside the hidden rows."""


def row_bytes(hidden_size: int, num_layers: int, store: StoreConfig) -> int:
    """Bytes of hidden rows one token takes: the captured layers, and the last hidden state where it is stored."""
    return RowLayout.of(hidden_size, num_layers, store).row_bytes


def storage_line(hidden_size: int, num_layers: int, store: StoreConfig, num_samples: int, num_tokens: int) -> str:
    """The arithmetic in words: 'hidden 4096 x 5 layers x 2 B = 40.96 KB a token; ... = 37.4 TB'."""
    per_token = row_bytes(hidden_size, num_layers, store)
    total = per_token * num_tokens
    last = " + last hidden" if store.last_hidden else ""
    return (
        f"hidden {hidden_size} x {num_layers} layers{last} x {store.dtype} = {per_token / 1000:,.2f} KB a token; "
        f"{num_samples:,} samples x {num_tokens / max(1, num_samples):,.0f} tokens: "
        f"{total / max(1, num_samples) / 1e6:,.2f} MB a sample, {human_bytes(total)} in all"
    )


def max_bytes(config: StoreConfig, store: ObjectStore, present_bytes: int) -> tuple[int, str]:
    """(bytes the store may hold in all, why): store.max_bytes, else 80 % of the free disk, else 1 TB."""
    if config.max_bytes is not None:
        return config.max_bytes, "store.max_bytes"
    free = store.free_bytes()
    if free is None:
        return S3_BYTES, "the default of store.max_bytes on S3"
    return int(DISK_SHARE * (free + present_bytes)), f"{DISK_SHARE:.0%} of free disk, the default of store.max_bytes"


def too_much(need_bytes: int, limit: tuple[int, str]) -> str | None:
    """None when it fits, else the ways out."""
    if need_bytes <= limit[0]:
        return None
    return (
        "fewer taps (extract.num_taps or extract.layer_ids), fewer samples (limit=N), shorter ones "
        f"(extract.max_tokens=N), another place (store.root=... or store=s3), or store.max_bytes={need_bytes}"
    )


def refuse_too_much(need_bytes: int, limit: tuple[int, str]) -> None:
    """Raise UserError naming the numbers and the ways out when the planned bytes are over the limit."""
    ways_out = too_much(need_bytes, limit)
    if ways_out:
        raise UserError("store.max_bytes", got=f"{human_bytes(need_bytes)} of shards planned",
                        want=f"at most {human_bytes(limit[0])} ({limit[1]})", fix=ways_out)  # fmt: skip
