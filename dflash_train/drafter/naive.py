"""The slow obvious twins of anchors, mask, model and loss: loops over rows, documents, blocks, slots, keys and heads.

They are the specification the fast paths are tested against, in values and in gradients, in float64 where that helps.
Nothing here is called outside tests.
"""

import math

import torch
from torch import Tensor

from dflash_train.config import DrafterConfig
from dflash_train.drafter.anchors import GOLDEN, MIX_1, MIX_2
from dflash_train.drafter.dflash import DFlashDrafter
from dflash_train.records import DraftBatch, TargetHead
from dflash_train.util.provenance import stable_hash

WORD = (1 << 64) - 1


def naive_rank(seed: int, epoch: int, sample_id: str, position: int) -> int:
    """Signed 64-bit rank of a position in its document's permutation, in Python integers."""
    x = (stable_hash("anchor", seed, epoch, sample_id) + (position + 1) * GOLDEN) & WORD
    x = ((x ^ (x >> 30)) * MIX_1) & WORD
    x = ((x ^ (x >> 27)) * MIX_2) & WORD
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def naive_anchors(batch: DraftBatch, num_anchors: int, seed: int, epoch: int) -> list[list[int]]:
    """Sorted anchors of each row: documents take turns, one anchor a turn, until slots or positions run out. A turn
    that cannot serve everybody serves those with most eligible positions."""
    rows = []
    for b, sample_ids in enumerate(batch.sample_ids):
        queues = []
        for d, sample_id in enumerate(sample_ids):
            queue = []
            for t in range(batch.token_ids.shape[1] - 1):
                here = batch.document_ids[b, t] == d and batch.document_ids[b, t + 1] == d
                if here and batch.loss_mask[b, t] and batch.loss_mask[b, t + 1]:
                    queue.append((naive_rank(seed, epoch, sample_id, int(batch.position_ids[b, t])), t))
            queues.append(sorted(queue))
        eligible_counts = [len(queue) for queue in queues]
        taken: list[int] = []
        while len(taken) < num_anchors and any(queues):
            for d in sorted(range(len(queues)), key=lambda d: (-eligible_counts[d], d)):
                if queues[d] and len(taken) < num_anchors:
                    taken.append(queues[d].pop(0)[1])
        rows.append(sorted(taken))
    return rows


def naive_labels(batch: DraftBatch, b: int, anchor: int, block_size: int) -> tuple[list[int | None], list[bool]]:
    """(labels, loss mask) of one block; None where there is no token of the same document."""
    labels: list[int | None] = []
    mask: list[bool] = []
    alive = True
    for k in range(block_size):
        t = anchor + k
        inside = t < batch.token_ids.shape[1] and batch.document_ids[b, t] == batch.document_ids[b, anchor]
        labels.append(int(batch.token_ids[b, t]) if inside else None)
        if k > 0:
            alive = alive and bool(inside) and bool(batch.loss_mask[b, t])
        mask.append(k > 0 and alive)
    return labels, mask


def naive_visible(
    config: DrafterConfig, layer: int, q_position: int, k_position: int, k_in_block: bool, anchor: int
) -> bool:
    """May the slot at q_position of the block at `anchor` see the key at k_position (all within one document)?"""
    sliding = config.layer_types[layer] == "sliding_attention"
    causal = sliding if config.is_causal is None else config.is_causal
    if not k_in_block and k_position >= anchor:
        return False
    if causal and k_position > q_position:
        return False
    return not (sliding and abs(q_position - k_position) >= config.sliding_window)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def _rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """One head vector [K], rotated pair by pair: (i, i + K/2)."""
    half = x.shape[0] // 2
    first, second = [], []
    for i in range(half):
        angle = position / theta ** (2 * i / x.shape[0])
        first.append(x[i] * math.cos(angle) - x[half + i] * math.sin(angle))
        second.append(x[half + i] * math.cos(angle) + x[i] * math.sin(angle))
    return torch.stack(first + second)


