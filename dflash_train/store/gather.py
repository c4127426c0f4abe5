"""Captured rows on their way to the host: valid rows gathered on the device into one tensor, one copy per batch.

Measured on an H200: a copy into pinned memory runs at 55 GB/s, a plain `.cpu()` at 1.8 GB/s.
"""

import torch
from torch import Tensor

from dflash_train.records import Features


def gather_rows(features: Features, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """Right-padded rows [B, T, ...] and i64 lengths [B] on their device -> [sum(lengths), L*H (+ H)] of `dtype`.

    The last hidden state, where there is one, lies to the right of the captured layers. Padding is left out.
    """
    parts = [part for part in (features.hidden, features.last_hidden) if part is not None]
    valid = torch.arange(parts[0].shape[1], device=lengths.device) < lengths[:, None]
    rows = [part[valid].to(dtype) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)


class RowBuffer:
    """Host memory for the rows of one shard [num_rows, width], pinned where the rows come from a GPU.

    Its memory is used again for another shard, so `rows()` must have been read before the next `clear()`.
    """

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.memory = torch.empty(num_rows, width, dtype=dtype, pin_memory=self.stream is not None)
        self.filled = 0

    def clear(self) -> None:
        self.filled = 0

    def put(self, rows: Tensor) -> None:
        """Append device rows [n, width]: one copy, on a stream of its own where there is a GPU."""
        slot = self.memory[self.filled : self.filled + rows.shape[0]]
        self.filled += rows.shape[0]
        if self.stream is None:
            slot.copy_(rows)
            return
        self.stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self.stream):
            slot.copy_(rows, non_blocking=True)
        rows.record_stream(self.stream)  # or the allocator would hand the memory out while it is being copied

    def rows(self) -> Tensor:
        """What was put since `clear()`, after every copy has arrived. A view."""
        if self.stream is not None:
            self.stream.synchronize()
        return self.memory[: self.filled]
