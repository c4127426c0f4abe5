"""Bytes of everything that lies on a GPU, each part as its own formula. GB are powers of 1000 everywhere.

Shapes as in the design of the parts: T tokens, M tree nodes, L captured layers, D hidden, V vocabulary, Q slots of all
blocks of a row. "Elements" are of the computing dtype unless a formula says otherwise.
"""

from dataclasses import dataclass

from dflash_train.config import DrafterConfig, TrainConfig
from dflash_train.planning.shapes import TargetSizes, drafter_parameters

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
REDUCE_BUCKET = 500_000_000
"""Elements of DeepSpeed's reduce bucket, its default, allocated in full however small the model is."""
LIVE_PARAMETERS = 1_000_000_000
"""Parameters that ZeRO-3 keeps gathered at once, its default."""
DELTA_CHUNK = 64
"""Tokens of a chunk of the delta rule's kernel; it keeps one state per chunk while it runs."""


# ---------------------------------------------------------------- a sequence on the target


def kv_bytes(sizes: TargetSizes, num_tokens: int, item: int) -> int:
    """Keys and values of the full-attention layers: 65,536 B a token for Qwen3.6-27B in bfloat16."""
    return 2 * sizes.num_full_layers * sizes.shape.num_kv_heads * sizes.shape.head_dim * num_tokens * item


def recurrent_bytes(sizes: TargetSizes) -> int:
    """States [Hv, K, V] of the GDN layers, float32: 151 MB for Qwen3.6-27B, as much as one forked node."""
    return sizes.shape.num_linear_layers * sizes.value_width * sizes.shape.linear_key_dim * 4


def conv_bytes(sizes: TargetSizes, num_rows: int, item: int) -> int:
    """Convolution inputs of the GDN layers: `num_rows` rows [C] each. A cached sequence keeps kernel - 1 of them."""
    return sizes.shape.num_linear_layers * num_rows * sizes.conv_width * item


def session_bytes(sizes: TargetSizes, capacity: int, item: int) -> int:
    """Cache of one sequence of at most `capacity` tokens, tree nodes included."""
    kernel = max(1, sizes.shape.conv_kernel)
    return kv_bytes(sizes, capacity, item) + recurrent_bytes(sizes) + conv_bytes(sizes, kernel - 1, item)


def stash_bytes(sizes: TargetSizes, num_nodes: int) -> int:
    """What a verify pass keeps per node and GDN layer to rebuild the accepted state: the key and the update u in
    float32, the path's log-gate in float64. 1.59 MB a node for Qwen3.6-27B (102 MB at 64 nodes), where forked states
    would take 151 MB a node. Source: the exact tree verification of `target/tree_delta_rule.py`."""
    per_node = 4 * (sizes.key_width + sizes.value_width) + 8 * sizes.shape.linear_value_heads
    return sizes.shape.num_linear_layers * num_nodes * per_node


def pending_bytes(sizes: TargetSizes, num_nodes: int, item: int) -> int:
    """The stash and, beside it, the tree's convolution inputs behind the cached ones: both live until the commit."""
    kernel = max(1, sizes.shape.conv_kernel)
    return stash_bytes(sizes, num_nodes) + conv_bytes(sizes, kernel - 1 + num_nodes, item)


# ---------------------------------------------------------------- passes of the target


def working_bytes(sizes: TargetSizes, num_tokens: int, item: int) -> int:
    """Peak of what a pass without gradients holds inside one layer, residual stream included.

    MLP: gate, up and product at once. GDN: the convolution's output and z; q, k, v as the kernel takes them (q and k
    over the value heads) and q, k normed; its w, u, new v and output, a state a chunk and a [chunk, chunk] matrix a
    head. Full attention: q with its gate, keys and values, output. Experts: the chosen experts' rows instead of the
    MLP's. Source: the tensors alive in transformers' forward with flash-linear-attention's chunked kernel."""
    shape, width = sizes.shape, sizes.hidden_size
    experts = 3 * (shape.experts_per_token * (shape.expert_size + width) + shape.shared_expert_size)
    mlp = experts if shape.num_experts else 3 * shape.intermediate_size
    attention = shape.head_dim * (4 * shape.num_heads + 4 * shape.num_kv_heads)
    linear = 0
    if shape.num_linear_layers:
        states = sizes.value_width * shape.linear_key_dim // DELTA_CHUNK
        matrices = shape.linear_value_heads * DELTA_CHUNK
        linear = sizes.conv_width + 10 * sizes.value_width + states + matrices
    return num_tokens * (2 * width + max(mlp, attention, linear)) * item


