"""Drafters on disk: round trips, what config.json says, and what is refused by name."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_train.config import DrafterConfig
from dflash_train.drafter.dflash import resolve_drafter
from dflash_train.drafter.files import find_checkpoint, load_drafter, parameter_shapes, save_drafter, write_latest
from dflash_train.drafter.resolve import check_compatible
from dflash_train.drafter.zlab import express_causality, from_zlab, to_zlab
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers
from tests.helpers_drafter import FULL, SLIDING, load_preset, tiny_config, tiny_drafter


def rewrite(folder, change):
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


CONFIGS = [
    tiny_config((FULL, FULL)),
    tiny_config((SLIDING, FULL, SLIDING), window=5),
    tiny_config((SLIDING, FULL), window=5, is_causal=False),
    tiny_config((FULL,), is_causal=True, attention_bias=True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["full", "mixed", "not-causal", "causal-with-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_drafter_loads_the_same(tmp_path, config, dtype):
    """Traps 19, 41: bit-equal weights, exactly the drafter's keys, the same masks, windows and RoPE after a reload."""
    model = tiny_drafter(config)
    folder = save_drafter(tmp_path / "tiny", model, config, {"seed": 7}, dtype=dtype)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors", "provenance.json"]
    assert load_file(folder / "model.safetensors").keys() == parameter_shapes(config).keys()
    loaded, read = load_drafter(folder)
    assert read == config
    for (name, a), b in zip(model.named_parameters(), loaded.parameters()):
        assert b.dtype == dtype and torch.equal(a.to(dtype), b), name
    again, _ = load_drafter(folder, dtype=torch.float32)
    positions = torch.tensor([[0, 5, 300]])
    assert all(torch.equal(a, b) for a, b in zip(model.rope(positions), again.rope(positions)))
    assert json.loads((folder / "provenance.json").read_text()) == {"seed": 7}


def test_config_json_says_everything_where_loaders_look():
    """Trap 24: block_size in both places, rope_theta top level and nested, layer types, target layers; Hugging Face
    reads theta and window from it."""
    raw = to_zlab(load_preset("qwen3_6_27b"), "bfloat16")
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 16
    assert raw["dflash_config"] == {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]}
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 1e7 and raw["rope_scaling"] is None
    assert raw["layer_types"] == [SLIDING] * 4 + [FULL] and raw["sliding_window"] == 2048
    assert raw["num_target_layers"] == 64 and "is_causal" not in raw and raw["model_type"] == "qwen3"
    theirs = transformers.Qwen3Config(**raw)
    assert theirs.rope_parameters["rope_theta"] == 1e7 and theirs.layer_types == raw["layer_types"]
    assert theirs.sliding_window == 2048 and theirs.head_dim == 128


def test_is_causal_is_written_only_where_loaders_would_assume_otherwise():
    """Trap 24: one mode for all layers that is not the per-layer default; any other mixture is refused."""
    assert express_causality([SLIDING, FULL], [True, False]) is None
    assert express_causality([FULL, FULL], [False, False]) is None
    assert express_causality([SLIDING, SLIDING], [True, True]) is None
    assert express_causality([SLIDING, FULL], [False, False]) is False
    assert express_causality([SLIDING, FULL], [True, True]) is True
    assert express_causality([FULL, FULL], [True, True]) is True
    with pytest.raises(UserError, match="drafter.is_causal"):  # noqa: RUF043
        express_causality([SLIDING, FULL], [False, True])
    with pytest.raises(UserError, match="one mode for all layers"):
        express_causality([SLIDING, SLIDING], [True, False])
    written = lambda **kw: to_zlab(tiny_config(**kw), "float32").get("is_causal", "absent")
    assert written(layer_types=(FULL,), is_causal=False) == "absent"
    assert written(layer_types=(SLIDING, FULL), window=3, is_causal=False) is False


