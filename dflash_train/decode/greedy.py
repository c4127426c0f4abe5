"""Do answers that came from elsewhere (a server, batched generation) say what our own loop says, greedily?"""

from dataclasses import dataclass

import torch

from dflash_train.decode.autoregressive import Proposer
from dflash_train.decode.generate import generate
from dflash_train.decode.verify import Sampling, Verifier
from dflash_train.target.base import TargetModel
from dflash_train.util.errors import UserError

NEAR_TIE = {torch.float32: 0.05, torch.bfloat16: 0.5}
"""Logits between best and second best at which other kernels may choose the other one."""
MAX_TOKENS = 32  # of each answer: a step of the own loop is one token


@dataclass(frozen=True)
class Departure:
    """Where an answer first leaves the target's own greedy tokens, and by how many logits the target preferred its
    own; legal: whether that is a near tie."""

    position: int
    margin: float
    legal: bool


def departure(target: TargetModel, prompt_ids: list[int], answer_ids: list[int]) -> Departure | None:
    """None where answer_ids are the target's own, as far as both go and up to MAX_TOKENS."""
    own = generate(target, Proposer(), Verifier(Sampling()), list(prompt_ids), min(MAX_TOKENS, max(1, len(answer_ids))))
    for position, (got, want) in enumerate(zip(answer_ids, own.token_ids)):
        if got != want:
            margin = own.margins[position]
            return Departure(position, margin, margin <= NEAR_TIE[target.dtype])
    if len(answer_ids) < len(own.token_ids):  # it ended early without the tokens being there
        position = len(answer_ids)
        return Departure(position, own.margins[position], False)
    return None


def check_greedy(target: TargetModel, answers: dict[str, tuple[list[int], list[int]]]) -> dict[str, str]:
    """answers: {name: (prompt ids, greedy answer ids)} -> {name: what was let off as a near tie}. Raises UserError
    where an answer leaves the target's own tokens although the target was not undecided."""
    tolerated = {}
    for name, (prompt_ids, answer_ids) in answers.items():
        found = departure(target, prompt_ids, answer_ids)
        if found is None:
            continue
        said = f"token {found.position} is not this target's, which preferred its own by {found.margin:.3g} logits"
        if not found.legal:
            raise UserError("greedy answers", got=f"[{name}] {said}", want="the tokens of the target's own loop, or a "
                            f"near tie ({NEAR_TIE[target.dtype]:g} logits)",
                            fix="other weights, another quantization or other positions answer there")  # fmt: skip
        tolerated[name] = f"{said}: a near tie"
    return tolerated
