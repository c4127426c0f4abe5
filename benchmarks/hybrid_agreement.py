"""How near a tree pass comes to Hugging Face's own forward, for one layer of each type and for the whole model.

The twin of a tree is each of its root-to-leaf paths behind the prefix, forwarded as plain text. Both round, so both
are also measured against the same weights in float64 (hybrid_exact.py). A tree whose layers see its nodes in flat
order is the control: an agreement figure means nothing unless it can be bad.
"""

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hybrid_exact import exact_attention, exact_delta, exact_model, plain_attention, rope
from torch import Tensor, nn

from dflash_train.records import FeatureSpec, Tree
from dflash_train.target.attention import HFSession, KVCache, attention_by_session, tree_bias
from dflash_train.target.hf import HFTarget
from dflash_train.target.qwen3_5 import PREFILL_NODES, DeltaLayer, HybridSession, TreeShape
from dflash_train.util.hf import transformers


def chain(num_nodes: int) -> Tensor:
    """Parents of a chain."""
    return torch.arange(num_nodes) - 1


def random_tree(num_nodes: int, vocab: int, seed: int) -> Tree:
    """Random tokens; each node hangs under any earlier one."""
    generator = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, num_nodes)]
    return tree_of(torch.randint(vocab, (num_nodes,), generator=generator), torch.tensor(parents))


def tree_of(token_ids: Tensor, parents: Tensor) -> Tree:
    depths = []
    for parent in parents.tolist():
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return Tree(token_ids, parents, torch.tensor(depths))


@dataclass(frozen=True)
class Paths:
    """The L root-to-leaf paths of a tree, the longest of D nodes, and where each of the M nodes is found in them.

    nodes i64[L, D], filled up with node 0 on the right, which no earlier column can see; lengths [L]; row, column
    i64[M].
    """

    nodes: Tensor
    lengths: list[int]
    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, parents: Tensor) -> "Paths":
        inner, paths = set(parents.tolist()), []
        for leaf in (node for node in range(len(parents)) if node not in inner):
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, int(parents[path[0]]))
            paths.append(path)
        row, column = torch.zeros(2, len(parents), dtype=torch.int64)
        for i, path in enumerate(paths):
            row[path], column[path] = i, torch.arange(len(path))
        longest = max(map(len, paths))
        filled = torch.tensor([path + [0] * (longest - len(path)) for path in paths])
        return cls(filled, [len(path) for path in paths], row, column)

    def longest(self) -> list[int]:
        return self.nodes[max(range(len(self.lengths)), key=self.lengths.__getitem__)].tolist()

    def behind(self, prefix: Tensor, of_nodes: Tensor) -> Tensor:
        """prefix [P, ...] and the nodes' rows or tokens [M, ...] -> [L, P + D, ...]."""
        nodes = of_nodes[self.nodes.to(of_nodes.device)]
        return torch.cat([prefix.expand(len(nodes), *prefix.shape), nodes], dim=1)

    def pick(self, rows: Tensor) -> Tensor:
        """[L, D, ...] or [L, P + D, ...] -> the nodes' [M, ...]."""
        columns = self.column + rows.shape[1] - self.nodes.shape[1]
        return rows[self.row.to(rows.device), columns.to(rows.device)]


def error(got: Tensor, want: Tensor) -> dict[str, float]:
    """rms: |got - want| / |want| over all numbers; max: largest difference over largest value; cosine: the lowest of a
    row (last dim)."""
    got, want = got.double(), want.double()
    difference = got - want
    return {"rms": float(difference.norm() / want.norm()),
            "max": float(difference.abs().max() / want.abs().max()),
            "cosine": float(F.cosine_similarity(got, want, dim=-1).min())}  # fmt: skip


# ---------------------------------------------------------------- one layer of each type


