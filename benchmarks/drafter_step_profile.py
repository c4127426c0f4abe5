"""Where the GPU's time goes in a step: its longest kernels, and their sum by kind, from torch's profiler."""

import re
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "copies": r"memcpy|memset",
    "head logits": r"row_terms|slope_kernel",
    "matrix products": r"gemm|nvjet|cutlass|splitk|aten::(mm|addmm|linear)\b",
    "attention": r"flex|triton_tem|triton_.*attention|scaled_dot_product",
    "norm, rotation, SwiGLU": r"norm|swiglu|silu|gammabeta",
}
"""Pattern of a kernel's name, in lower case; the first that matches counts. The rest is the rest."""
NUM_LONGEST = 15


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), "rest")


def kernel_times(step: Callable[[], object], prepare: Callable[[], object], device: torch.device,
                 steps: int = 3) -> dict:  # fmt: skip
    """Milliseconds a step by kind, and of the longest kernels (of operators on a CPU). `prepare` is not counted."""
    on_gpu = device.type == "cuda"
    total: dict[str, list[float]] = {}
    for _ in range(steps):
        prepare()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            step()
            if on_gpu:
                torch.cuda.synchronize(device)
        for event in profiler.key_averages():
            spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            entry = total.setdefault(event.key, [0.0, 0.0])
            entry[0] += spent / 1000 / steps
            entry[1] += event.count / steps
    by_kind = dict.fromkeys([*KINDS, "rest"], 0.0)
    for name, (ms, _) in total.items():
        by_kind[kind_of(name)] += ms
    longest = sorted(total.items(), key=lambda item: -item[1][0])[:NUM_LONGEST]
    return {"by_kind_ms": by_kind, "longest": [[name, ms, count] for name, (ms, count) in longest],
            "sum_ms": sum(by_kind.values())}  # fmt: skip
