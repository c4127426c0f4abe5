"""Wall-clock timing that waits for the device it measures."""

import time

import torch


def now_s(device: torch.device | str = "cpu") -> float:
    """Seconds on a monotonic clock after the device has finished what was queued."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
