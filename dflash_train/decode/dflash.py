"""DFlash: one drafter pass gives every slot's logits; its best tokens are offered as a chain.

`BlockProposer` is what all block drafters share (cache, context rows, the pass); a proposer shapes its logits.
"""

import torch
from torch import Tensor

from dflash_train.decode.base import DraftSettings
from dflash_train.decode.tree import chain_tree
from dflash_train.decode.verify import draw, processed_probs, seeded_generator
from dflash_train.drafter.dflash import DFlashDrafter, DraftCache, draft, extend
from dflash_train.records import Features, FeatureSpec, TargetHead, Tree
from dflash_train.util.errors import UserError
from dflash_train.util.provenance import stable_hash


def draft_block_size(trained: int, wanted: int | None) -> int:
    """Slots to draft, anchor included: the trained number or a smaller cap. Raises UserError above it."""
    if wanted is not None and not 2 <= wanted <= trained:
        raise UserError("eval.block_size", got=wanted, want=f"2..{trained}, the block this drafter was trained on",
                        fix=f"eval.block_size={trained}, or null")  # fmt: skip
    return wanted or trained


class BlockProposer:
    """Holds the drafter's context of one sequence; drafts all slots of the block behind it in one pass.

    The context is the target's rows of committed tokens, positions 0 .. position-1; the row at the root's own position
    does not exist yet. A proposer adds `propose`.
    """

    def __init__(self, drafter: DFlashDrafter, head: TargetHead, settings: DraftSettings):
        self.drafter, self.head, self.settings = drafter, head, settings
        self.block_size = draft_block_size(drafter.config.block_size, settings.block_size)
        self.features = FeatureSpec(layer_ids=tuple(drafter.config.target_layer_ids))
        self.cache: DraftCache | None = None

    def start(self, token_ids: Tensor, features: Features) -> None:
        self.cache = DraftCache(self.drafter)
        self.commit(token_ids, features)

    def commit(self, token_ids: Tensor, features: Features) -> None:
        assert features.hidden.shape[0] == len(token_ids), "one target row per committed token"
        first = self.cache.length
        extend(self.drafter, self.cache, features.hidden, torch.arange(first, first + len(token_ids)))

    def draft_logits(self, root: int, position: int) -> Tensor:
        """[S-1, V] float32, row k-1 for the token at position + k."""
        return draft(self.drafter, self.head, self.cache, root, position, self.block_size)


class Proposer(BlockProposer):
    """A chain of S-1 tokens: the drafter's argmax per slot; for accept=rejection its samples and their distribution."""

    name = "dflash"

    def __init__(self, drafter: DFlashDrafter, head: TargetHead, settings: DraftSettings):
        super().__init__(drafter, head, settings)
        self.max_nodes = self.block_size
        self.samples = settings.accept == "rejection" and not settings.sampling.greedy

    def start(self, token_ids: Tensor, features: Features) -> None:
        super().start(token_ids, features)
        # A stream of its own per prompt: an answer does not depend on which prompts came before it.
        self._generator = seeded_generator(stable_hash("draft", self.settings.seed, token_ids.tolist()))

    def propose(self, root: int, position: int) -> Tree:
        logits = self.draft_logits(root, position)
        if not self.samples:
            return chain_tree(root, logits.argmax(dim=-1).tolist())
        probs = processed_probs(logits, self.settings.sampling)
        uniforms = torch.rand(len(probs), generator=self._generator, dtype=torch.float64).to(probs.device)
        unused_root_row = torch.zeros_like(probs[:1])
        return chain_tree(root, draw(probs, uniforms).tolist(), torch.cat([unused_root_row, probs]))
