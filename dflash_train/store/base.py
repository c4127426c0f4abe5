"""A bucket seen as keys and bytes. Everything above it (shards, markers, loader) is written once against this."""

from pathlib import Path
from typing import Protocol

from dflash_train.util.errors import UserError


class StoreUnavailable(UserError):
    """The store did not answer, or failed on its own side: trying again may help. Any other UserError is final."""


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

    def delete(self, key: str) -> None:
        """Remove an object; absent is fine."""

    def free_bytes(self) -> int | None:
        """Room left, or None where the store has no such limit."""

    def drop_unfinished(self, older_than_s: float) -> int:
        """Remove what interrupted writes left (temporary files, unfinished multipart uploads); returns how many."""