def naive_block(model: DFlashDrafter, slots: Tensor, context: Tensor, anchor: int) -> Tensor:
    """One block by itself: slot embeddings [S,D] and captured rows 0..anchor-1 (or more) of its own document, where row
    index = position -> hidden [S,D] after the final norm."""
    config, weights = model.config, dict(model.named_parameters())
    K, eps, theta = config.head_dim, config.rms_norm_eps, config.rope_theta
    group = config.num_heads // config.num_kv_heads

    def linear(name: str, x: Tensor) -> Tensor:
        bias = weights.get(f"{name}.bias")
        return weights[f"{name}.weight"] @ x + (0 if bias is None else bias)

    read = [_norm(weights["fc.weight"] @ row, weights["hidden_norm.weight"], eps) for row in context]
    x = list(slots)
    for layer in range(config.num_layers):
        at = f"layers.{layer}.self_attn"
        normed = [_norm(row, weights[f"layers.{layer}.input_layernorm.weight"], eps) for row in x]
        keys = [(t, False, row) for t, row in enumerate(read)]
        keys += [(anchor + k, True, row) for k, row in enumerate(normed)]
        updated = []
        for k, row in enumerate(normed):
            heads = []
            for h in range(config.num_heads):
                kv = slice(h // group * K, h // group * K + K)
                query = linear(f"{at}.q_proj", row)[h * K : (h + 1) * K]
                query = _rotated(_norm(query, weights[f"{at}.q_norm.weight"], eps), anchor + k, theta)
                scores, values = [], []
                for position, in_block, source in keys:
                    if naive_visible(config, layer, anchor + k, position, in_block, anchor):
                        key = _norm(linear(f"{at}.k_proj", source)[kv], weights[f"{at}.k_norm.weight"], eps)
                        scores.append(query @ _rotated(key, position, theta) / math.sqrt(K))
                        values.append(linear(f"{at}.v_proj", source)[kv])
                heads.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
            y = x[k] + linear(f"{at}.o_proj", torch.cat(heads))
            z = _norm(y, weights[f"layers.{layer}.post_attention_layernorm.weight"], eps)
            mlp = f"layers.{layer}.mlp"
            gate = linear(f"{mlp}.gate_proj", z)
            updated.append(y + linear(f"{mlp}.down_proj", gate * torch.sigmoid(gate) * linear(f"{mlp}.up_proj", z)))
        x = updated
    return torch.stack([_norm(row, weights["norm.weight"], eps) for row in x])


def naive_loss(
    hidden_BNSD: Tensor, labels: Tensor, loss_mask: Tensor, anchors: Tensor, head: TargetHead, kind: str, gamma: float,
    alpha: float, last_hidden: Tensor | None,
) -> tuple[Tensor, float]:  # fmt: skip
    """(numerator, denominator) with all logits at once, slot by slot."""
    numerator, denominator = hidden_BNSD.sum() * 0, 0.0
    num_rows, num_blocks, block_size, _ = hidden_BNSD.shape
    for b in range(num_rows):
        for n in range(num_blocks):
            slots = [k for k in range(1, block_size) if loss_mask[b, n, k]]
            log_q = {k: torch.log_softmax(hidden_BNSD[b, n, k] @ head.head.T, 0) for k in slots}
            token_loss = {k: -log_q[k][labels[b, n, k]] for k in slots}
            reach, product = {}, 1.0
            for k in slots:
                product *= (1 - alpha) * math.exp(-float(token_loss[k].detach())) + alpha
                reach[k] = product
            for k in slots:
                loss = token_loss[k]
                weight = math.exp(-(k - 1) / gamma)
                if kind == "dpace":
                    weight = sum(reach[j] for j in slots if j >= k)
                if kind == "kl":
                    log_p = torch.log_softmax(last_hidden[b, int(anchors[b, n]) + k - 1] @ head.head.T, 0)
                    loss = (log_p.exp() * (log_p - log_q[k])).sum()
                numerator = numerator + weight * loss
                denominator += 1.0 if kind == "dpace" else weight
    return numerator, denominator
