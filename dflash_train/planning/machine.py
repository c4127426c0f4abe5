"""The machine: a profile of conf/hardware, or the one at hand as far as it can be found out."""

import re
from dataclasses import dataclass, replace

import psutil
import torch

from dflash_train.config import HardwareConfig
from dflash_train.util.device import cuda_problem


@dataclass(frozen=True)
class Gpu:
    """One GPU as CUDA describes it."""

    name: str
    memory_bytes: int
    compute_capability: str


def gpus_at_hand() -> list[Gpu]:
    """Every visible GPU; none where torch cannot use them."""
    if cuda_problem() is not None:
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [Gpu(p.name, p.total_memory, f"{p.major}.{p.minor}") for p in found]


def describe(gpus: list[Gpu]) -> str:
    """'2x NVIDIA RTX A6000', or 'no GPU'."""
    names = sorted({gpu.name for gpu in gpus})
    return ", ".join(f"{sum(gpu.name == name for gpu in gpus)}x {name}" for name in names) or "no GPU"


def fits_profile(gpu: Gpu, profile: HardwareConfig) -> bool:
    """By its whole name: a 40 GB card, a laptop's or a PCIe variant has other rates than its namesake."""
    return bool(profile.gpu) and re.fullmatch(profile.gpu, gpu.name) is not None


def detect(hardware: HardwareConfig, profiles: list[HardwareConfig], gpus: list[Gpu]) -> HardwareConfig:
    """The machine at hand as a profile: the one that knows its GPU, with measured count and memory; else measured
    figures alone, rates null. Keys that were set by hand stay as they are. Mixed GPUs count as the smallest of them."""
    if not gpus:
        return with_host_memory(replace(hardware, name="cpu", num_gpus=0))
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    same = len({gpu.name for gpu in gpus}) == 1
    known = [profile for profile in profiles if same and fits_profile(smallest, profile)]
    base = known[0] if known else HardwareConfig(name=f"unknown GPU {smallest.name}")
    measured = {"num_gpus": len(gpus), "memory_bytes": smallest.memory_bytes,
                "compute_capability": smallest.compute_capability}  # fmt: skip
    default = HardwareConfig()
    by_hand = {key: value for key, value in vars(hardware).items() if value != getattr(default, key)}
    return replace(base, **measured | by_hand)


def with_host_memory(hardware: HardwareConfig) -> HardwareConfig:
    """Without GPUs the host's memory is what counts, and nothing of it is set aside."""
    memory = hardware.memory_bytes or psutil.virtual_memory().total
    return replace(hardware, memory_bytes=memory, reserve_bytes=0)


def profile_problem(hardware: HardwareConfig, gpus: list[Gpu]) -> str | None:
    """None where the chosen profile describes this machine; a stage that was planned for another one must not start."""
    if hardware.gpu is None:
        return None
    wrong = [gpu for gpu in gpus if not fits_profile(gpu, hardware)]
    if wrong or len(gpus) < (hardware.num_gpus or 1):
        return (
            f"hardware={hardware.name} is {hardware.num_gpus or 1}x {hardware.gpu}, this machine has {describe(gpus)}"
        )
    return None
