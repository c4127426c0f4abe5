"""The canary of a split target: a layer of each kind, computed whole on one device, is what the ranks make of it.

`canary.check_target` sees rows that are wrong in themselves, but not heads that were shared out wrongly: every pass of
the group has the same ones. One layer always fits beside a share, and is loaded for a moment.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from dflash_train.target.base import Taps
from dflash_train.target.canary import broken, distinct_ids, limits, row_errors
from dflash_train.target.sharded_load import FileWeights, Piece, Share, Weights, load_share
from dflash_train.util.log import say


class OneLayer:
    """The weights of one layer as those of a decoder that has no other, and no vocabulary."""

    def __init__(self, weights: Weights, layer_id: int):
        self.weights, self.layer_id = weights, layer_id

    def read(self, piece: Piece) -> Tensor:
        if piece.name == "embed_tokens.weight":
            return torch.zeros(piece.shape)
        return self.weights.read(replace(piece, name=piece.name.replace("layers.0.", f"layers.{self.layer_id}.")))


def whole_layer(target, layer_id: int) -> nn.Module:
    """A decoder of this layer alone, all heads, on the target's device."""
    text = copy.deepcopy(target.text_config)
    kinds = getattr(text, "layer_types", None)
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 1, 1, None
    if kinds:
        text.layer_types = [kinds[layer_id]]
    weights = OneLayer(FileWeights(target.files.folder), layer_id)
    return load_share(text, weights, Share(0, 1), target.dtype, target.device)


@torch.inference_mode()
def check_shares(target) -> float:
    """Compare what the first layer of each kind adds to the residual stream -> the largest error of a row.

    Raises UserError where it is beyond the canary's limit for another way through the same kernels.
    """
    ids = distinct_ids(target)[None].to(target.device)
    with Taps(target.layers, tuple(range(len(target.layers)))) as taps:
        target.decoder(input_ids=ids, use_cache=False)
    streams = {-1: target.decoder.embed_tokens(ids)} | taps.rows
    kinds = getattr(target.text_config, "layer_types", None) or ["full_attention"] * len(target.layers)
    _, limit, _ = limits(target)
    largest = 0.0
    for kind in dict.fromkeys(kinds):
        layer_id = kinds.index(kind)
        before, after = streams[layer_id - 1], streams[layer_id]
        decoder = whole_layer(target, layer_id)
        with Taps(decoder.layers, (0,), stop=True) as tap:
            decoder(inputs_embeds=before, use_cache=False)
        added, wanted = after.float() - before.float(), tap.rows[0].float() - before.float()
        error = float(row_errors(added, wanted).max())
        if not error <= limit:
            raise broken(target, "shares", f"error {error:.2g} in layer {layer_id}, {kind}, against one device",
                         f"at most {limit:.2g}")  # fmt: skip
        largest = max(largest, error)
    say(f"canary: what the ranks add in a layer is what one device adds, largest error {largest:.1g} (at most {limit})")
    return largest
