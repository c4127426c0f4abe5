"""Slow, obvious twins for the target's fast paths, and random trees to try them on."""

from functools import cache

import pytest
import torch

from dflash_train.records import Tree
from dflash_train.target.tiny import make_tiny_target

FIRST_TEXT_ID, END_TEXT_ID = 7, 100


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small only lose by a second thread."""
    torch.set_num_threads(1)


@cache
def tiny(arch: str = "qwen3", **options):
    """One tiny fp32 target per shape for the whole test run; targets have no state beside their weights."""
    return make_tiny_target(arch, **options)


def random_ids(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_TEXT_ID, END_TEXT_ID, (length,), generator=generator)


def tree(token_ids, parents) -> Tree:
    """A Tree from plain lists."""
    depths = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return Tree(torch.as_tensor(token_ids), torch.tensor(parents), torch.tensor(depths))


def random_tree(num_nodes: int, seed: int) -> Tree:
    """parents[i] uniform below i: bushy and deep ones alike."""
    generator = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, num_nodes)]
    return tree(random_ids(num_nodes, seed + 1), parents)


def path_to(node: int, parents: torch.Tensor) -> list[int]:
    """Node indices from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


@torch.no_grad()
def plain_logits(target, token_ids: torch.Tensor) -> torch.Tensor:
    """The library's own full forward: i64[T] -> [T, V]."""
    return target.model(input_ids=token_ids[None], use_cache=False).logits[0]


@torch.no_grad()
def plain_hidden(target, token_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The library's own hidden_states for i64[T]: N+1 tensors [T, H]."""
    out = target.model(input_ids=token_ids[None], use_cache=False, output_hidden_states=True)
    return tuple(state[0] for state in out.hidden_states)


def rows_of(output) -> torch.Tensor:
    """A decoder layer's output [T, H] for a batch of one; some releases wrap it in a tuple."""
    return (output[0] if isinstance(output, tuple) else output)[0]


def hooked_hidden(target, token_ids: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], dict[int, torch.Tensor]]:
    """(`plain_hidden`, what hooks on the decoder layers saw in that pass: id -> [T, H])."""
    hooked = {}
    handles = [
        layer.register_forward_hook(lambda m, a, out, i=i: hooked.update({i: rows_of(out)}))
        for i, layer in enumerate(target.layers)
    ]
    states = plain_hidden(target, token_ids)
    for handle in handles:
        handle.remove()
    return states, hooked
