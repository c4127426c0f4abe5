"""A draft tree through a Gated DeltaNet layer in one pass, and the accepted state rebuilt: pure tensor functions.

A recurrent state cannot be cropped and would have to be forked at every branch. Instead the states of all nodes are
written as one triangular system over the cached state, and the accepted node's state is rebuilt from what the solution
keeps. The same mathematics as TreeWY (arXiv 2608.20961); Weaver (arXiv 2607.06763) serves trees on this model family.
The twin is `recurrent_delta_rule`: one path, token by token.

Shapes: M nodes in topological order, Hk key heads, Hv value heads (head h reads key head h // (Hv / Hk)), K key and
V value dims of a head, C conv channels, W conv kernel width. `ancestors` bool[M, M]: column j is node i or above it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

QK_EPS = 1e-6


@dataclass(frozen=True)
class TreeStash:
    """What a pass leaves for `commit_state`: unit keys [M, Hk, K] and updates u [M, Hv, V] in the state's dtype (bf16
    would cost 3e-3 of the state), gates [M, Hv] float64, the log-gates summed from the root to each node."""

    keys: Tensor
    updates: Tensor
    gates: Tensor


def unit(x: Tensor) -> Tensor:
    """Rows over the last dim scaled to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + QK_EPS)


def path_gates(log_gates: Tensor, ancestors: Tensor) -> Tensor:
    """Log-gates [M, Hv] summed along each node's path, float64: in float32 the differences of long sums are off by up
    to 1e-2, and M x Hv numbers cost nothing."""
    return ancestors.double() @ log_gates.double()


def tree_delta_rule(queries: Tensor, keys: Tensor, values: Tensor, beta: Tensor, log_gates: Tensor, ancestors: Tensor,
                    state: Tensor) -> tuple[Tensor, TreeStash]:  # fmt: skip
    """Outputs of all M nodes over the cached state in one pass.

    queries, keys [M, Hk, K] as the convolution gives them (normalised here, queries scaled by K^-0.5); values
    [M, Hv, V]; beta [M, Hv] in 0..1; log_gates [M, Hv] <= 0; state [Hv, K, V] float32 or float64, which is the dtype
    computed in -> (out [M, Hv, V], TreeStash). The state is not changed.

    With G_i the path's log-gates and D_ij = G_i - G_j <= 0 for ancestors j:
        (I + A) U = beta (V - e^G K S)      A_ij = [j strict ancestor of i] beta_i (k_i . k_j) e^D_ij
        out       = e^G (Q S) + ([j ancestor-or-self of i] (q_i . k_j) e^D_ij) U
    Every exponent is subtracted, masked to -inf, and only then exponentiated: e^G_i e^-G_j overflows.
    """
    dtype, key_dim, heads_a_key = state.dtype, state.shape[1], state.shape[0] // keys.shape[1]
    share = lambda t: t.repeat_interleave(heads_a_key, dim=0)  # [Hk, ...] -> [Hv, ...]
    q_HMK = unit(queries.to(dtype)).mul(key_dim**-0.5).transpose(0, 1)
    keys = unit(keys.to(dtype))
    k_HMK = keys.transpose(0, 1)
    v_HMV, beta_HM1 = values.to(dtype).transpose(0, 1), beta.to(dtype).T[..., None]

    gates = path_gates(log_gates, ancestors)
    gates_HM = gates.T
    decay_HMM = (gates_HM[:, :, None] - gates_HM[:, None, :]).to(dtype).masked_fill_(~ancestors, float("-inf")).exp_()
    carried_HM1 = gates_HM.to(dtype).exp()[..., None]

    a_HMM = share(k_HMK @ k_HMK.transpose(1, 2)) * decay_HMM * beta_HM1  # its diagonal is not read
    k_state, q_state = share(k_HMK) @ state, share(q_HMK) @ state
    wanted = beta_HM1 * (v_HMV - carried_HM1 * k_state)
    updates = torch.linalg.solve_triangular(a_HMM, wanted, upper=False, unitriangular=True)
    out = carried_HM1 * q_state + (share(q_HMK @ k_HMK.transpose(1, 2)) * decay_HMM) @ updates
    return out.transpose(0, 1), TreeStash(keys, updates.transpose(0, 1), gates)


def commit_state(state: Tensor, stash: TreeStash, path: Tensor) -> Tensor:
    """State [Hv, K, V] after the last node of `path` (i64[P] node ids, root first); touches the path's nodes only."""
    gates = stash.gates[path]
    decay_PH = (gates[-1] - gates).to(state.dtype).exp()
    keys = stash.keys[path].repeat_interleave(state.shape[0] // stash.keys.shape[1], dim=1)
    added = torch.einsum("phk,phv->hkv", keys * decay_PH[..., None], stash.updates[path])
    return gates[-1].to(state.dtype).exp()[:, None, None] * state + added


def recurrent_delta_rule(queries: Tensor, keys: Tensor, values: Tensor, beta: Tensor, log_gates: Tensor,
                         state: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The twin: one path of M tokens, token by token -> (out [M, Hv, V], state after the last one). Arguments as in
    `tree_delta_rule`."""
    dtype, share = state.dtype, state.shape[0] // keys.shape[1]
    q = (unit(queries.to(dtype)) * state.shape[1] ** -0.5).repeat_interleave(share, dim=1)
    k = unit(keys.to(dtype)).repeat_interleave(share, dim=1)
    outputs = []
    for i in range(len(keys)):
        state = state * log_gates[i].to(dtype).exp()[:, None, None]
        missing = values[i].to(dtype) - torch.einsum("hk,hkv->hv", k[i], state)
        state = state + torch.einsum("hk,hv->hkv", k[i], beta[i].to(dtype)[:, None] * missing)
        outputs.append(torch.einsum("hk,hkv->hv", q[i], state))
    return torch.stack(outputs), state


def conv_windows(parents: Tensor, width: int) -> Tensor:
    """parents i64[M] -> i64[M, W]: for each node the rows its causal convolution reads, oldest first.

    Rows 0 .. W-2 are the cached ones (the last W-1 committed tokens), row W-1 + i is node i; above the root a path runs
    on into the cached rows. The newest W-1 entries of the accepted node's window are the next cached rows.
    """
    cached = width - 1
    current = torch.arange(len(parents)) + cached
    columns = [current]
    for _ in range(cached):
        above = parents[(current - cached).clamp_min(0)]
        of_node = torch.where(above >= 0, above + cached, cached - 1)
        current = torch.where(current >= cached, of_node, current - 1)
        columns.append(current)
    return torch.stack(columns[::-1], dim=1)


def tree_conv(rows: Tensor, windows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Depthwise causal convolution along each node's own path: rows [W-1 + M, C], weight [C, W] -> [M, C] in rows'
    dtype, summed in float32 (float64 for float64 rows)."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    out = (rows.to(dtype)[windows] * weight.to(dtype).T).sum(1)
    return (out if bias is None else out + bias.to(dtype)).to(rows.dtype)
