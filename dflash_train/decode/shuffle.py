"""An ablation: the drafter keeps its weights, tokens and positions, but reads the target's rows in a wrong order.

A trained drafter that accepts as much this way never used the hidden states.
"""

import torch
from torch import Tensor

from dflash_train.decode.base import Proposer
from dflash_train.decode.verify import seeded_generator
from dflash_train.records import Features, Tree
from dflash_train.util.provenance import stable_hash


class ShuffledFeatures:
    """Wraps a proposer. The prompt's rows are permuted over time; each later row is replaced by one drawn from all rows
    seen so far, since permuting the few rows of one round would leave them in place. Seeded by (seed, prompt)."""

    def __init__(self, proposer: Proposer, seed: int):
        self.proposer, self.seed = proposer, seed
        self.name = f"{proposer.name}, rows shuffled"
        self.features, self.max_nodes = proposer.features, proposer.max_nodes

    def start(self, token_ids: Tensor, features: Features) -> None:
        self._generator = seeded_generator(stable_hash("shuffle", self.seed, token_ids.tolist()))
        self._seen = features
        order = torch.randperm(len(token_ids), generator=self._generator)
        self.proposer.start(token_ids, features.select(order.to(features.hidden.device)))

    def propose(self, root: int, position: int) -> Tree:
        return self.proposer.propose(root, position)

    def commit(self, token_ids: Tensor, features: Features) -> None:
        self._seen = _joined(self._seen, features)
        rows = torch.randint(self._seen.hidden.shape[0], (len(token_ids),), generator=self._generator)
        self.proposer.commit(token_ids, self._seen.select(rows.to(features.hidden.device)))


def _joined(a: Features, b: Features) -> Features:
    join = lambda x, y: None if x is None else torch.cat([x, y])
    return Features(join(a.hidden, b.hidden), join(a.last_hidden, b.last_hidden))
