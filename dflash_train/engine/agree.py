"""Ranks that succeed or fail together: one of them in trouble must not leave the others waiting in a collective."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from dflash_train.util import dist
from dflash_train.util.errors import UserError

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
    message = gather_texts("" if error is None else str(error), device)[first]
    if error is not None:
        raise error
    raise UserError(f"rank {first} failed: {message}")


def gather_texts(text: str, device: torch.device | str) -> list[str]:
    """Every rank's text, in the order of ranks, as bytes (no pickle). A collective."""
    if dist.world_size() == 1:
        return [text]
    raw = text.encode("utf-8")
    sizes = [0.0] * dist.world_size()
    sizes[dist.rank()] = float(len(raw))
    sizes = [int(size) for size in dist.all_reduce_sum(sizes, device)]
    buffer = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    buffer[: len(raw)] = torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)]
    buffer = buffer.to(device)
    found = [torch.empty_like(buffer) for _ in sizes]
    torch.distributed.all_gather(found, buffer)
    return [bytes(part[:size].cpu().tolist()).decode("utf-8") for part, size in zip(found, sizes)]


def same_everywhere(field: str, text: str, device: torch.device | str) -> None:
    """Raise UserError on every rank, naming `field` and what each has, where ranks differ. A collective."""
    texts = gather_texts(text, device)
    if len(set(texts)) > 1:
        raise UserError(field, got="; ".join(f"rank {rank}: {found}" for rank, found in enumerate(texts)),
                        want="the same on every rank", fix="one folder that all hosts see")  # fmt: skip
