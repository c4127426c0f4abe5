"""Rank, world size and clean endings of torch.distributed, whoever launched us."""

import os

import torch
import torch.distributed as dist


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def all_reduce_sum(values: list[float], device: torch.device | str = "cpu") -> list[float]:
    """Sum a short list of floats over ranks in float64 (gloo and nccl both carry it)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def shutdown() -> None:
    """Barrier, then destroy: without the barrier gloo aborts at exit in some runs, without destroy in half of them."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