def capture_bytes(sizes: TargetSizes, num_tokens: int, num_taps: int, last_hidden: bool, item: int) -> int:
    """Peak of a capture pass over `num_tokens` padded tokens, beside the weights: either inside the last layers, with
    the earlier taps kept, or at its end, when taps, their concatenation and the gathered valid rows exist at once."""
    row = num_tokens * sizes.hidden_size * item
    inside = working_bytes(sizes, num_tokens, item) + num_taps * row
    return max(inside, (3 * num_taps + 2 * last_hidden + 1) * row)


def verify_bytes(sizes: TargetSizes, num_nodes: int, num_taps: int, item: int) -> int:
    """Transients of one verify pass: a layer's rows, the delta rule's matrices [Hv, M, M] (gates in float64, three in
    float32), captured rows, and logits in the computing dtype and float32."""
    square = sizes.shape.linear_value_heads * num_nodes**2 * (8 + 3 * 4)
    rows = working_bytes(sizes, num_nodes, item) + 2 * num_taps * num_nodes * sizes.hidden_size * item
    return rows + square + num_nodes * sizes.vocab_size * (item + 4)


# ---------------------------------------------------------------- the drafter


def draft_cache_bytes(drafter: DrafterConfig, capacity: int, item: int) -> int:
    """Keys and values of the context in every layer while decoding: 4 KiB a layer and token for Qwen3.6-27B."""
    return 2 * drafter.num_layers * drafter.num_kv_heads * drafter.head_dim * capacity * item


@dataclass(frozen=True)
class States:
    """Bytes a GPU holds of the trained parameters. step: more while stepping. host: what offloading moves there."""

    weights: int
    gradients: int
    optimizer: int
    step: int = 0
    host: int = 0


