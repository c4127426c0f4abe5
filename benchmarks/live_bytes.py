"""Peak memory of a piece of code: CUDA's own count on a GPU, the storages alive at a time elsewhere."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Context manager that counts the bytes of all storages that operations inside it make, while they live.

    `peak` is the most of them at a time; `reset` starts the peak anew from what lives then. Works on meta tensors too,
    so a model may be counted that no machine at hand could hold. Views and parameters count once, as their storage."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, torch.Tensor):
                self.note(value)
        return out

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            self.known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.now -= num_bytes

    def reset(self) -> None:
        self.peak = self.now


class CudaBytes:
    """The same for a GPU, where the allocator counts."""

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> "CudaBytes":
        return self

    def __exit__(self, *_) -> None:
        pass

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)


def meter(device: torch.device) -> LiveBytes | CudaBytes:
    """What counts on this device."""
    return CudaBytes(device) if device.type == "cuda" else LiveBytes()
