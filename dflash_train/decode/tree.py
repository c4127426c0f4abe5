"""Trees of drafted tokens: the chain, DDTree's best-first tree, and what makes a tree well formed.

A tree is topologically ordered: node 0 is the last committed token, parents[i] < i, siblings carry different tokens.
Positions follow depth, never the node's index: node i sits at (tokens before the root) + depths[i].
"""

import heapq

import torch
from torch import Tensor

from dflash_train.records import Tree


def chain_tree(root: int, token_ids: list[int], draft_probs: Tensor | None = None) -> Tree:
    """A chain root -> token_ids[0] -> token_ids[1] ... as a Tree of 1 + len(token_ids) nodes."""
    num_nodes = len(token_ids) + 1
    order = torch.arange(num_nodes)
    return Tree(torch.tensor([root, *token_ids]), order - 1, order, draft_probs)


def build_ddtree(root: int, logits: Tensor, budget: int) -> Tree:
    """The `budget` most probable prefixes under the product of the slots' marginals, as one tree (DDTree, best first).

    logits: [S-1, V] of one draft pass, row d for depth d+1, any device. A prefix's score is the sum of float32
    log-softmax values over the full vocabulary, at temperature 1. Nodes come in the order in which they were taken, so
    the tree of a smaller budget is the beginning of a larger one's. Equal scores: the smaller rank tuple first, and
    ranks order equal logits by token id. Fewer nodes than the budget only when there are no more prefixes.
    """
    assert logits.dim() == 2 and budget >= 1, (logits.shape, budget)
    num_depths, vocab_size = logits.shape
    token_ids, log_probs = top_tokens(logits, min(budget, vocab_size))
    num_ranks = len(token_ids[0]) if num_depths else 0

    tokens, parents, depths = [root], [-1], [0]
    # An entry is (-score, ranks of the prefix, parent node, parent's score); the next sibling and the first child of a
    # taken prefix are the only new candidates, and neither scores above it.
    heap = [(-log_probs[0][0], (0,), 0, 0.0)] if num_depths else []
    while heap and len(tokens) <= budget:
        negative_score, ranks, parent, parent_score = heapq.heappop(heap)
        depth, rank = len(ranks), ranks[-1]
        if negative_score == float("inf"):  # only impossible prefixes are left
            break
        node = len(tokens)
        tokens.append(token_ids[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        if rank + 1 < num_ranks:
            sibling_score = parent_score + log_probs[depth - 1][rank + 1]
            heapq.heappush(heap, (-sibling_score, (*ranks[:-1], rank + 1), parent, parent_score))
        if depth < num_depths:
            child_score = log_probs[depth][0] - negative_score
            heapq.heappush(heap, (-child_score, (*ranks, 0), node, -negative_score))
    return Tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths))


def top_tokens(logits: Tensor, num_ranks: int) -> tuple[list[list[int]], list[list[float]]]:
    """logits [D, V] -> per depth the num_ranks best token ids and their float32 log-probabilities, best first.

    Equal logits are ordered by token id, so that the order does not depend on the device's top-k.
    """
    logits = logits.float()
    values, token_ids = logits.topk(num_ranks, dim=-1)
    by_id = token_ids.argsort(dim=-1)
    values, token_ids = values.gather(-1, by_id), token_ids.gather(-1, by_id)
    by_value = values.argsort(dim=-1, descending=True, stable=True)
    values, token_ids = values.gather(-1, by_value), token_ids.gather(-1, by_value)
    log_probs = values - logits.logsumexp(dim=-1, keepdim=True)
    assert not log_probs.isnan().any(), "draft logits are not finite"
    return token_ids.tolist(), log_probs.tolist()


def limit_depth(tree: Tree, max_depth: int) -> Tree:
    """The tree without nodes deeper than max_depth. What is accepted up to that depth does not change."""
    if int(tree.depths.max()) <= max_depth:
        return tree
    keep = tree.depths <= max_depth
    new_index = keep.cumsum(0) - 1
    parents = tree.parents[keep]
    parents = torch.where(parents < 0, parents, new_index[parents.clamp(min=0)])
    draft_probs = None if tree.draft_probs is None else tree.draft_probs[keep.to(tree.draft_probs.device)]
    return Tree(tree.token_ids[keep], parents, tree.depths[keep], draft_probs)


def is_chain(tree: Tree) -> bool:
    return bool((tree.parents == torch.arange(len(tree)) - 1).all())


def check_tree(tree: Tree, vocab_size: int | None = None) -> None:
    """Assert what `Tree` promises: order, depths, no two siblings with the same token, ids inside the vocabulary."""
    num_nodes = len(tree)
    assert num_nodes >= 1 and tree.parents.shape == tree.depths.shape == (num_nodes,), "one parent and depth per node"
    parents, depths, token_ids = tree.parents.tolist(), tree.depths.tolist(), tree.token_ids.tolist()
    assert parents[0] == -1 and depths[0] == 0, "node 0 is the root"
    for i in range(1, num_nodes):
        assert 0 <= parents[i] < i, f"parent {parents[i]} of node {i} must come before it"
        assert depths[i] == depths[parents[i]] + 1, f"depth {depths[i]} of node {i} is not its parent's plus 1"
    edges = set(zip(parents, token_ids))
    assert len(edges) == num_nodes, "two siblings carry the same token"
    assert vocab_size is None or 0 <= min(token_ids) <= max(token_ids) < vocab_size, "token id outside the vocabulary"
