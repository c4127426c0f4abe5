"""A bucket seen as keys and bytes, and a sink as its producer sees it: what is above is written once against these."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dflash_train.util.errors import UserError

if TYPE_CHECKING:
    from dflash_train.store.markers import ShardFacts


class StoreUnavailable(UserError):
    """The store did not answer, or failed on its own side: trying again may help. Any other UserError is final."""

    exit_code = 1


class ObjectStore(Protocol):
    """Keys are '/'-separated and relative to this store's prefix. Every write is whole or absent."""

    url: str
    """Where it is, for messages: file:///... or s3://bucket/prefix. No credentials."""

    def check(self) -> None:
        """Raises UserError when the place does not exist, refuses us or cannot be written (one small probe object)."""

    def put_file(self, key: str, path: Path) -> None:
        """Store a file's bytes; returns only after the store confirmed their checksum."""

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> bool:
        """Store bytes; with if_absent the first writer wins and False says that somebody else did."""

    def get_bytes(self, key: str) -> bytes:
        """Raises KeyError when absent."""

    def get_file(self, key: str, path: Path) -> None:
        """Download into `path`, atomically. Raises KeyError when absent."""

    def size(self, key: str) -> int | None:
        """Bytes of the object, or None when absent."""

    def list(self, prefix: str = "") -> list[tuple[str, int]]:
        """(key, bytes) of every object under the prefix, sorted by key."""

    def older(self, prefix: str, older_than_s: float) -> Sequence[str]:
        """Keys under the prefix that were written at least so long ago, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object; absent is fine."""

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove objects, many in a request where the store can; absent is fine."""

    def free_bytes(self) -> int | None:
        """Room left, or None where the store has no such limit."""

    def drop_unfinished(self, older_than_s: float) -> int:
        """Remove what interrupted writes left (temporary files, unfinished multipart uploads); returns how many."""

    def abort_unfinished(self) -> int:
        """Remove what this object's own writes began and did not end; returns how many. For the end of a process that
        does not wait for them."""


class Sink(Protocol):
    """Where staged shards go: to a bucket (upload.Uploader), or to whoever consumes them on this machine.

    A context manager: leaving it drains it. One producer reserves and submits; the sink removes each staged file once
    it is done with it. What it cannot take it names, and raises where the producer asks next.
    """

    staged_bytes: int
    """Reserved or written, and not yet taken."""
    failed: dict[str, Exception]
    """Shard id -> why it was not taken, for good."""

    @property
    def pending(self) -> Sequence[str]:
        """Ids of shards that were submitted and are not yet taken, sorted."""

    def reserve(self, num_bytes: int) -> None:
        """Wait until a shard of so many bytes may be staged."""

    def submit(self, path: Path, facts: "ShardFacts", reserved_bytes: int) -> None:
        """Hand over a staged file; its true size replaces what was reserved. Returns at once."""

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is pending; False when some is left after timeout_s."""

    def raise_failed(self) -> None:
        """Raise UserError naming the shards in `failed`, where there are any."""
