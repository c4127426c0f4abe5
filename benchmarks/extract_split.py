"""A target over several devices beside the same one on one: are the rows the same?"""

import torch
from torch import Tensor

from dflash_train.target.base import TargetModel


def layers_of(target: TargetModel, token_ids: Tensor, layer_ids: tuple[int, ...]) -> dict[str, Tensor]:
    """'layer 1' -> its rows [B, T, H], float32 on the CPU."""
    hidden = target.capture(token_ids, layer_ids).hidden
    return {f"layer {i}": part.float().cpu() for i, part in zip(layer_ids, hidden.chunk(len(layer_ids), dim=-1))}


def row_agreement(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """By layer: cosine over all rows, and the largest |got - want| / |want| of a row."""
    found = {}
    for name, rows in want.items():
        cosine = torch.nn.functional.cosine_similarity(got[name].flatten(), rows.flatten(), dim=0, eps=0)
        errors = (got[name] - rows).norm(dim=-1) / rows.norm(dim=-1)
        found[name] = {"cosine": float(cosine), "largest": float(errors.max())}
    return found