@torch.inference_mode()
def delta_agreement(module: nn.Module, prefix: Tensor, nodes: Tensor, parents: Tensor) -> dict:
    """prefix [P, D] and nodes [M, D] are what the layer reads -> errors of ours, of Hugging Face's and of controls."""
    paths, layer = Paths.of(parents), DeltaLayer(module)
    batch = paths.behind(prefix, nodes)
    exact, states = exact_delta(module, batch)
    want, theirs = paths.pick(exact), paths.pick(module(hidden_states=batch))
    pieces = [TreeShape.of(chain(len(piece)), layer.width).to(nodes.device) for piece in prefix.split(PREFILL_NODES)]
    layer.forward(pieces, True, prefix[None])
    tree, flat = (TreeShape.of(p, layer.width).to(nodes.device) for p in (parents, chain(len(parents))))
    of = lambda ancestors, windows: layer.forward([TreeShape(ancestors, windows)], False, nodes[None])[0]
    controls = {"control: op in flat order": error(of(flat.ancestors, tree.windows), want),
                "control: convolution in flat order": error(of(tree.ancestors, flat.windows), want)}  # fmt: skip
    ours = of(tree.ancestors, tree.windows)
    longest = paths.longest()
    layer.commit(torch.tensor(longest))
    state = states[paths.row[longest[-1]]]
    return {"ours": error(ours, want), "hugging face": error(theirs, want), **controls,
            "ours against hugging face": error(ours, theirs),
            "our committed state": error(layer.state.flatten(1), state.flatten(1))}  # fmt: skip


@torch.inference_mode()
def attention_agreement(target: HFTarget, layer_id: int, prefix: Tensor, nodes: Tensor, parents: Tensor) -> dict:
    """As `delta_agreement`, for a full-attention layer."""
    module, paths, config = target.layers[layer_id].self_attn, Paths.of(parents), target.text_config
    batch, num_prefix = paths.behind(prefix, nodes), len(prefix)
    want = paths.pick(exact_attention(target, module, batch))
    theirs = paths.pick(plain_attention(target, module, batch))
    groups = config.num_attention_heads // config.num_key_value_heads
    cache = KVCache({layer_id: prefix.device}, config.num_key_value_heads, target.head_dim, num_prefix + len(nodes),
                    prefix.dtype)  # fmt: skip

    def by_session(rows: Tensor, positions: Tensor, bias: Tensor | None) -> Tensor:
        with attention_by_session(config):
            return module(hidden_states=rows[None], attention_mask=None, session_cache=cache, session_bias=bias,
                          position_embeddings=rope(target, positions, rows))[0][0]  # fmt: skip

    by_session(prefix, torch.arange(num_prefix), None)
    cache.length = num_prefix
    tree, flat = (tree_of(torch.zeros_like(parents), p) for p in (parents, chain(len(parents))))
    bias_of = lambda seen: tree_bias(seen, num_prefix, groups, prefix.dtype, prefix.device)
    of = lambda mask, places: by_session(nodes, num_prefix + places.depths, bias_of(mask))
    ours = of(tree, tree)
    return {"ours": error(ours, want), "hugging face": error(theirs, want),
            "control: mask in flat order": error(of(flat, tree), want),
            "control: positions in flat order": error(of(tree, flat), want),
            "ours against hugging face": error(ours, theirs)}  # fmt: skip


@torch.inference_mode()
def layer_agreement(target: HFTarget, num_prefix: int, parents: Tensor) -> dict:
    """The first layer of each type, fed with random rows behind its own input norm."""
    generator = torch.Generator(target.device).manual_seed(1)
    counts = [num_prefix, len(parents)]
    rows = torch.randn(sum(counts), target.spec.hidden_size, device=target.device, generator=generator)
    delta, attention = target.delta_layers[0], target.attention_layers[0]
    read_by = lambda layer_id: target.layers[layer_id].input_layernorm(rows.to(target.dtype)).split(counts)
    return {"GDN layer": delta_agreement(target.layers[delta].linear_attn, *read_by(delta), parents),
            "attention layer": attention_agreement(target, attention, *read_by(attention), parents),
            "nodes": len(parents), "prefix": num_prefix}  # fmt: skip


# ---------------------------------------------------------------- the whole model


class FlatSession(HybridSession):
    """The control: attention sees the tree, the Gated DeltaNet layers see its nodes one after the other."""

    @torch.inference_mode()
    def forward(self, tree: Tree):
        shape = TreeShape.of(chain(len(tree)), self.width)
        self._shapes, self._prefill = [shape.to(self.target.device)], False
        return HFSession.forward(self, tree)


