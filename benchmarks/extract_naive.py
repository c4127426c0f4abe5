"""The way a first attempt extracts hidden states, kept as it is: what extraction is set against.

One sample at a time, the whole model with every hidden state, each layer copied by .cpu(), a file a sample.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from dflash_train.capture.rows import RenderedRows


@torch.no_grad()
def naive(model, rows: RenderedRows, chosen: Iterable[int], layer_ids: tuple[int, ...], folder: Path) -> list[Path]:
    """<folder>/<row>.safetensors for each of the chosen rows: token_ids i64[T] and hidden [T, L*H]."""
    files = []
    for row in chosen:
        token_ids = torch.from_numpy(rows.token_ids(row).astype(np.int64))
        out = model(input_ids=token_ids[None].to(model.device), output_hidden_states=True)
        layers = [out.hidden_states[i + 1][0].cpu() for i in layer_ids]
        files.append(folder / f"{row}.safetensors")
        save_file({"token_ids": token_ids, "hidden": torch.cat(layers, dim=-1)}, files[-1])
    return files
