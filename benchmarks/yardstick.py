"""What a machine gives in this very process: every rate of a benchmark is a ratio to these."""

from collections.abc import Callable

import torch
from torch import Tensor

from dflash_train.util.device import device_name
from dflash_train.util.hf import transformers
from dflash_train.util.provenance import code_version
from dflash_train.util.timing import now_s

VOID_TFLOPS, VOID_TB_S = 750, 4.0
"""An H200 below these is throttled or shared: no rate of that run counts."""


def best_s(work: Callable[[], object], device: torch.device, repeats: int, tries: int = 3) -> float:
    """Seconds of one call, the best of `tries` means over `repeats`; one call to warm up."""
    work()
    seconds = []
    for _ in range(tries):
        start = now_s(device)
        for _ in range(repeats):
            work()
        seconds.append((now_s(device) - start) / repeats)
    return min(seconds)


@torch.inference_mode()
def yardstick(device: torch.device, dtype: torch.dtype, matrix: int = 8192, copy_bytes: int = 4 << 30) -> dict:
    """Rate of a square product in this dtype (TFLOP/s), of a copy (TB/s, bytes read plus written), and what ran it."""
    a, out = torch.randn(2, matrix, matrix, device=device).to(dtype)
    product_s = best_s(lambda: torch.mm(a, a, out=out), device, repeats=20)
    source, target = torch.zeros(2, copy_bytes, dtype=torch.uint8, device=device)
    copy_s = best_s(lambda: target.copy_(source), device, repeats=5)
    tflops, tb_s = 2 * matrix**3 / product_s / 1e12, 2 * copy_bytes / copy_s / 1e12
    name = device_name(device)
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__,
            "code": code_version(), "matrix_tflops": tflops, "copy_tb_s": tb_s,
            "void": "H200" in name and (tflops < VOID_TFLOPS or tb_s < VOID_TB_S)}  # fmt: skip


class Peak:
    """Context manager: `.bytes` is the most memory allocated at a time inside it (0 on a CPU)."""

    def __init__(self, device: torch.device):
        self.device, self.bytes = device, 0

    def __enter__(self) -> "Peak":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *_) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device)


def num_bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
