"""A target as numbers, and what it and a drafter consist of: parameter counts, exact to the last one."""

from dataclasses import asdict, dataclass, replace

from dflash_train.config import DrafterConfig, TargetConfig, TargetShape
from dflash_train.util.errors import UserError

_MIXTURES = ("qwen3_moe", "qwen3_5_moe_text", "qwen3_next")
_KNOWN = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", *_MIXTURES)
_NEEDED = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "tied")


@dataclass(frozen=True)
class TargetSizes:
    """Everything the formulas need of a target; nothing in it is null."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    shape: TargetShape

    @property
    def num_full_layers(self) -> int:
        return self.num_layers - self.shape.num_linear_layers

    @property
    def key_width(self) -> int:
        """Of a GDN layer's keys over all heads."""
        return self.shape.linear_key_heads * self.shape.linear_key_dim

    @property
    def value_width(self) -> int:
        return self.shape.linear_value_heads * self.shape.linear_value_dim

    @property
    def conv_width(self) -> int:
        """Channels of a GDN layer's convolution: queries, keys and values side by side."""
        return 2 * self.key_width + self.value_width


def target_sizes(target: TargetConfig) -> tuple[TargetSizes | None, list[str]]:
    """(sizes, []) or (None, the config keys that are null and would tell)."""
    unknown = [f"target.{name}" for name in ("num_layers", "hidden_size", "vocab_size") if vars(target)[name] is None]
    unknown += [f"target.shape.{name}" for name in _NEEDED if vars(target.shape)[name] is None]
    if target.shape.num_linear_layers:
        gdn = ("linear_key_heads", "linear_value_heads", "linear_key_dim", "linear_value_dim", "conv_kernel")
        unknown += [f"target.shape.{name}" for name in gdn if not vars(target.shape)[name]]
    if unknown:
        return None, unknown
    return TargetSizes(target.num_layers, target.hidden_size, target.vocab_size, target.shape), []


def sizes_from_files(target: TargetConfig, text: dict) -> TargetConfig:
    """`target` with its sizes as the text part of a Hugging Face config.json says.

    Raises UserError where the two contradict each other, or for a kind of layer the formulas do not know."""
    kind = text["model_type"]
    if kind not in _KNOWN:
        raise UserError(f"target {target.name}", got=f"model type {kind}", want=" | ".join(_KNOWN))
    heads, bias = text["num_attention_heads"], bool(text.get("attention_bias"))
    hybrid, mixture = kind in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), kind in _MIXTURES
    if mixture and (text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1):
        raise UserError(f"target {target.name}", got=f"{kind} with dense layers between", want="experts in every layer")
    shape = TargetShape(
        intermediate_size=0 if mixture else text["intermediate_size"], num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads, tied=bool(text.get("tie_word_embeddings")),
        output_gate=hybrid, qk_norm=kind.startswith("qwen3"), qkv_bias=bias or kind == "qwen2",
        output_bias=bias and kind != "qwen2",
    )  # fmt: skip
    if hybrid:
        shape = replace(
            shape, num_linear_layers=text["layer_types"].count("linear_attention"),
            linear_key_heads=text["linear_num_key_heads"], linear_value_heads=text["linear_num_value_heads"],
            linear_key_dim=text["linear_key_head_dim"], linear_value_dim=text["linear_value_head_dim"],
            conv_kernel=text["linear_conv_kernel_dim"],
        )  # fmt: skip
    if mixture:
        shape = replace(
            shape, num_experts=text.get("num_experts") or text["num_local_experts"],
            experts_per_token=text["num_experts_per_tok"], expert_size=text["moe_intermediate_size"],
            shared_expert_size=text.get("shared_expert_intermediate_size", 0),
        )  # fmt: skip
    found = {"num_layers": text["num_hidden_layers"], "hidden_size": text["hidden_size"],
             "vocab_size": text["vocab_size"]}  # fmt: skip
    told = {name: value for name, value in vars(target).items() if name in found and value is not None}
    if target.shape != TargetShape():
        told, found = told | asdict(target.shape), found | asdict(shape)
    wrong = [name for name, value in told.items() if value is not None and value != found[name]]
    if wrong:
        raise UserError(f"target {target.name}", got=", ".join(f"{name}={told[name]}" for name in wrong),
                        want=", ".join(f"{name}={found[name]}" for name in wrong) + ", as in its config.json",
                        fix="correct the target's YAML")  # fmt: skip
    own = {name: found[name] for name in ("num_layers", "hidden_size", "vocab_size")}
    return replace(target, **own, shape=shape)


