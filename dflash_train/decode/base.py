"""What a proposer is: it reads the target's features and offers a Tree."""

from typing import Protocol

from torch import Tensor

from dflash_train.records import Features, FeatureSpec, Tree


class Proposer(Protocol):
    """start once per prompt, then propose / commit every round."""

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
