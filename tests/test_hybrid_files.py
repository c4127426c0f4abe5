"""Hybrid checkpoints as they ship: inside an image-text model, in shards, mixtures; whole, or refused by name."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from helpers_hybrid import DENSE, HYBRIDS, brute_logits, save_composite, started
from helpers_target import plain_logits, random_ids, random_tree, tiny
from safetensors.torch import load_file, save_file

from dflash_train.config import HardwareConfig, TargetConfig
from dflash_train.target import files, hf
from dflash_train.target import tiny as tiny_module
from dflash_train.util.errors import UserError

CPU = HardwareConfig(device="cpu")
COMPOSITES = ("qwen3_5", "qwen3_5_moe")


def load(folder, **changes):
    return hf.load(TargetConfig(**{"name": "x", "kind": "hf", "path": str(folder), "dtype": "float32", **changes}), CPU)


def drop_weight(folder, name: str) -> None:
    """Take one tensor out of whichever file has it, and out of the index."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            del tensors[name]
            save_file(tensors, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text())
        listed["weight_map"].pop(name)
        index.write_text(json.dumps(listed))


@pytest.mark.parametrize("arch", HYBRIDS)
def test_a_tiny_hybrid_has_the_layers_heads_and_gains_the_tests_rely_on(arch):
    """Fresh norms and equal head counts would hide a double norm and a wrong map of value heads to key heads."""
    target = tiny(arch)
    config = target.text_config
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert (config.linear_num_key_heads, config.linear_num_value_heads, config.linear_conv_kernel_dim) == (2, 4, 4)
    gains = {name: p for name, p in target.model.named_parameters() if p.dim() == 1 and "norm" in name}
    assert len(gains) == 4 * 2 + 3 + 2 + 1, "two a layer, the gated ones, query and key, the last"
    for name, gain in gains.items():
        applied = gain if name.endswith("linear_attn.norm.weight") else 1 + gain
        assert 0.5 <= applied.min() < 0.9 and 1.2 < applied.max() <= 2.0, name


@pytest.mark.parametrize("arch", COMPOSITES)
@pytest.mark.parametrize("max_shard_size", ("50GB", "200KB"))
def test_composite_and_sharded_checkpoints_load_with_the_logits_of_the_plain_one(arch, max_shard_size, tmp_path):
    """Trap 7: sizes from the text config, weights under `model.language_model`, the vision part left where it is."""
    folder, plain, ids = save_composite(tmp_path / "model", arch, max_shard_size), tiny(arch), random_ids(20, 1)
    assert (len(list(folder.glob("*.safetensors"))) == 1) == (max_shard_size == "50GB")
    target = load(folder)
    assert (target.spec.num_layers, target.spec.hidden_size, target.spec.embedding_rows) == (4, 64, 128)
    assert target.spec.stop_ids == (2,) and not hasattr(target.decoder, "visual")
    assert (plain_logits(target, ids) - plain_logits(plain, ids)).abs().max() < 1e-5
    assert torch.equal(target.head().embedding, plain.head().embedding)
    drafted = random_tree(7, 2)
    assert (started(target, ids).forward(drafted)[0] - brute_logits(plain, ids, drafted)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ("layers.1.linear_attn.A_log", "layers.0.linear_attn.conv1d.weight", "norm.weight"))
def test_a_missing_weight_of_a_composite_checkpoint_is_an_error_that_names_it(name, tmp_path):
    """Trap 7: never random weights, in one file or in shards."""
    for number, max_shard_size in enumerate(("50GB", "200KB")):
        folder = save_composite(tmp_path / str(number), DENSE, max_shard_size)
        drop_weight(folder, f"model.language_model.{name}")
        with pytest.raises(UserError, match=re.escape(name)):
            load(folder)


def test_a_missing_expert_is_an_error_that_names_it(tmp_path):
    """Trap 7: experts ship one by one and are packed at load."""
    folder = tiny_module.save_tiny(tmp_path / "model", tiny_module.Options(arch="qwen3_next"))
    names = [n for n in load_file(folder / "model.safetensors") if "layers.1.mlp.experts" in n]
    drop_weight(folder, names[0])
    with pytest.raises(UserError, match="experts"):
        load(folder)


@pytest.mark.parametrize("arch", HYBRIDS)
def test_a_hybrid_folder_brings_its_tokenizer_and_is_the_same_target_wherever_it_is_written(arch, tmp_path):
    options = tiny_module.Options(arch=arch)
    folders = [tiny_module.save_tiny(tmp_path / name, options) for name in ("one", "two")]
    one, two = (load(folder, mask_token_id=127) for folder in folders)
    assert one.spec.fingerprint == two.spec.fingerprint
    assert torch.equal(plain_logits(one, random_ids(9, 1)), plain_logits(two, random_ids(9, 1)))
    status = files.weights_status(TargetConfig(name="x", kind="hf", path=str(folders[0])))
    assert status.ok and status.num_bytes == (folders[0] / "model.safetensors").stat().st_size


def test_an_unknown_tiny_arch_is_refused_naming_those_there_are():
    with pytest.raises(UserError, match="qwen3_5_moe"):
        tiny_module.tiny_config(tiny_module.Options(arch="qwen4"))


@pytest.mark.parametrize(
    "num_bytes, num_gpus, world_size, want",
    [
        (40e9, 2, "1", {"": torch.device("cuda", 0)}),  # fits one
        (54e9, 2, "1", "auto"),  # Qwen3.6-27B on two 48 GB cards
        (54e9, 1, "1", {"": torch.device("cuda", 0)}),  # nowhere else to go: loading says that memory is short
        (54e9, 2, "2", {"": torch.device("cuda", 0)}),  # the other GPU belongs to another process
    ],
)
def test_a_model_larger_than_one_gpu_is_spread_over_those_of_a_process_alone(
    monkeypatch, num_bytes, num_gpus, world_size, want
):
    prepared = SimpleNamespace(folder=None, spec=SimpleNamespace(name="mine"))
    monkeypatch.setattr(files, "weight_bytes", lambda folder, dtype: num_bytes)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (48e9, 51e9))
    monkeypatch.setenv("WORLD_SIZE", world_size)
    assert hf.placement(prepared, "bfloat16", torch.device("cuda", 0)) == want
    assert hf.placement(prepared, "bfloat16", torch.device("cpu")) is None


def test_weight_bytes_are_those_of_the_dtype_loaded_in(tmp_path):
    folder = tiny_module.save_tiny(tmp_path / "tiny", tiny_module.Options(arch="qwen3_5"))
    count = sum(parameter.numel() for parameter in load(folder).model.parameters())
    assert files.weight_bytes(folder, "bfloat16") == 2 * count and files.weight_bytes(folder, "float32") == 4 * count