def test_older_and_newer_spellings_are_read():
    raw = to_zlab(tiny_config((FULL, FULL), block_size=4), "float32")
    nested = raw | {"dflash_config": raw["dflash_config"] | {"causal": True}}
    del nested["block_size"]
    assert from_zlab(nested, "n", "here").is_causal is True and from_zlab(nested, "n", "here").block_size == 4
    old = {key: value for key, value in raw.items() if key not in ("layer_types", "rope_parameters")}
    old["dflash_config"] = {"mask_token_id": 127, "target_layer_ids": [1, 2]}
    assert from_zlab(old, "n", "here").layer_types == [FULL, FULL]
    all_sliding = raw | {"dflash_config": raw["dflash_config"] | {"use_swa": True, "swa_window_size": 9}}
    assert from_zlab(all_sliding, "n", "here").layer_types == [SLIDING, SLIDING]
    assert from_zlab(all_sliding, "n", "here").sliding_window == 9


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda raw: (raw.pop("block_size"), raw["dflash_config"].pop("block_size")), "no block_size"),
        (lambda raw: (raw.pop("rope_theta"), raw.pop("rope_parameters")), "no rope_theta"),
        (lambda raw: raw.pop("dflash_config"), "mask_token_id, target_layer_ids"),
        (lambda raw: raw.update(layer_types=[FULL]), "1 entries"),
        (lambda raw: raw["dflash_config"].update(conv_kernel_size=2), "conv_kernel_size"),
        (lambda raw: raw["dflash_config"].update(input_embedding_scale=72.0), "input_embedding_scale"),
        (lambda raw: raw["rope_parameters"].update(partial_rotary_factor=0.25), "partial_rotary_factor"),
        (lambda raw: raw.update(rope_scaling={"rope_type": "yarn"}), "yarn"),
        (lambda raw: raw.update(rope_theta=5.0), "rope_theta"),
        (lambda raw: raw["dflash_config"].update(target_layer_ids=[1, 7]), "target_layer_ids"),
        (lambda raw: raw.update(hidden_size=32), "fc.weight"),
        (lambda raw: raw.update(num_hidden_layers=3, layer_types=[FULL] * 3), "missing layers.2"),
        (lambda raw: raw.update(num_hidden_layers=1, layer_types=[FULL]), "unexpected layers.1"),
    ],
)  # fmt: skip
def test_incomplete_contradicting_or_foreign_configs_are_refused_by_name(tmp_path, change, words):
    """Traps 19, 23: nothing missing is guessed, wrong-length layer_types and other models' switches are refused."""
    config = tiny_config((FULL, FULL))
    folder = save_drafter(tmp_path / "d", tiny_drafter(config), config, {})
    rewrite(folder, change)
    with pytest.raises(UserError, match=words):
        load_drafter(folder)


def test_a_lone_file_needs_a_complete_preset_whose_shapes_match(tmp_path):
    config = tiny_config((SLIDING, FULL), window=5)
    model = tiny_drafter(config)
    path = tmp_path / "drafter-v1.safetensors"
    save_file(model.state_dict(), path)
    loaded, read = load_drafter(path, config)
    assert read == config and all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters()))
    with pytest.raises(UserError, match="preset"):
        load_drafter(path)
    with pytest.raises(UserError, match=r"drafter.rope_theta, drafter.mask_token_id"):
        load_drafter(path, replace(config, rope_theta=None, mask_token_id=None))
    with pytest.raises(UserError, match=r"num_layers=2(.|\n)*num_layers=1"):
        load_drafter(path, replace(config, num_layers=1, layer_types=[FULL]))
    with pytest.raises(UserError, match="taps"):
        load_drafter(path, replace(config, target_layer_ids=[1, 2, 3]))
    with pytest.raises(UserError, match="k_proj"):
        load_drafter(path, replace(config, num_kv_heads=4))
    with pytest.raises(UserError, match="hidden_size=64"):
        load_drafter(path, load_preset("qwen3_6_27b"))
    with pytest.raises(UserError, match=r"drafter.hidden_size"):
        load_drafter(path, load_preset("small"))


def test_shards_with_an_index_load_and_their_names_stay_in_the_folder(tmp_path):
    config = tiny_config((FULL, FULL))
    model = tiny_drafter(config)
    folder = save_drafter(tmp_path / "d", model, config, {})
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(state)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, keys in parts.items():
        save_file({key: state[key] for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded, _ = load_drafter(folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters()))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="no such file"):
        load_drafter(folder)
    index["weight_map"][names[0]] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="plain names"):
        load_drafter(folder)


def test_cut_missing_and_partial_weights_are_refused_and_nothing_half_is_left(tmp_path):
    """Trap 41: a state dict with an empty (ZeRO-3) tensor or a missing one is refused before anything is written."""
    config = tiny_config((FULL,))
    model = tiny_drafter(config)
    folder = save_drafter(tmp_path / "d", model, config, {})
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="not whole safetensors"):
        load_drafter(folder)
    with pytest.raises(UserError, match="no such file or folder"):
        load_drafter(tmp_path / "absent")
    state = dict(model.state_dict())
    for broken in (state | {"fc.weight": torch.empty(0)}, {k: v for k, v in state.items() if k != "fc.weight"},
                   state | {"lm_head.weight": torch.zeros(2)}):  # fmt: skip
        with pytest.raises(UserError, match=r"fc.weight|lm_head"):
            save_drafter(tmp_path / "new", broken, config, {})
    assert not (tmp_path / "new").exists()