def zero_states(parameters: int, stage: int, world: int, item: int, *, offload: bool = False,
                bucket: int = REDUCE_BUCKET) -> States:  # fmt: skip
    """What DeepSpeed holds on one of `world` GPUs, P parameters of `item` bytes, gradients summed in float32.

    masters and two Adam moments   12 P / world, beside the weights, in float32 training too
    gradients, stage 1             4 P summed in float32; in bfloat16 also the pass's own 2 P, in float32 the bucket
    gradients, stage 2, 3          4 P / world, and the reduce bucket of 5e8 elements
    weights, stage 3               a share, and up to 1e9 gathered parameters
    step, stage 2                  one more flat float32 copy of the gradients' share, when activations are gone
    offload                        masters, moments and summed gradients live on the host

    Source: a count of the live tensors of DeepSpeed 0.19.8 with torch's AdamW, which the tests repeat."""
    share = -(-parameters // world)
    masters, summed = 12 * share, 4 * (parameters if stage == 1 else share)
    gathered = min(parameters, LIVE_PARAMETERS) * item
    weights = share * item + gathered if stage == 3 else parameters * item
    passing = parameters * item if stage == 1 and item == 2 else bucket * item
    if offload:
        return States(weights, passing, 0, host=masters + 4 * share)
    return States(weights, summed + passing, masters, step=summed if stage == 2 else 0)


def activation_bytes(drafter: DrafterConfig, row_tokens: int, num_anchors: int, item: int, *, fused: bool = False,
                     checkpointing: bool = False) -> int:  # fmt: skip
    """What one packed row keeps for the backward pass, with fused norms (their float32 scale is left out).

    A layer keeps per slot: both residuals and both normed ones; q before its norm and as attention reads it, the output
    as heads and as rows; k before its norm; gate, its activation (but for the fused kernels), up and the product. Over
    slots and context: keys and values as attention reads them; per context row k before its norm. Once: captured rows,
    their projection and its norm; the last residual, the hidden rows and their gradient. With checkpointing one layer
    is whole at a time, and the others keep their input and what they read of the context. For 512 blocks of 16 on
    Qwen3.6-27B: 10.0 GB, fused 8.6, checkpointing too 2.6."""
    width, heads, kv = (
        drafter.hidden_size,
        drafter.num_heads * drafter.head_dim,
        drafter.num_kv_heads * drafter.head_dim,
    )
    slots = num_anchors * drafter.block_size
    per_slot = 4 * width + 4 * heads + kv + (3 if fused else 4) * drafter.intermediate_size
    layer = slots * per_slot + (slots + row_tokens) * 2 * kv + row_tokens * kv
    taps = len(drafter.target_layer_ids) * drafter.target_hidden_size
    once = row_tokens * (taps + 2 * width) + slots * 3 * width
    if checkpointing:
        return (layer + (drafter.num_layers - 1) * (slots * width + row_tokens * 3 * kv) + once) * item
    return (drafter.num_layers * layer + once) * item


def logits_chunk_bytes(drafter: DrafterConfig, chunk_blocks: int, item: int, kl: bool = False, *,
                       fused: bool = False) -> int:  # fmt: skip
    """Peak inside one chunk of the loss: logits, float32 probabilities that become the gradient in place, and that
    gradient in the head's dtype; kl adds the teacher's logits, log-probabilities and their product. The fused kernels
    need the logits alone, and the teacher's."""
    elements = chunk_blocks * (drafter.block_size - 1) * drafter.vocab_size
    if fused:
        return elements * item * (2 if kl else 1)
    return elements * (2 * item + 4 + (item + 12 if kl else 0))


def backward_bytes(drafter: DrafterConfig, num_anchors: int, item: int) -> int:
    """Gradients of one layer's activations that exist at once: of the MLP's four, and two rows."""
    slots = num_anchors * drafter.block_size
    return slots * (4 * drafter.intermediate_size + 2 * drafter.hidden_size) * item


def mask_bytes(drafter: DrafterConfig, row_tokens: int, num_anchors: int, dense: bool) -> int:
    """One mask per kind of layer: dense booleans [Q, T + Q] and, in the pass, their additive form; block masks of
    flex_attention are a few MB and counted as none."""
    if not dense:
        return 0
    slots = num_anchors * drafter.block_size
    kinds = len(set(drafter.layer_types or ["full_attention"]))
    return slots * (row_tokens + slots) * (kinds + 2)


def head_bytes(drafter: DrafterConfig, tied: bool, item: int) -> int:
    """The target's frozen embedding and head, whole on every GPU that trains."""
    return (1 if tied else 2) * drafter.vocab_size * drafter.target_hidden_size * item


def all_drafter_parameters(drafter: DrafterConfig) -> int:
    return sum(drafter_parameters(drafter).values())


def training_parts(drafter: DrafterConfig, train: TrainConfig, stage: int, world: int, *, tied: bool, on_gpu: bool,
                   offload: bool = False) -> dict[str, int]:  # fmt: skip
    """Everything on one GPU while training: the frozen tables, ZeRO's states, one micro-batch's activations and one
    chunk of the loss, or the backward pass or the step where those take more.

    Without a GPU masks are dense, and the reduce bucket is left out: it is never touched beyond the model's size."""
    item = ITEM_BYTES[train.dtype]
    parameters = all_drafter_parameters(drafter)
    bucket = REDUCE_BUCKET if on_gpu else min(parameters, REDUCE_BUCKET)
    states = zero_states(parameters, stage, world, item, offload=offload, bucket=bucket)
    dense, fused = not on_gpu or train.attention == "sdpa", on_gpu and train.kernels != "torch"
    rows = activation_bytes(drafter, train.row_tokens, train.num_anchors, item, fused=fused,
                            checkpointing=train.activation_checkpointing)  # fmt: skip
    rows = train.micro_batch * (rows + mask_bytes(drafter, train.row_tokens, train.num_anchors, dense))
    chunk_blocks = min(train.head_chunk_blocks, train.micro_batch * train.num_anchors)
    logits = logits_chunk_bytes(drafter, chunk_blocks, item, train.loss == "kl", fused=fused)
    backward = train.micro_batch * backward_bytes(drafter, train.num_anchors, item)
    return {
        "weights": head_bytes(drafter, tied, item), "drafter": states.weights + states.gradients,
        "optimizer": states.optimizer, "activations": max(rows, rows + backward - logits, states.step - logits),
        "logits": logits,
    }  # fmt: skip
