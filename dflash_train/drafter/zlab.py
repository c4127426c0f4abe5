"""z-lab's config.json, written from a DrafterConfig and read into one. What it cannot say is refused, not guessed."""

from dflash_train.config import DrafterConfig
from dflash_train.drafter.mask import FULL, SLIDING, layer_types, mask_kind
from dflash_train.util.errors import UserError

ARCHITECTURE = "DFlashDraftModel"
# Keys of relatives that compute something else (DFlash2, Domino, Gemma's scales), with the value that means "off".
_OTHER_MODELS = {
    "conv_kernel_size": None, "selector_rank": None, "projector_type": None, "pure_draft_prefix_len": 0,
    "input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None, "shift_label": False,
}  # fmt: skip


def express_causality(types: list[str], modes: list[bool]) -> bool | None:
    """Per-layer causal modes -> what `is_causal` must say: None (unwritten) when they are the default, else one mode.

    Loaders apply a written `is_causal` to every layer, so any other mixture is refused with UserError."""
    if modes == [kind == SLIDING for kind in types]:
        return None
    if len(set(modes)) == 1:
        return modes[0]
    raise UserError("drafter.is_causal", got=f"causal={modes} for layers {types}",
                    want="one mode for all layers, or full = bidirectional and sliding = causal: "
                         "config.json cannot say anything else")  # fmt: skip


def to_zlab(config: DrafterConfig, dtype: str) -> dict:
    """Resolved DrafterConfig -> config.json. dtype: of the weights beside it ("bfloat16" | "float32")."""
    types = layer_types(config)
    is_causal = express_causality(types, [mask_kind(config, kind).causal for kind in types])
    return {
        "architectures": [ARCHITECTURE],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "use_cache": True,
        # Older loaders read rope_theta (and fall back to 1e6 silently), transformers 5 reads rope_parameters.
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": types,
        "use_sliding_window": SLIDING in types,
        "sliding_window": config.sliding_window if SLIDING in types else None,
        "max_window_layers": config.num_layers,
        "num_target_layers": config.num_target_layers,
        # Some readers look at the top level only, others inside dflash_config first.
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": config.target_layer_ids,
        },
    } | ({} if is_causal is None else {"is_causal": is_causal})


def _refuse_other_models(raw: dict, where: str) -> None:
    nested = raw.get("dflash_config") or {}
    for key, off in _OTHER_MODELS.items():
        value = nested.get(key, raw.get(key, off))
        if value not in (off, None):
            raise UserError(f"{where}: {key}", got=value, want="a plain DFlash drafter (another model has this key)")
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", rope.get("rope_type", "default")))
    if kind != "default":
        raise UserError(f"{where}: rope_parameters", got=f"rope_type {kind}", want="default")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UserError(f"{where}: partial_rotary_factor", got=partial, want="1.0: a drafter rotates whole heads")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act", got=raw["hidden_act"], want="silu")


def _read_layer_types(raw: dict, nested: dict, num_layers: int | None) -> tuple[list[str] | None, int | None]:
    """(layer types, window); types are None when the config does not determine them."""
    types, window = raw.get("layer_types"), raw.get("sliding_window")
    if types is None and not raw.get("use_sliding_window") and num_layers:
        types = [FULL] * num_layers
    if nested.get("use_swa") and types and SLIDING not in types:
        types, window = [SLIDING] * len(types), nested.get("swa_window_size", window)
    return types, window if types and SLIDING in types else None


def from_zlab(raw: dict, name: str, where: str) -> DrafterConfig:
    """config.json -> DrafterConfig. where: for messages. Raises UserError listing every missing field; guesses none."""
    nested = raw.get("dflash_config") or {}
    _refuse_other_models(raw, where)
    get = lambda key: nested.get(key, raw.get(key))
    types, window = _read_layer_types(raw, nested, raw.get("num_hidden_layers"))
    nested_theta = (raw.get("rope_parameters") or {}).get("rope_theta")
    values = {
        "num_layers": raw.get("num_hidden_layers"),
        "block_size": get("block_size"),
        "hidden_size": raw.get("hidden_size"),
        "intermediate_size": raw.get("intermediate_size"),
        "num_heads": raw.get("num_attention_heads"),
        "num_kv_heads": raw.get("num_key_value_heads"),
        "head_dim": raw.get("head_dim"),
        "layer_types": types,
        "rms_norm_eps": raw.get("rms_norm_eps"),
        "rope_theta": nested_theta if raw.get("rope_theta") is None else raw["rope_theta"],
        "max_position_embeddings": raw.get("max_position_embeddings"),
        "mask_token_id": get("mask_token_id"),
        "target_layer_ids": get("target_layer_ids"),
        "num_target_layers": raw.get("num_target_layers"),
        "target_hidden_size": raw.get("hidden_size"),
        "vocab_size": raw.get("vocab_size"),
    }
    missing = [key for key, value in values.items() if value is None]
    if missing:
        raise UserError(where, got="no " + ", ".join(missing), want="a complete DFlash config (nothing is guessed)")
    if nested_theta is not None and nested_theta != values["rope_theta"]:
        got = f"{values['rope_theta']}, and {nested_theta} in rope_parameters"
        raise UserError(f"{where}: rope_theta", got=got, want="one value")
    is_causal = raw.get("is_causal")
    config = DrafterConfig(
        name=name, sliding_window=window, is_causal=nested.get("causal") if is_causal is None else is_causal,
        attention_bias=bool(raw.get("attention_bias", False)), initializer_range=raw.get("initializer_range", 0.02),
        **values,
    )  # fmt: skip
    config.check()
    return config
