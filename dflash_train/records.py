"""Frozen data that crosses a stage boundary.

Sample        one conversation of the mix, before or after the target answered it     (mix -> regenerate -> extract)
Rendered      its token ids and exact loss mask                                        (chat -> extract)
HiddenShard   captured rows of many samples                                            (extract -> store -> train)
TargetHead    the target's frozen embedding and head                                   (target -> store -> drafter)
DraftBatch    packed rows of documents                                                 (loader -> train)
Blocks        anchors and what each block slot reads and predicts                      (anchors -> drafter, loss)
Features      target rows a proposer asked for                                         (target -> proposer)
Tree, Verdict, Generation                                                              (decode)
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One conversation. Before `regenerate` it ends at a user or tool turn; after it, at the target's answer.

    messages: [{role: system|user|assistant|tool, content: str, reasoning_content?, tool_calls?, tool_call_id?, name?}]
    with tool-call arguments as mappings. tools: JSON-schema functions or None. thinking: "on" | "off".
    split: "train" | "heldout". upstream: where the row came from. regen: who answered it and how, or None.
    """

    id: str
    source: str
    license: str
    bucket: str
    split: str
    thinking: str
    messages: list[dict]
    tools: list[dict] | None = None
    upstream: dict = field(default_factory=dict)
    regen: dict | None = None

    def to_json(self) -> dict:
        return dict(self.__dict__)

    @classmethod
    def from_json(cls, row: dict) -> "Sample":
        return cls(**row)


@dataclass(frozen=True)
class Rendered:
    """A sample as the target reads it. loss_mask is True exactly on the last assistant turn's text and end token."""

    sample_id: str
    token_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class HiddenShard:
    """Captured rows of S samples with T tokens in all; sample s owns rows offsets[s]:offsets[s+1].

    token_ids i32[T]; loss_mask bool[T]; offsets i64[S+1]; hidden [T, L*H] in layer-id order (taps side by side);
    last_hidden [T, H] after the target's final norm, or None; provenance: plain dict. Eight-bit rows are codes in
    `hidden` (float8_e4m3fn) with hidden_scale f32[T, L] (store/fp8.py); else that is None.
    """

    sample_ids: list[str]
    token_ids: Tensor
    loss_mask: Tensor
    offsets: Tensor
    hidden: Tensor
    last_hidden: Tensor | None
    provenance: dict
    hidden_scale: Tensor | None = None


@dataclass(frozen=True)
class TargetHead:
    """The target's frozen embedding and head, all a drafter needs of the target beside captured rows.

    embedding [V, H]; head [V, H] (the same tensor where tied); final_norm [H] with final_norm_offset 1.0 for (1+w)
    norms and 0.0 for plain ones; final_norm_eps. None of it is in the optimizer or in the DeepSpeed engine.
    """

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    final_norm_offset: float
    final_norm_eps: float

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [...] -> [..., H]."""
        return F.embedding(token_ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """Normed hidden [..., H] -> [..., V]. No norm is applied here."""
        return F.linear(hidden.to(self.head.dtype), self.head)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "TargetHead":
        tied = self.head is self.embedding
        embedding = self.embedding.to(device, dtype)
        head = embedding if tied else self.head.to(device, dtype)
        norm = self.final_norm.to(device, dtype)
        return TargetHead(embedding, head, norm, self.final_norm_offset, self.final_norm_eps)


@dataclass(frozen=True)
class DraftBatch:
    """B packed rows of T tokens. Padding has document_ids -1, loss_mask False.

    token_ids i64[B,T]; loss_mask bool[B,T]; document_ids i64[B,T] (0.. within a row); position_ids i64[B,T] (restart
    at 0 per document); hidden [B, T, L*H]; last_hidden [B, T, H] or None; sample_ids[b][d] names document d of row b.
    """

    token_ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    position_ids: Tensor
    hidden: Tensor
    last_hidden: Tensor | None
    sample_ids: list[list[str]]

    def to(self, device: torch.device | str) -> "DraftBatch":
        move = lambda t: None if t is None else t.to(device, non_blocking=True)
        return DraftBatch(
            move(self.token_ids), move(self.loss_mask), move(self.document_ids), move(self.position_ids),
            move(self.hidden), move(self.last_hidden), self.sample_ids,
        )  # fmt: skip


@dataclass(frozen=True)
class Blocks:
    """N anchors a row (sorted, padded with invalid ones at the end) and the S = block_size slots of each.

    anchors i64[B,N] row indices; valid bool[B,N]; token_ids i64[B,N,S] (slot 0 = token(anchor), the rest MASK);
    position_ids i64[B,N,S] within the document; labels i64[B,N,S] (slot k = token(anchor+k)); loss_mask bool[B,N,S]
    (cumulative from slot 1; slot 0 is False); document_ids i64[B,N].
    """

    anchors: Tensor
    valid: Tensor
    token_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    document_ids: Tensor

    @property
    def block_size(self) -> int:
        return self.token_ids.shape[-1]


@dataclass(frozen=True)
class FeatureSpec:
    """Target rows a proposer reads: captured layers, in this order, and the last hidden state after the final norm."""

    layer_ids: tuple[int, ...] = ()
    last_hidden: bool = False


@dataclass(frozen=True)
class Features:
    """n target rows: hidden [n, L*H] (None without layer ids), last_hidden [n, H] (None unless asked for)."""

    hidden: Tensor | None = None
    last_hidden: Tensor | None = None

    def select(self, rows: Tensor | slice) -> "Features":
        pick = lambda t: None if t is None else t[rows]
        return Features(pick(self.hidden), pick(self.last_hidden))


@dataclass(frozen=True)
class Tree:
    """M drafted nodes in topological order; node 0 is the last committed token, which the target has not yet processed.

    token_ids, parents, depths: i64[M] on the CPU; parents[0] = -1, parents[i] < i, depths[i] = depths[parents[i]] + 1.
    draft_probs: [M, V] the distribution node i was drawn from (row 0 unused), only where the accept rule needs it.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    draft_probs: Tensor | None = None

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_draft_nodes(self) -> int:
        """The tree budget: nodes beside the root."""
        return len(self) - 1


@dataclass(frozen=True)
class Verdict:
    """path: accepted node indices, root first. bonus: the token that follows them. A round commits len(path) tokens:
    the path's without the root, and the bonus."""

    path: list[int]
    bonus: int


@dataclass(frozen=True)
class Generation:
    """One answer and how it came about.

    token_ids: all generated tokens, stop token included. round_lengths: tokens committed by each round that counts (one
    cut by max_new_tokens is not in it). draft_lengths: drafted depth offered in each of those rounds.
    margins: target's top-1 minus top-2 logit at each generated token, or [].
    decode_s: seconds of the counted rounds; propose_s, verify_s, commit_s: their parts.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    round_lengths: list[int]
    draft_lengths: list[int]
    stopped_by: str
    prefill_s: float
    decode_s: float
    propose_s: float
    verify_s: float
    commit_s: float
    margins: list[float]
