"""DDTree: the same drafter pass as DFlash, offered as the tree of its most probable prefixes."""

from dflash_train.decode.base import DraftSettings
from dflash_train.decode.dflash import BlockProposer
from dflash_train.decode.tree import build_ddtree
from dflash_train.drafter.dflash import DFlashDrafter
from dflash_train.records import TargetHead, Tree
from dflash_train.util.errors import UserError


class Proposer(BlockProposer):
    """A best-first tree of `settings.budget` nodes beside the root. Drafting knows nothing of the sampling."""

    name = "ddtree"

    def __init__(self, drafter: DFlashDrafter, head: TargetHead, settings: DraftSettings):
        super().__init__(drafter, head, settings)
        if settings.accept == "rejection":
            raise UserError("eval.accept", got="rejection with ddtree", want="sample (rejection is defined for chains)")
        self.max_nodes = settings.budget + 1

    def propose(self, root: int, position: int) -> Tree:
        return build_ddtree(root, self.draft_logits(root, position), self.settings.budget)