@torch.inference_mode()
def model_agreement(target: HFTarget, prefix: Tensor, tree: Tree, layer_ids: tuple[int, ...], exact: bool) -> dict:
    """prefix i64[P] -> {pair: errors of logits, top-1 agreement}, and errors of captured rows by layer.

    Hugging Face three times: all paths in one padded batch, each path alone, and decoded token by token over its own
    cache after a prefix in two pieces. How much these differ among each other is what a difference means. `exact`
    compares with float64 as well.
    """
    paths = Paths.of(tree.parents)
    batch = target.capture(paths.behind(prefix, tree.token_ids), layer_ids, last_hidden=True)
    theirs, their_rows = target.logits(paths.pick(batch.last_hidden)), paths.pick(batch.hidden)
    del batch
    ours, rows = by_session(target, HybridSession, prefix, tree, layer_ids)
    flat, _ = by_session(target, FlatSession, prefix, tree, ())
    stepped = paths_stepped(target, prefix, tree, paths)
    compare = lambda got, want: {**error(centred(got), centred(want)), **top1(got, want)}
    figures = {
        "logits against hugging face": {
            "ours": compare(ours, theirs), "ours (against token by token)": compare(ours, stepped),
            "hugging face, each path alone": compare(paths_alone(target, prefix, tree, paths), theirs),
            "hugging face, token by token": compare(stepped, theirs),
            "control: GDN layers in flat order": compare(flat, theirs),
        },
        "num_nodes": len(tree), "num_paths": len(paths.lengths), "prefix": len(prefix),
    }  # fmt: skip
    by_layer = lambda t: dict(zip(layer_ids, t.chunk(len(layer_ids), dim=-1), strict=True))
    ours_by, theirs_by = by_layer(rows), by_layer(their_rows)
    figures["captured rows"] = {f"layer {i}": error(ours_by[i], theirs_by[i]) for i in layer_ids}
    if exact:
        kept, last = exact_model(target, paths.behind(prefix, tree.token_ids), layer_ids)
        want = F.linear(paths.pick(last).float(), target.lm_head.weight.float())
        figures["logits against float64"] = {
            "ours": compare(ours, want), "hugging face": compare(theirs, want),
            "hugging face, token by token": compare(stepped, want),
            "control: GDN layers in flat order": compare(flat, want),
        }  # fmt: skip
        picked = {i: paths.pick(kept[i]) for i in layer_ids}
        figures["captured rows against float64"] = {
            f"layer {i}": {"ours": error(ours_by[i], picked[i]), "hugging face": error(theirs_by[i], picked[i])}
            for i in layer_ids
        }  # fmt: skip
    return figures


def by_session(target: HFTarget, kind, prefix: Tensor, tree: Tree, layer_ids: tuple[int, ...]):
    session = kind(target, len(prefix) + len(tree), FeatureSpec(layer_ids))
    session.prefill(prefix)
    logits, features = session.forward(tree)
    return logits, features.hidden


def paths_alone(target: HFTarget, prefix: Tensor, tree: Tree, paths: Paths) -> Tensor:
    """Logits [M, V] of each path's own unpadded forward."""
    texts = paths.behind(prefix, tree.token_ids)
    rows = torch.zeros(*paths.nodes.shape, target.spec.hidden_size, dtype=target.dtype, device=target.device)
    for i, length in enumerate(paths.lengths):
        normed = target.capture(texts[i : i + 1, : len(prefix) + length], (), last_hidden=True).last_hidden
        rows[i, :length] = normed[0, len(prefix) :]
    return target.logits(paths.pick(rows))


def paths_stepped(target: HFTarget, prefix: Tensor, tree: Tree, paths: Paths) -> Tensor:
    """Logits [M, V] of the library's cached decoding, all paths at once, a token a forward."""
    known = inspect.signature(target.decoder.forward).parameters
    keyword = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5.24
    cache = {keyword: transformers.DynamicCache(config=target.text_config), "use_cache": True}
    step = lambda ids: target.decoder(input_ids=ids.to(target.device), **cache).last_hidden_state
    for piece in prefix.split(len(prefix) * 5 // 9):  # no multiple of the kernel's chunks
        step(piece.expand(len(paths.nodes), -1))
    tokens = tree.token_ids[paths.nodes]
    return target.logits(paths.pick(torch.cat([step(column) for column in tokens.split(1, dim=1)], dim=1)))


def centred(logits: Tensor) -> Tensor:
    """Without the constant that a softmax does not see."""
    return logits - logits.mean(-1, keepdim=True)


def top1(got: Tensor, want: Tensor) -> dict:
    """Share of nodes with the same best token; the wanted margins (best minus second logit) where it differs."""
    best = want.topk(2).values
    margins, differs = best[:, 0] - best[:, 1], got.argmax(-1) != want.argmax(-1)
    return {"top1": 1.0 - float(differs.float().mean()), "logit_difference": float((got - want).abs().max()),
            "margins_where_different": sorted(round(m, 4) for m in margins[differs].tolist()),
            "median_margin": float(margins.median())}  # fmt: skip
