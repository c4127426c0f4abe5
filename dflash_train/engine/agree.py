"""Ranks that succeed or fail together: one of them in trouble must not leave the others waiting in a collective."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from dflash_train.util import dist
from dflash_train.util.errors import UserError

_MESSAGE_BYTES = 2000
# How files, torch and safetensors report a full disk or a folder that is gone.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)


@contextmanager
def together(device: torch.device | str) -> Iterator[None]:
    """A collective around a body that has none in it: where the body fails on one rank, every rank raises."""
    error = None
    try:
        yield
    except (UserError, OSError, RuntimeError) as failure:
        error = failure
    raise_everywhere(error, device)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """What goes wrong while `path` is written, as a UserError that names rank and file."""
    try:
        yield
    except WRITE_ERRORS as failure:
        raise UserError(str(path), got=f"rank {dist.rank()} could not write it: {failure}", want="a writable disk",
                        fix="free some space, or train.output_dir=...") from failure  # fmt: skip


def raise_everywhere(error: Exception | None, device: torch.device | str) -> None:
    """A collective. Returns when no rank has an error; else every rank raises: its own, or the first failing rank's
    message as UserError."""
    failed = [0.0] * dist.world_size()
    failed[dist.rank()] = float(error is not None)
    failed = dist.all_reduce_sum(failed, device)
    if not any(failed):
        return
    first = failed.index(1.0)
    message = _broadcast_text(str(error) if dist.rank() == first else "", first, device)
    if error is not None:
        raise error
    raise UserError(f"rank {first} failed: {message}")


def _broadcast_text(text: str, source: int, device: torch.device | str) -> str:
    """A short text from one rank to all, as bytes (no pickle)."""
    if dist.world_size() == 1:
        return text
    raw = text.encode("utf-8")[:_MESSAGE_BYTES]
    buffer = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    buffer[: len(raw)] = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)]
    buffer = buffer.to(device)
    torch.distributed.broadcast(buffer, source)
    return bytes(buffer.cpu().tolist()).rstrip(b"\0").decode("utf-8", "replace")
