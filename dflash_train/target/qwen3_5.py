"""Sessions on targets with Gated DeltaNet layers (Qwen3.5 / Qwen3.6, their MoE siblings, Qwen3-Next).

The layers' own weights are driven over our own cache: transformers' classes for it change between releases, and its
forward of several tokens over a cached state is silently wrong for a tree. Capture and answering use the library's
forward as it is; only a session's passes are routed here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dflash_train.records import Features, FeatureSpec, Tree
from dflash_train.target.attention import HFSession, ancestor_mask
from dflash_train.target.tree_delta_rule import TreeStash, commit_state, conv_windows, tree_conv, tree_delta_rule
from dflash_train.util.hf import transformers

# A prompt is a chain, taken in pieces: the op's cost grows with the square of the nodes.
PREFILL_NODES = 64


@dataclass(frozen=True)
class TreeShape:
    """What every GDN layer needs to know of a tree: ancestors bool[M, M] and conv_windows i64[M, W]."""

    ancestors: Tensor
    windows: Tensor

    @classmethod
    def of(cls, parents: Tensor, width: int) -> "TreeShape":
        return cls(ancestor_mask(parents), conv_windows(parents, width))

    def to(self, device: torch.device) -> "TreeShape":
        return TreeShape(self.ancestors.to(device), self.windows.to(device))


class DeltaLayer:
    """One GDN layer and its state in one sequence.

    rows [W-1, C]: the convolution's last inputs, in the model's dtype (they are its own outputs, kept as they are);
    state [Hv, K, V] float32 (float64 for a float64 model): a bf16 state drifts by 7e-3 within 300 commits.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        weight = module.conv1d.weight  # [C, 1, W]
        self.activation = transformers.activations.ACT2FN[module.activation]
        self.width = weight.shape[-1]
        self.rows = torch.zeros(self.width - 1, weight.shape[0], dtype=weight.dtype, device=weight.device)
        self.state = torch.zeros(module.num_v_heads, module.head_k_dim, module.head_v_dim, device=weight.device,
                                 dtype=torch.promote_types(weight.dtype, torch.float32))  # fmt: skip
        self.pending: tuple[Tensor, TreeShape, TreeStash] | None = None

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden [M, D] -> convolution inputs [M, C], z [M, Hv, V], beta [M, Hv], log-gates [M, Hv] (float32)."""
        m = self.module
        if hasattr(m, "in_proj_qkvz"):  # Qwen3-Next packs them by key head
            q, k, v, z, b, a = m.fix_query_key_value_ordering(m.in_proj_qkvz(hidden)[None], m.in_proj_ba(hidden)[None])
            mixed = torch.cat([part[0].flatten(1) for part in (q, k, v)], dim=-1)
            z, b, a = z[0], b[0], a[0]
        else:
            mixed, z, b, a = m.in_proj_qkv(hidden), m.in_proj_z(hidden), m.in_proj_b(hidden), m.in_proj_a(hidden)
        to_float = torch.promote_types(a.dtype, torch.float32)
        log_gates = -m.A_log.to(to_float).exp() * nn.functional.softplus(a.to(to_float) + m.dt_bias)
        return mixed, z.reshape(len(hidden), m.num_v_heads, m.head_v_dim), b.sigmoid(), log_gates

    def mix(self, mixed: Tensor, beta: Tensor, log_gates: Tensor, shape: TreeShape) -> Tensor:
        """A tree's nodes over the committed state -> [M, Hv, V] in the model's dtype; `commit` may follow."""
        m = self.module
        rows = torch.cat([self.rows, mixed])
        mixed = self.activation(tree_conv(rows, shape.windows, m.conv1d.weight.squeeze(1), m.conv1d.bias))
        queries, keys, values = mixed.split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
        heads = lambda t, dim: t.reshape(len(t), -1, dim)
        out, stash = tree_delta_rule(heads(queries, m.head_k_dim), heads(keys, m.head_k_dim),
                                     heads(values, m.head_v_dim), beta, log_gates, shape.ancestors,
                                     self.state)  # fmt: skip
        self.pending = rows, shape, stash
        return out.to(mixed.dtype)

    def commit(self, path: Tensor) -> None:
        """Keep the state and the convolution's inputs behind the last node of the path."""
        rows, shape, stash = self.pending
        path = path.to(self.state.device)
        self.rows = rows[shape.windows[path[-1:], 1:][0]]  # path[-1] alone would make the host wait for the GPU
        self.state = commit_state(self.state, stash, path)
        self.pending = None

    def forward(self, shapes: list[TreeShape], prefill: bool, hidden_states: Tensor, **unused) -> Tensor:
        """In place of the module's forward: hidden_states [1, M, D] -> [1, M, D]. A prompt's chain pieces are committed
        one after the other; a tree is left to `commit`."""
        mixed, z, beta, log_gates = self.project(hidden_states[0])
        outputs, start = [], 0
        for shape in shapes:
            piece = slice(start, start + len(shape.ancestors))
            shape = shape.to(mixed.device)
            outputs.append(self.mix(mixed[piece], beta[piece], log_gates[piece], shape))
            if prefill:
                self.commit(torch.arange(len(shape.ancestors), device=mixed.device))
            start = piece.stop
        out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        normed = self.module.norm(out.reshape(-1, self.module.head_v_dim), z.reshape(-1, self.module.head_v_dim))
        return self.module.out_proj(normed.reshape(1, len(out), -1))


class HybridSession(HFSession):
    """One sequence on a target with GDN and full-attention layers (protocol: base.TargetSession)."""

    def __init__(self, target, capacity: int, features: FeatureSpec):
        super().__init__(target, capacity, features)
        self.delta_layers = [DeltaLayer(target.layers[i].linear_attn) for i in target.delta_layers]
        self.width = self.delta_layers[0].width
        self._shapes: list[TreeShape] = []
        self._prefill = False

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor) -> tuple[Tensor, Features]:
        counts = [min(PREFILL_NODES, len(token_ids) - start) for start in range(0, len(token_ids), PREFILL_NODES)]
        chains = {count: TreeShape.of(torch.arange(count) - 1, self.width) for count in set(counts)}
        self._shapes, self._prefill = [chains[count].to(self.target.device) for count in counts], True
        return super().prefill(token_ids)

    @torch.inference_mode()
    def forward(self, tree: Tree) -> tuple[Tensor, Features]:
        self._shapes, self._prefill = [TreeShape.of(tree.parents, self.width).to(self.target.device)], False
        return super().forward(tree)

    def _keep(self, path: list[int]) -> None:
        super()._keep(path)
        nodes = torch.tensor(path).to(self.target.device)
        for layer in self.delta_layers:
            layer.commit(nodes)

    @contextmanager
    def _layers_by_session(self) -> Iterator[None]:
        before = [layer.module.__dict__.get("forward") for layer in self.delta_layers]
        for layer in self.delta_layers:
            layer.module.forward = partial(layer.forward, self._shapes, self._prefill)
        try:
            with super()._layers_by_session():
                yield
        finally:
            for layer, forward in zip(self.delta_layers, before, strict=True):
                del layer.module.forward
                if forward is not None:  # whoever wrapped the module before us, such as accelerate
                    layer.module.forward = forward
