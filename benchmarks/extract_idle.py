"""How long a GPU does nothing while extraction runs: one less the union of its kernels' time over the wall's.

Copies do not count as work, so a GPU that waits for one is idle. The profiler slows Python down, so this is a pass of
its own, from which no rate is taken.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

SKIP = 0.4
"""Of the time between the first kernel and the last one, left out at the start: buffers are made then."""


def union_s(intervals: Iterable[tuple[float, float]], start: float, stop: float) -> float:
    """Length of what the intervals (begin, end) cover of start..stop; where they overlap counts once."""
    covered, reached = 0.0, start
    for begin, end in sorted(intervals):
        begin, end = max(begin, reached), min(end, stop)
        if end > begin:
            covered += end - begin
            reached = end
    return covered


def kernel_intervals(work: Callable[[], object], device: torch.device) -> list[tuple[float, float]]:
    """Seconds at which each kernel began and ended while `work` ran; on a CPU, each operator."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kind = "kernel" if on_gpu else "cpu_op"
    found = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == kind]
    return [(begin / 1e6, end / 1e6) for begin, end in found]  # the trace is in microseconds


def idle_share(work: Callable[[], object], device: torch.device) -> dict:
    """Share of the later part of `work` in which no kernel ran."""
    intervals = kernel_intervals(work, device)
    if not intervals:
        raise ValueError("the profiler has seen no kernel")
    first, stop = min(begin for begin, _ in intervals), max(end for _, end in intervals)
    start = first + SKIP * (stop - first)
    busy = union_s(intervals, start, stop)
    return {"idle_share": 1 - busy / (stop - start), "window_s": stop - start, "kernels": len(intervals)}
