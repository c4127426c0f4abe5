"""Tree-shaped decoding over our own key/value cache: an attention function for transformers, and the session around it.

transformers' cache classes change between releases, so none is used: the model runs with use_cache=False, its layers
call `session_attention`, and that one writes the new keys and values into the session's buffers and attends over
[committed rows + the new nodes] under the ancestor mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_train.records import Features, FeatureSpec, Tree
from dflash_train.target.base import Taps
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers

ATTENTION_NAME = "dflash_session"


class KVCache:
    """Preallocated rows of keys (after RoPE) and values; the first `length` are committed.

    layers: the attention layers' ids and where each lies (a hybrid's others keep no rows; a large model's layers are
    spread over GPUs). Per device one buffer [L, KVH, capacity, K], so that a commit is one move a device.
    """

    def __init__(self, layers: dict[int, torch.device], num_kv_heads: int, head_dim: int, capacity: int,
                 dtype: torch.dtype):  # fmt: skip
        self.slots: dict[int, tuple[torch.device, int]] = {}
        counts: dict[torch.device, int] = {}
        for layer, device in layers.items():
            self.slots[layer] = device, counts.get(device, 0)
            counts[device] = counts.get(device, 0) + 1
        new = lambda device, count: torch.empty(count, num_kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.keys = {device: new(device, count) for device, count in counts.items()}
        self.values = {device: new(device, count) for device, count in counts.items()}
        self.capacity, self.length = capacity, 0

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put [KVH, M, K] behind the committed rows -> views [1, KVH, length + M, K] of all of them."""
        device, slot = self.slots[layer]
        end = self.length + keys.shape[1]
        self.keys[device][slot, :, self.length : end] = keys
        self.values[device][slot, :, self.length : end] = values
        return self.keys[device][slot, None, :, :end], self.values[device][slot, None, :, :end]

    def keep(self, path: list[int]) -> None:
        """Move rows length + path[i] to length + i in every layer and commit them."""
        start, count = self.length, len(path)
        if path != list(range(count)):
            rows = torch.tensor(path) + start
            for buffer in (*self.keys.values(), *self.values.values()):
                buffer[:, :, start : start + count] = buffer.index_select(2, rows.to(buffer.device))
        self.length += count


def ancestor_mask(parents: Tensor) -> Tensor:
    """parents i64[M] -> bool[M, M], True where column j is node i itself or one of its ancestors."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            mask[node] |= mask[parent]
    return torch.from_numpy(mask)


def tree_bias(tree: Tree, length: int, num_groups: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Additive mask [G*M, length + M] (0 or -inf) for queries grouped as in `session_attention`; None for one node.

    Made once a pass: a boolean mask would be converted again in each layer.
    """
    if len(tree) == 1:
        return None
    hidden = ~ancestor_mask(tree.parents).to(device)  # this much travels; the bias is made where it is read
    bias = torch.zeros(len(tree), length + len(tree), dtype=dtype, device=device)
    bias[:, length:].masked_fill_(hidden, float("-inf"))
    return bias.repeat(num_groups, 1)


def session_attention(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling: float | None = None,
                      session_cache: KVCache | None = None, session_bias: Tensor | None = None, **kwargs):  # fmt: skip
    """transformers' attention interface over the session's cache: query [1, H, M, K], key and value [1, KVH, M, K].

    The G = H / KVH query heads that share a KV head become G*M queries of that head, so the cache is read where it
    lies and never repeated. The first pass has no prefix and is plain causal: stock SDPA, as in `capture`.
    """
    first = session_cache.length == 0 and session_bias is None
    keys, values = session_cache.write(module.layer_idx, key[0], value[0])
    if first:
        sdpa = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, None, scaling=scaling, **kwargs)
    _, num_heads, num_nodes, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.reshape(1, num_kv_heads, -1, head_dim)
    bias = None if session_bias is None else session_bias.to(query.device)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling)
    return out.reshape(1, num_heads, num_nodes, head_dim).transpose(1, 2), None


transformers.AttentionInterface.register(ATTENTION_NAME, session_attention)


@contextmanager
def attention_by_session(config) -> Iterator[None]:
    """Let the model's layers call `session_attention`. transformers builds no mask for a name it has no mask for."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = before


class HFSession:
    """One sequence on a full-attention target (protocol: base.TargetSession)."""

    def __init__(self, target, capacity: int, features: FeatureSpec):
        config = target.text_config
        self.target, self.features = target, features
        self.num_groups = config.num_attention_heads // config.num_key_value_heads
        attention = {i: device for i, device in target.layer_devices.items() if i in target.attention_layers}
        self.cache = KVCache(attention, config.num_key_value_heads, target.head_dim, capacity, target.dtype)
        self.pending: Tree | None = None

    @property
    def length(self) -> int:
        return self.cache.length

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor) -> tuple[Tensor, Features]:
        """token_ids i64[P] -> (logits of the last token [V] float32, Features of all P rows). Starts a session."""
        assert self.length == 0, "prefill starts a session; make a new one for another prompt"
        positions = torch.arange(len(token_ids))
        normed, features = self._run(token_ids, positions, None)
        self.cache.length = len(token_ids)
        return self.target.logits(normed[-1:])[0], features

    @torch.inference_mode()
    def forward(self, tree: Tree) -> tuple[Tensor, Features]:
        """Any tree at positions length + depth -> (logits [M, V] float32, Features of its M nodes). Commits nothing:
        the rows it writes lie behind `length` and the next forward overwrites them."""
        bias = tree_bias(tree, self.length, self.num_groups, self.target.dtype, self.target.device)
        normed, features = self._run(tree.token_ids, tree.depths + self.length, bias)
        self.pending = tree
        return self.target.logits(normed), features

    @torch.inference_mode()
    def commit(self, path: list[int]) -> None:
        """Keep these nodes of the last forward's tree, root first. Each must be the child of the one before."""
        assert self.pending is not None, "commit without a forward"
        parents = self.pending.parents
        assert path and path[0] == 0, f"a path starts at the root: {path}"
        assert all(parents[b] == a for a, b in pairwise(path)), f"not a path of the tree: {path}"
        self._keep(path)
        self.pending = None

    def _keep(self, path: list[int]) -> None:
        self.cache.keep(path)

    def _layers_by_session(self):
        """Context in which the model's layers read and write this session's cache."""
        return attention_by_session(self.target.text_config)

    def _run(self, token_ids: Tensor, positions: Tensor, bias: Tensor | None) -> tuple[Tensor, Features]:
        """One pass -> (rows after the final norm [M, H], Features)."""
        count = len(token_ids)
        if count == 0 or self.length + count > self.cache.capacity:
            raise UserError("session capacity", got=f"{self.length} committed rows + {count} new ones",
                            want=f"at least one new row and at most {self.cache.capacity} in all",
                            fix="a shorter prompt, fewer new tokens or a smaller tree")  # fmt: skip
        target = self.target
        taps = Taps(target.layers, self.features.layer_ids)
        with self._layers_by_session(), taps:
            out = target.decoder(
                input_ids=token_ids[None].to(target.device), position_ids=positions[None].to(target.device),
                use_cache=False, session_cache=self.cache, session_bias=bias,
            )  # fmt: skip
        normed = out.last_hidden_state[0].to(target.device)
        hidden = taps.hidden()
        rows = None if hidden is None else hidden[0].to(target.device)
        return normed, Features(rows, normed if self.features.last_hidden else None)
