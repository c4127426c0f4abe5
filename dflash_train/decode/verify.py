"""The accept rules. Whatever was drafted, what comes out follows the target's own distribution.

temperature 0     from the root, walk to the child with the target's argmax token; without one, it is the bonus.
accept=sample     the same walk with the target's sample instead of its argmax: the emitted tokens are the target's
                  own samples, whatever the tree. Works for any tree drafted without looking at the sample.
accept=rejection  chains drawn from known draft probabilities q: token x stays when u * q(x) < p(x); the first one
                  that does not is replaced by a sample of max(p - q, 0), renormalised.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_train.decode.tree import is_chain
from dflash_train.records import Tree, Verdict


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution: temperature, then top_k, then top_p (Hugging Face's order).

    temperature 0 is greedy; top_p 1 and top_k 0 are off.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def processed_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [..., V] -> probabilities [..., V], float64, on the same device. Not for greedy sampling.

    top_k keeps the k largest; top_p then keeps the smallest set of the most probable tokens whose mass reaches top_p
    (always at least one); the rest is exactly 0.
    """
    assert not sampling.greedy, "a distribution needs temperature > 0"
    probs = (logits.double() / sampling.temperature).softmax(dim=-1)
    vocab_size = probs.shape[-1]
    num_kept = min(sampling.top_k, vocab_size) if sampling.top_k else vocab_size
    if num_kept == vocab_size and sampling.top_p >= 1:
        return probs
    best, token_ids = probs.topk(num_kept, dim=-1)
    if sampling.top_p < 1:
        mass_before = best.cumsum(dim=-1) - best
        best = best * (mass_before < sampling.top_p * best.sum(dim=-1, keepdim=True))
    best = best / best.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, token_ids, best)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One possible token per row by inverse CDF: probs [R, V] float64, uniforms [R] in [0, 1) -> i64[R]."""
    cdf = probs.cumsum(dim=-1)
    tokens = (cdf <= uniforms.unsqueeze(-1) * cdf[..., -1:]).sum(dim=-1)
    positive = torch.arange(probs.shape[-1], device=probs.device).where(probs > 0, -1)
    return torch.minimum(tokens, positive.amax(dim=-1))  # rounding must not step past the last possible token


def seeded_generator(seed: int) -> torch.Generator:
    """A CPU generator: the same numbers wherever the models run."""
    return torch.Generator().manual_seed(seed % (1 << 63))


class Verifier:
    """Decides which drafted tokens stay. Holds one prompt's random stream; `seed` names it (run seed and prompt id).

    Draws one uniform per tree node and round ("sample"), so that a run repeats exactly.
    """

    def __init__(self, sampling: Sampling, accept: str = "sample", seed: int = 0):
        assert accept in ("sample", "rejection"), accept
        self.sampling, self.accept = sampling, accept
        self._generator = seeded_generator(seed)

    def _uniforms(self, count: int, device: torch.device) -> Tensor:
        return torch.rand(count, generator=self._generator, dtype=torch.float64).to(device)

    def choose(self, logits: Tensor) -> list[int]:
        """The target's own token after each row: logits [R, V] -> R token ids (argmax, or one sample each)."""
        if self.sampling.greedy:
            return logits.argmax(dim=-1).tolist()
        probs = processed_probs(logits, self.sampling)
        return draw(probs, self._uniforms(len(probs), probs.device)).tolist()

    def verify(self, tree: Tree, logits: Tensor) -> Verdict:
        """logits: [M, V], row i for the token after node i."""
        assert logits.shape[0] == len(tree), (logits.shape, len(tree))
        if self.accept == "rejection" and not self.sampling.greedy and len(tree) > 1:
            return self._reject(tree, processed_probs(logits, self.sampling))
        return follow(tree, self.choose(logits))

    def _reject(self, tree: Tree, probs: Tensor) -> Verdict:
        """Speculative sampling on a chain: probs [M, V] of the target against tree.draft_probs [M, V]."""
        assert is_chain(tree) and tree.draft_probs is not None, "accept=rejection needs a chain with its draft_probs"
        num_drafts = tree.num_draft_nodes
        drafted = tree.token_ids[1:].to(probs.device)
        draft_probs = tree.draft_probs[1:].to(probs.device, torch.float64)
        p = probs[:-1].gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
        q = draft_probs.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
        kept = (self._uniforms(num_drafts, probs.device) * q < p).tolist()
        num_kept = kept.index(False) if False in kept else num_drafts

        last = probs[num_kept]
        if num_kept < num_drafts:
            residual = (last - draft_probs[num_kept]).clamp(min=0)
            last = residual if bool(residual.sum() > 0) else last  # p == q up to rounding: p itself is right
        bonus = draw(last.unsqueeze(0), self._uniforms(1, probs.device))
        return Verdict(list(range(num_kept + 1)), int(bonus))


def follow(tree: Tree, target_tokens: list[int]) -> Verdict:
    """Walk from the root to the child that carries the target's token, as long as there is one.

    target_tokens[i] is the target's token after node i.
    """
    child = dict(zip(zip(tree.parents.tolist(), tree.token_ids.tolist()), range(len(tree))))
    path = [0]
    while (node := child.get((path[-1], target_tokens[path[-1]]))) is not None:
        path.append(node)
    return Verdict(path, target_tokens[path[-1]])
