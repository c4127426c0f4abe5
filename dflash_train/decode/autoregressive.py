"""No draft: each round verifies the last token alone. The baseline of every speedup, on the very same loop."""

from torch import Tensor, nn

from dflash_train.decode.base import DraftSettings
from dflash_train.decode.tree import chain_tree
from dflash_train.records import Features, FeatureSpec, TargetHead, Tree


class Proposer:
    """Offers the root only. Takes the common arguments and needs none of them."""

    name = "autoregressive"
    features = FeatureSpec()
    max_nodes = 1

    def __init__(self, drafter: nn.Module | None = None, head: TargetHead | None = None,
                 settings: DraftSettings | None = None):  # fmt: skip
        pass

    def start(self, token_ids: Tensor, features: Features) -> None:
        pass

    def propose(self, root: int, position: int) -> Tree:
        return chain_tree(root, [])

    def commit(self, token_ids: Tensor, features: Features) -> None:
        pass