def share_sizes(sizes: TargetSizes, ways: int) -> TargetSizes:
    """One of `ways` ranks of a split target: its heads and MLP columns; norms and tables are whole on each."""
    shape = sizes.shape
    split = ("intermediate_size", "num_heads", "num_kv_heads", "linear_key_heads", "linear_value_heads")
    return replace(sizes, shape=replace(shape, **{name: vars(shape)[name] // ways for name in split}))


# ---------------------------------------------------------------- parameters


def full_attention_parameters(sizes: TargetSizes) -> int:
    """Of one full-attention mixer: q (twice as wide with an output gate), k, v, o, their biases, the norms of q and k.
    Source: transformers' Qwen3, Qwen3_5 and Llama attention."""
    shape, width = sizes.shape, sizes.hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    made = queries * (1 + shape.output_gate) + 2 * keys
    biases = shape.qkv_bias * made + shape.output_bias * width
    return width * (made + queries) + biases + 2 * shape.qk_norm * shape.head_dim


def linear_attention_parameters(sizes: TargetSizes) -> int:
    """Of one Gated DeltaNet mixer: projections to convolution, z, beta and gate, the depthwise convolution, A_log and
    dt_bias, the gated norm, and the way out. Source: transformers' Qwen3_5GatedDeltaNet."""
    shape, width = sizes.shape, sizes.hidden_size
    into = width * (sizes.conv_width + sizes.value_width + 2 * shape.linear_value_heads)
    small = sizes.conv_width * shape.conv_kernel + 2 * shape.linear_value_heads + shape.linear_value_dim
    return into + small + sizes.value_width * width


def mlp_parameters(sizes: TargetSizes, experts: int | None = None) -> int:
    """Of one gated MLP, or of router, shared expert with its gate, and `experts` of the experts (null = all)."""
    shape, width = sizes.shape, sizes.hidden_size
    if not shape.num_experts:
        return 3 * width * shape.intermediate_size
    shared = 3 * width * shape.shared_expert_size + (width if shape.shared_expert_size else 0)
    counted = shape.num_experts if experts is None else experts
    return width * shape.num_experts + shared + counted * 3 * width * shape.expert_size


def layers_parameters(sizes: TargetSizes, experts: int | None = None) -> int:
    """Of all decoder layers: the mixers, the MLPs and two norms each."""
    mixers = sizes.shape.num_linear_layers * linear_attention_parameters(sizes) if sizes.shape.num_linear_layers else 0
    mixers += sizes.num_full_layers * full_attention_parameters(sizes)
    return mixers + sizes.num_layers * (mlp_parameters(sizes, experts) + 2 * sizes.hidden_size)


def table_parameters(sizes: TargetSizes) -> int:
    """Of the embedding; the head has as many."""
    return sizes.vocab_size * sizes.hidden_size


def target_parameters(sizes: TargetSizes) -> int:
    """Of the whole text model."""
    tables = 1 if sizes.shape.tied else 2
    return tables * table_parameters(sizes) + layers_parameters(sizes) + sizes.hidden_size


def read_parameters(sizes: TargetSizes, num_tokens: int) -> int:
    """Whose weights a pass over `num_tokens` reads: every layer and the head, not the embedding; of experts, as many as
    the tokens could choose."""
    shape = sizes.shape
    experts = min(shape.num_experts, num_tokens * shape.experts_per_token) if shape.num_experts else None
    return layers_parameters(sizes, experts) + sizes.hidden_size + table_parameters(sizes)


def drafter_parameters(drafter: DrafterConfig) -> dict[str, int]:
    """{"layers", "fc", "norms"} of a resolved drafter. Source: z-lab's DFlashDraftModel; 1,730,213,120 in all for
    Qwen3.6-27B."""
    width, heads, kv, dim = drafter.hidden_size, drafter.num_heads, drafter.num_kv_heads, drafter.head_dim
    layer = width * dim * (2 * heads + 2 * kv) + 3 * width * drafter.intermediate_size + 2 * dim + 2 * width
    layer += drafter.attention_bias * (dim * (heads + 2 * kv) + width)
    return {
        "layers": drafter.num_layers * layer,
        "fc": len(drafter.target_layer_ids) * drafter.target_hidden_size * width,
        "norms": 2 * width,
    }
