"""A drafter's shape and the facts of the target it is for: nulls filled in, contradictions refused by name."""

from dataclasses import replace

from dflash_train.config import DrafterConfig, require
from dflash_train.util.errors import UserError


def target_rope_theta(target_config: dict) -> float:
    """theta of the target's text config (top level, or transformers 5's `rope_parameters`), and nothing else of its
    RoPE: partial rotary factor, mrope sections and scaling are the target's alone. Raises UserError when absent."""
    parameters = target_config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", target_config.get("rope_theta"))
    if theta is None:
        raise UserError("drafter.rope_theta", got="null, and the target's config has none", want="a number",
                        fix="drafter.rope_theta=...")  # fmt: skip
    return float(theta)


def resolve_drafter(
    config: DrafterConfig, target_config: dict, layer_ids: list[int] | tuple[int, ...], mask_token_id: int
) -> DrafterConfig:
    """Fill every null from the target.

    target_config: the text part of the target's config.json; layer_ids, mask_token_id: of the store or the run.
    Raises UserError naming the key where the config contradicts the target."""
    heads = target_config["num_attention_heads"]
    hidden_size = target_config["hidden_size"]
    facts = {
        "target_hidden_size": hidden_size,
        "hidden_size": hidden_size,  # the drafter reads and writes through the target's own embedding and head
        "vocab_size": target_config["vocab_size"],
        "num_target_layers": target_config["num_hidden_layers"],
        "target_layer_ids": list(layer_ids),
        "mask_token_id": mask_token_id,
    }
    for name, fact in facts.items():
        own = getattr(config, name)
        require(own is None or own == fact, f"drafter.{name}", got=own, want=f"{fact}, as the target has it",
                fix="choose the drafter made for this target, or set the key to null")  # fmt: skip
    follow = {
        "intermediate_size": target_config.get("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": target_config.get("num_key_value_heads") or heads,
        "head_dim": target_config.get("head_dim") or hidden_size // heads,
        "max_position_embeddings": target_config.get("max_position_embeddings"),
    }
    changes = dict(facts)
    for name, value in follow.items():
        changes[name] = value if getattr(config, name) is None else getattr(config, name)
        require(changes[name] is not None, f"drafter.{name}", got="null, and the target has none", want="a number",
                fix=f"drafter.{name}=<number>; a mixture of experts has no width to follow")  # fmt: skip
    changes["rope_theta"] = config.rope_theta if config.rope_theta is not None else target_rope_theta(target_config)
    changes["layer_types"] = config.layer_types or ["full_attention"] * config.num_layers
    resolved = replace(config, **changes)
    resolved.check()
    require(resolved.head_dim % 2 == 0, "drafter.head_dim", got=resolved.head_dim, want="an even number, for RoPE")
    check_taps(resolved)
    return resolved


def check_taps(config: DrafterConfig) -> None:
    """Every tap is a layer of the target below its last. Raises UserError."""
    last = config.num_target_layers - 2
    require(bool(config.target_layer_ids) and all(0 <= i <= last for i in config.target_layer_ids),
            "drafter.target_layer_ids", got=config.target_layer_ids, want=f"layer ids within 0..{last}")  # fmt: skip


def check_compatible(
    config: DrafterConfig, *, name: str, hidden_size: int | None, num_layers: int | None, vocab_size: int | None,
    layer_ids: list[int] | tuple[int, ...] | None = None, mask_token_id: int | None = None,
) -> None:  # fmt: skip
    """Refuse a drafter made for another target than `name`, with both in the message.

    null = not known, or (layer_ids, mask_token_id) whatever the drafter says: decoding captures what it asks for."""
    wanted = {"hidden_size": hidden_size, "target_hidden_size": hidden_size, "num_target_layers": num_layers,
              "vocab_size": vocab_size, "target_layer_ids": None if layer_ids is None else list(layer_ids),
              "mask_token_id": mask_token_id}  # fmt: skip
    wrong = {key: want for key, want in wanted.items() if want is not None and getattr(config, key) != want}
    if wrong:
        got = ", ".join(f"{key}={getattr(config, key)}" for key in wrong)
        want = ", ".join(f"{key}={value}" for key, value in wrong.items())
        raise UserError(f"drafter {config.name}", got=f"made for a target with {got}", want=f"{name}: {want}",
                        fix="use the drafter trained for this target")  # fmt: skip
