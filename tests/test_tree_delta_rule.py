"""The tree op of Gated DeltaNet layers against its twin, the recurrence walked token by token along every path."""

import pytest
import torch

from dflash_train.target.attention import ancestor_mask
from dflash_train.target.tree_delta_rule import (
    commit_state,
    conv_windows,
    path_gates,
    recurrent_delta_rule,
    tree_conv,
    tree_delta_rule,
)  # fmt: skip
from dflash_train.util.hf import transformers

HF = transformers.models.qwen3_5.modeling_qwen3_5


def make_parents(kind: str, num_nodes: int, seed: int = 0) -> torch.Tensor:
    """chain | star | uniform (any earlier node) | deep (one of the last three) | ddtree (best first over scores)."""
    generator = torch.Generator().manual_seed(seed)
    pick = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))
    if kind == "ddtree" and num_nodes > 1:
        from dflash_train.decode.tree import build_ddtree

        return build_ddtree(0, torch.randn(15, 64, generator=generator) * 3, num_nodes - 1).parents
    choose = {"chain": lambda i: i - 1, "ddtree": lambda i: 0, "star": lambda i: 0, "uniform": lambda i: pick(0, i),
              "deep": lambda i: pick(max(0, i - 3), i)}[kind]  # fmt: skip
    return torch.tensor([-1] + [choose(i) for i in range(1, num_nodes)])


