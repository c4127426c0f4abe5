"""What a proposer is: it reads the target's features and offers a Tree. And what every proposer is built from."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dflash_train.decode.verify import Sampling
from dflash_train.records import Features, FeatureSpec, Tree


@dataclass(frozen=True)
class DraftSettings:
    """What shapes a draft, and nothing of the model.

    block_size: caps the drafter's own (None = its own; above it is refused). budget: ddtree's nodes beside the root.
    accept, sampling, seed: of the verifier; a chain drafted for accept="rejection" is sampled from the drafter's
    distribution under the same sampling, every other draft is the drafter's own best guess at temperature 1.
    """

    block_size: int | None = None
    budget: int = 64
    accept: str = "sample"
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0


class Proposer(Protocol):
    """start once per prompt, then propose / commit every round.

    Every module in PROPOSERS exports a class `Proposer(drafter, head, settings)`:
        drafter   the trained model (`drafter.DRAFTERS`), on the target's device; None where nothing is drafted
        head      the target's embedding and head (TargetHead) in the drafter's dtype; None likewise
        settings  DraftSettings
    """

    name: str
    features: FeatureSpec
    max_nodes: int
    """Largest tree it offers, root included."""

    def start(self, token_ids: Tensor, features: Features) -> None:
        """The prompt (i64[P]) and the target's rows for it."""

    def propose(self, root: int, position: int) -> Tree:
        """Draft after token `root`, which sits at `position` and has no target row yet."""

    def commit(self, token_ids: Tensor, features: Features) -> None:
        """Tokens that now have target rows (the accepted path, root first) and those rows."""
