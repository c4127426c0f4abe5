"""What every target offers, and the one place where a layer id meets Hugging Face's numbering."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from dflash_train.records import Features, FeatureSpec, TargetHead, Tree
from dflash_train.util.errors import UserError


@dataclass(frozen=True)
class TargetSpec:
    """Sizes and identity. embedding_rows may exceed the tokenizer's vocabulary; fingerprint names these weights."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    embedding_rows: int
    stop_ids: tuple[int, ...]
    fingerprint: str


class TargetSession(Protocol):
    """One sequence being decoded, with its own preallocated cache. `length` = tokens processed and kept."""

    length: int

    def prefill(self, token_ids: Tensor) -> tuple[Tensor, Features]:
        """token_ids i64[P] -> (logits of the last token [V] float32, Features of all P rows)."""

    def forward(self, tree: Tree) -> tuple[Tensor, Features]:
        """One pass over any tree at positions length + depth -> (logits [M, V] float32, Features of the M nodes).
        Nothing is committed: calling it again with another tree is legal."""

    def commit(self, path: list[int]) -> None:
        """Keep the nodes of the last forward's tree named by `path` (root first); length += len(path)."""


class TargetModel(Protocol):
    """A frozen language model."""

    spec: TargetSpec
    device: torch.device
    dtype: torch.dtype
    tokenizer: object

    def capture(self, token_ids: Tensor, layer_ids: tuple[int, ...], last_hidden: bool = False) -> Features:
        """Right-padded ids i64[B, T] -> hidden [B, T, L*H] and last_hidden [B, T, H]. Rows at padding are garbage.

        The head is never called, and the pass stops after the last layer that is needed."""

    def session(self, capacity: int, features: FeatureSpec) -> TargetSession:
        """Cache for at most `capacity` tokens, tree nodes included."""

    def head(self) -> TargetHead:
        """Embedding, head and final norm, as they are in the model (no copy)."""

    def answer(self, prompts: list[list[int]], *, max_new_tokens: int, temperature: float, top_p: float, top_k: int,
               seed: int) -> list[tuple[list[int], str]]:  # fmt: skip
        """Batched generation: for each prompt (token ids, stop token included if reached; "stop" | "length")."""


def hf_index(layer_id: int) -> int:
    """Decoder layer `layer_id` (0-based, residual stream after it) -> index into Hugging Face's `hidden_states`."""
    return layer_id + 1


def default_layer_ids(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """z-lab's choice: round(1 + i(N-4)/(T-1)), Python rounding; one tap: N//2.

    Raises UserError where the formula repeats, decreases or leaves the model (tiny models need explicit ids).
    """
    if num_taps == 1:
        ids = (num_layers // 2,)
    else:
        ids = tuple(round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    if any(b <= a for a, b in pairwise(ids)) or ids[0] < 0 or ids[-1] > num_layers - 2:
        raise UserError(
            "extract.layer_ids",
            got=f"null, and the default for {num_layers} layers and {num_taps} taps would be {list(ids)}",
            want=f"ids that increase, within 0..{num_layers - 2}",
            fix="name them: extract.layer_ids=[1,3,...], or lower extract.num_taps",
        )
    return ids


def check_layer_ids(layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Refuse ids outside 0..N-2. N-1 is refused since HF's last entry is after the final norm and a hook before it."""
    bad = [i for i in layer_ids if not 0 <= i <= num_layers - 2]
    if bad or not layer_ids:
        raise UserError(
            "extract.layer_ids",
            got=list(layer_ids),
            want=f"0-based decoder layer ids within 0..{num_layers - 2} (the last is refused: ambiguous final norm)",
        )


@dataclass(frozen=True)
class WeightsStatus:
    """Whether a target's weights can be had, found out without loading them. num_bytes: on disk once they are there."""

    ok: bool
    detail: str
    fix: str = ""
    download_bytes: int = 0
    num_bytes: int = 0


class _PassDone(Exception):
    """Raised out of a hook after the last layer that is needed; never leaves `Taps`."""


class Taps:
    """Context manager that captures the residual stream after chosen decoder layers of the forward run inside it.

    With `stop=True` the forward ends after the last of them (what follows in the `with` block is skipped).
    """

    def __init__(self, layers, layer_ids: tuple[int, ...], stop: bool = False):
        self.layers, self.layer_ids = layers, layer_ids
        self.stop_after = max(layer_ids) if stop else None
        self.rows: dict[int, Tensor] = {}

    def __enter__(self) -> "Taps":
        self.handles = [self.layers[i].register_forward_hook(self._hook(i)) for i in set(self.layer_ids)]
        return self

    def __exit__(self, kind, error, trace) -> bool:
        for handle in self.handles:
            handle.remove()
        return kind is _PassDone

    def _hook(self, layer_id: int):
        def hook(module, args, output):
            self.rows[layer_id] = output[0] if isinstance(output, tuple) else output
            if layer_id == self.stop_after:
                raise _PassDone

        return hook

    def hidden(self) -> Tensor | None:
        """Rows [..., L*H] in the order of layer_ids, duplicates kept; None without layer ids."""
        if not self.layer_ids:
            return None
        device = self.rows[self.layer_ids[0]].device  # a large model's layers lie on several
        return torch.cat([self.rows[i].to(device) for i in self.layer_ids], dim=-1)