def path_to(parents: torch.Tensor, node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def inputs(num_nodes: int, dtype=torch.float64, dim=16, key_heads=2, heads=4, seed=0, gate=0.3):
    """q, k, v, beta, log-gates (about -gate each) of random nodes, and a state as a long prompt leaves it."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    tensors = (draw(num_nodes, key_heads, dim), draw(num_nodes, key_heads, dim), draw(num_nodes, heads, dim),
               draw(num_nodes, heads).sigmoid(), -gate * draw(num_nodes, heads).exp())  # fmt: skip
    return [t.to(dtype) for t in tensors], draw(heads, dim, dim).to(dtype)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)).item()


def check_every_path(tensors, parents, state, out, stash, limit, nodes=None):
    for node in nodes or range(len(parents)):
        path = torch.tensor(path_to(parents, node))
        expected, after = recurrent_delta_rule(*(t[path] for t in tensors), state)
        assert relative(out[node], expected[-1]) <= limit
        assert relative(commit_state(state, stash, path), after) <= limit


@pytest.mark.parametrize("kind", ["chain", "star", "uniform", "deep", "ddtree"])
@pytest.mark.parametrize("num_nodes", [1, 2, 7, 64])
@pytest.mark.parametrize("with_state", [True, False])
def test_the_op_equals_the_recurrence_on_every_path_in_float64(kind, num_nodes, with_state):
    parents = make_parents(kind, num_nodes, seed=num_nodes)
    tensors, state = inputs(num_nodes, seed=num_nodes)
    state = state if with_state else torch.zeros_like(state)
    out, stash = tree_delta_rule(*tensors, ancestor_mask(parents), state)
    check_every_path(tensors, parents, state, out, stash, 1e-13)


def test_a_thousand_nodes_are_exact_in_float64():
    parents = make_parents("deep", 1024)
    tensors, state = inputs(1024, gate=0.05)
    out, stash = tree_delta_rule(*tensors, ancestor_mask(parents), state)
    check_every_path(tensors, parents, state, out, stash, 1e-12, nodes=[0, 500, 1000, 1022, 1023])


@pytest.mark.parametrize("num_nodes", [16, 128, 512])
def test_float32_at_a_real_head_size_is_rounding(num_nodes):
    """5e-7 of the output and 3e-7 of the state are the prototype's figures."""
    parents = make_parents("deep", num_nodes)
    tensors, state = inputs(num_nodes, torch.float32, dim=128, gate=0.1)
    out, stash = tree_delta_rule(*tensors, ancestor_mask(parents), state)
    expected, exact = tree_delta_rule(*(t.double() for t in tensors), ancestor_mask(parents), state.double())
    path = torch.tensor(path_to(parents, num_nodes - 1))
    assert relative(out, expected) <= 6e-7
    assert relative(commit_state(state, stash, path), commit_state(state.double(), exact, path)) <= 4e-7


def test_the_twin_is_hugging_faces_recurrence():
    (q, k, v, beta, gates), state = inputs(9, heads=2)
    batch = [t[None].float() for t in (q, k, v)]
    args = {"g": gates[None].float(), "beta": beta[None].float(), "initial_state": state[None].float(),
            "output_final_state": True, "use_qk_l2norm_in_kernel": True}  # fmt: skip
    out, after = HF.torch_recurrent_gated_delta_rule(*batch, **args)
    expected, last = recurrent_delta_rule(q, k, v, beta, gates, state)
    assert relative(out[0], expected) <= 1e-6 and relative(after[0], last) <= 1e-6


def test_two_hundred_random_trees():
    """Trap 27: any tree, any size, from any state."""
    worst = 0.0
    for seed in range(200):
        kind = ["chain", "star", "uniform", "deep", "ddtree"][seed % 5]
        num_nodes = 1 + (seed * 37) % 64
        parents = make_parents(kind, num_nodes, seed)
        tensors, state = inputs(num_nodes, seed=seed, dim=8, gate=[0.01, 0.3, 5.0][seed % 3])
        out, stash = tree_delta_rule(*tensors, ancestor_mask(parents), state)
        node = (seed * 13) % num_nodes
        path = torch.tensor(path_to(parents, node))
        expected, after = recurrent_delta_rule(*(t[path] for t in tensors), state)
        worst = max(worst, relative(out[node], expected[-1]), relative(commit_state(state, stash, path), after))
    assert worst <= 1e-12


def test_extreme_gates_stay_finite_where_the_factored_form_does_not():
    parents = make_parents("chain", 64)
    tensors, state = inputs(64, gate=20.0)
    single = [t.float() for t in tensors]
    out, stash = tree_delta_rule(*single, ancestor_mask(parents), state.float())
    assert out.isfinite().all() and commit_state(state.float(), stash, torch.arange(64)).isfinite().all()
    factored = stash.gates.float().exp()[:, None] * (-stash.gates.float()).exp()[None]
    assert not factored.isfinite().all()
    check_every_path(single, parents, state.float(), out, stash, 1e-5, nodes=[0, 31, 63])


def test_path_gates_lose_nothing_over_a_long_path():
    gates = -torch.rand(1024, 4, dtype=torch.float32) * 10
    exact = gates.double().cumsum(0)
    summed = path_gates(gates, torch.ones(1024, 1024).tril().bool())
    assert summed.dtype == torch.float64 and (summed - exact).abs().max() < 1e-9
    assert (gates.cumsum(0).double() - exact).abs().max() > 1e-5  # what float32 sums would have lost


def test_padding_under_the_root_changes_no_other_node_and_nan_would_poison():
    parents = make_parents("uniform", 20)
    tensors, state = inputs(20)
    out, _ = tree_delta_rule(*tensors, ancestor_mask(parents), state)
    padded = [torch.cat([t, torch.ones_like(t[:5])]) for t in tensors]
    padded[4][20:] = -1.0
    more = torch.cat([parents, torch.zeros(5, dtype=torch.long)])
    with_padding, _ = tree_delta_rule(*padded, ancestor_mask(more), state)
    assert relative(with_padding[:20], out) <= 1e-13
    padded[2][22] = float("nan")
    poisoned, _ = tree_delta_rule(*padded, ancestor_mask(more), state)
    assert poisoned[20:].isnan().any()


@pytest.mark.parametrize("kind", ["chain", "star", "uniform", "deep"])
def test_the_convolution_follows_each_path_and_runs_on_into_the_cached_rows(kind):
    """Trap 26: in flat order the convolution mixes siblings."""
    parents = make_parents(kind, 24, seed=3)
    generator = torch.Generator().manual_seed(1)
    cached, nodes = torch.randn(3, 6, generator=generator), torch.randn(24, 6, generator=generator)
    weight = torch.randn(6, 4, generator=generator)
    windows = conv_windows(parents, 4)
    out = tree_conv(torch.cat([cached, nodes]), windows, weight, None)
    for node in range(24):
        column = torch.cat([cached, nodes[path_to(parents, node)]])
        plain = torch.nn.functional.conv1d(column.T[None], weight[:, None], groups=6)[0, :, -1]
        assert torch.allclose(out[node], plain, atol=1e-5)
        assert torch.equal(torch.cat([cached, nodes])[windows[node, 1:]], column[-3:])  # the next cached rows
    flat = torch.nn.functional.conv1d(torch.cat([cached, nodes]).T[None], weight[:, None], groups=6)[0].T
    assert torch.allclose(out, flat, atol=1e-5) == (kind == "chain")


def test_three_hundred_commits_in_float32_do_not_drift():
    generator = torch.Generator().manual_seed(0)
    exact = torch.zeros(4, 16, 16, dtype=torch.float64)
    single = exact.float()
    for round_number in range(300):
        tensors, _ = inputs(8, seed=round_number, gate=0.02)
        parents = make_parents("uniform", 8, seed=round_number)
        path = torch.tensor(path_to(parents, int(torch.randint(8, (1,), generator=generator))))
        _, stash = tree_delta_rule(*(t.float() for t in tensors), ancestor_mask(parents), single)
        single = commit_state(single, stash, path)
        _, exact = recurrent_delta_rule(*(t.float().double()[path] for t in tensors), exact)
    assert relative(single, exact) <= 1e-6
