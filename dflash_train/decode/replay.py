"""Rounds replayed on answers that are already written: what every method would accept, without verifying again.

Greedy or sampled, an answer does not depend on what was drafted (that is what lossless means): drafts only decide into
how many rounds it is cut. So the target writes all answers first, in batches, and one pass over each gives the rows
that proposers read; then the one generate loop runs over a target that knows the answer. The same rounds as in decoding
at temperature 0 (up to near ties of another batch shape), the same law above it, many times faster; no speed figures.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_train.decode.base import Proposer
from dflash_train.decode.generate import generate
from dflash_train.decode.verify import Sampling, Verifier
from dflash_train.records import Features, FeatureSpec, Generation, Tree
from dflash_train.target.base import TargetModel


def write_answers(target: TargetModel, prompts: list[list[int]], sampling: Sampling, *, max_new_tokens: int,
                  batch_size: int, seed: int) -> list[list[int]]:  # fmt: skip
    """The target's answers to prompts (token ids), in their order; batches hold prompts of similar lengths."""
    answers: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        written = target.answer([prompts[i] for i in batch], max_new_tokens=max_new_tokens,
                                temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
                                seed=seed + start)  # fmt: skip
        for i, (token_ids, _) in zip(batch, written, strict=True):
            answers[i] = token_ids
    return answers


def record_answer(target: TargetModel, prompt_ids: list[int], token_ids: list[int], spec: FeatureSpec) -> "Recording":
    """The answer with the target's rows of the whole text, from one pass."""
    text = torch.tensor([prompt_ids + token_ids])
    if not spec.layer_ids and not spec.last_hidden:
        return Recording(target, prompt_ids, token_ids, Features())
    rows = target.capture(text, spec.layer_ids, spec.last_hidden)
    first = lambda t: None if t is None else t[0]
    return Recording(target, prompt_ids, token_ids, Features(first(rows.hidden), first(rows.last_hidden)))


def replay(recording: "Recording", proposer: Proposer, max_new_tokens: int) -> Generation:
    """The rounds of one method on a recorded answer. Times are 0: nothing was verified."""
    done = generate(recording, proposer, Verifier(Sampling()), recording.prompt_ids, max_new_tokens)
    assert done.token_ids == recording.token_ids, "a replayed answer is the recorded one"
    return replace(done, prefill_s=0.0, decode_s=0.0, propose_s=0.0, verify_s=0.0, commit_s=0.0, margins=[])


@dataclass
class Recording:
    """A target (as far as `generate` needs one) that says the recorded answer and nothing else.

    features: rows of prompt and answer, position by position.
    """

    target: TargetModel
    prompt_ids: list[int]
    token_ids: list[int]
    features: Features

    def __post_init__(self):
        self.spec, self.device = self.target.spec, self.target.device
        self.text = [*self.prompt_ids, *self.token_ids]

    def session(self, capacity: int, features: FeatureSpec) -> "ReplaySession":
        return ReplaySession(self)


class ReplaySession:
    """A session over a recording (protocol: target.base.TargetSession): logits are 1 at the recorded next token."""

    def __init__(self, recording: Recording):
        self.recording, self.length = recording, 0

    def prefill(self, token_ids: Tensor) -> tuple[Tensor, Features]:
        self.length = len(token_ids)
        return self._logits([self.length - 1])[0], self.recording.features.select(slice(0, self.length))

    def forward(self, tree: Tree) -> tuple[Tensor, Features]:
        """Nodes that leave the recorded text get no token at all, and the row of the text's token at their depth."""
        text, known = self.recording.text, [False] * len(tree)
        parents, depths, token_ids = tree.parents.tolist(), tree.depths.tolist(), tree.token_ids.tolist()
        for node, parent in enumerate(parents):
            position = self.length + depths[node]
            follows = parent < 0 or known[parent]
            known[node] = follows and position < len(text) and token_ids[node] == text[position]
        assert known[0], "the root is the recorded token"
        positions = [self.length + depth for depth in depths]
        rows = torch.tensor([min(position, len(text) - 1) for position in positions], device=self.recording.device)
        said = [position if on else None for position, on in zip(positions, known, strict=True)]
        return self._logits(said), self.recording.features.select(rows)

    def commit(self, path: list[int]) -> None:
        self.length += len(path)

    def _logits(self, positions: list[int | None]) -> Tensor:
        """[M, V]: row i says the text's token after positions[i]; None, or the text's end, says nothing."""
        text = self.recording.text
        logits = torch.zeros(len(positions), self.recording.spec.vocab_size, device=self.recording.device)
        said = [(i, text[p + 1]) for i, p in enumerate(positions) if p is not None and p + 1 < len(text)]
        if said:
            index = torch.tensor(said, device=logits.device)
            logits[index[:, 0], index[:, 1]] = 1.0
        return logits