TARGET = {
    "hidden_size": 64, "intermediate_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "num_hidden_layers": 8, "max_position_embeddings": 777,
    "rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 2], "rope_type": "x"},
}  # fmt: skip


def test_null_sizes_follow_the_target_and_its_theta_alone():
    """Trap 19: theta comes from rope_parameters; partial_rotary_factor and mrope are not the drafter's."""
    config = resolve_drafter(DrafterConfig(name="s", num_layers=1, block_size=4), TARGET, [1, 3], 127)
    assert (config.hidden_size, config.target_hidden_size, config.intermediate_size) == (64, 64, 100)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 2, 16, 128)
    assert (config.rope_theta, config.max_position_embeddings, config.num_target_layers) == (5e5, 777, 8)
    assert config.target_layer_ids == [1, 3] and config.mask_token_id == 127 and config.layer_types == [FULL]
    raw = to_zlab(config, "float32")
    assert raw["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5} and "partial_rotary_factor" not in raw
    plain = {key: value for key, value in TARGET.items() if key != "rope_parameters"}
    old = plain | {"rope_theta": 2e4, "head_dim": 32}
    config = resolve_drafter(DrafterConfig(name="s", num_layers=1, block_size=4), old, [1, 3], 127)
    assert config.rope_theta == 2e4 and config.head_dim == 32
    with pytest.raises(UserError, match="rope_theta"):
        resolve_drafter(DrafterConfig(name="s"), {k: v for k, v in old.items() if k != "rope_theta"}, [1, 3], 127)
    assert resolve_drafter(load_preset("qwen3_6_27b"), TARGET | {
        "hidden_size": 5120, "vocab_size": 248320, "num_hidden_layers": 64}, (1, 16, 31, 46, 61), 248070,
    ).num_heads == 32  # fmt: skip


@pytest.mark.parametrize(
    "key, value",
    [("hidden_size", 32), ("target_hidden_size", 32), ("vocab_size", 100), ("num_target_layers", 9),
     ("target_layer_ids", [1, 2]), ("mask_token_id", 3)],
)  # fmt: skip
def test_a_config_that_contradicts_the_target_is_refused_by_key(key, value):
    """Trap 20: another mask token, vocabulary, width or tap list than the target's."""
    with pytest.raises(UserError, match=f"drafter.{key}"):
        resolve_drafter(replace(DrafterConfig(name="s", num_layers=1), **{key: value}), TARGET, [1, 3], 127)


def test_a_drafter_for_another_target_is_refused_naming_both():
    config = tiny_config((FULL,))
    same = {"name": "tiny", "hidden_size": 64, "num_layers": 8, "vocab_size": 128}
    check_compatible(config, **same)
    check_compatible(config, **same, layer_ids=(1, 2), mask_token_id=127)
    for change, words in (({"hidden_size": 576}, "64(.|\n)*576"), ({"num_layers": 30}, "8(.|\n)*30"),
                          ({"vocab_size": 9}, "128(.|\n)*9"), ({"layer_ids": [1, 3]}, r"\[1, 2\](.|\n)*\[1, 3\]"),
                          ({"mask_token_id": 5}, "127(.|\n)*5")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            check_compatible(config, **(same | change))


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    config = tiny_config((FULL,))
    model = tiny_drafter(config)
    for run, step, when in (("old", "step-000900", 100), ("new", "step-000200", 200)):
        save_drafter(tmp_path / run / step / "drafter", model, config, {})
        (tmp_path / run / "step-000999").mkdir()
        write_latest(tmp_path / run, step)
        os.utime(tmp_path / run / "latest.json", (when, when))
    newest = tmp_path / "new" / "step-000200" / "drafter"
    assert find_checkpoint(None, tmp_path) == newest
    assert find_checkpoint(tmp_path / "new", tmp_path) == find_checkpoint(newest.parent, tmp_path) == newest
    assert find_checkpoint(newest, tmp_path) == newest
    assert find_checkpoint(tmp_path / "old", tmp_path).parent.name == "step-000900"
    weights = newest / "model.safetensors"
    assert find_checkpoint(weights, tmp_path) == weights and load_drafter(weights)[1] == replace(config, name="drafter")
    for bad in (tmp_path / "absent", tmp_path / "new" / "step-000999", newest / "config.json"):
        with pytest.raises(UserError, match="checkpoint"):
            find_checkpoint(bad, tmp_path)
    with pytest.raises(UserError, match="no training run"):
        find_checkpoint(None, tmp_path / "empty")
