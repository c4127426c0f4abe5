"""Parameter counts from a few numbers equal those of the models themselves."""

import pytest
import torch
from helpers_plan import build_plan, run_27b, toy_drafter

from dflash_train.config import TargetConfig, TargetShape
from dflash_train.drafter.files import parameter_shapes
from dflash_train.planning import shapes
from dflash_train.target.tiny import CONFIGS, Options, tiny_config
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers


def count(hf_config) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config)
    return sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())


def from_files(hf_config) -> shapes.TargetSizes:
    target = shapes.sizes_from_files(TargetConfig(name="x", kind="hf"), hf_config.get_text_config().to_dict())
    sizes, unknown = shapes.target_sizes(target)
    assert not unknown
    return sizes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", CONFIGS)
def test_the_formula_counts_every_parameter_of_every_kind_of_target(arch, tied):
    hf_config = tiny_config(Options(arch=arch, tied=tied, num_layers=8))
    assert shapes.target_parameters(from_files(hf_config)) == count(hf_config)


@pytest.mark.parametrize("name", ["Qwen2Config", "Qwen3MoeConfig", "MistralConfig", "LlamaConfig"])
def test_biases_and_experts_without_a_shared_one_are_counted(name):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 50, "moe_intermediate_size": 24, "num_experts": 4,
             "attention_bias": True}  # fmt: skip
    hf_config = getattr(transformers, name)(**sizes)
    if name == "MistralConfig":
        hf_config.attention_bias = False  # it has none, whatever its config says
    assert shapes.target_parameters(from_files(hf_config)) == count(hf_config)


def test_qwen3_6_27b_has_the_parameters_of_the_model_its_yaml_describes():
    run, sizes = run_27b()
    assert shapes.target_parameters(sizes) == run.target.num_parameters == 26_895_998_464
    shape = sizes.shape
    hf_config = transformers.Qwen3_5TextConfig(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, vocab_size=248320, tie_word_embeddings=False,
    )  # fmt: skip
    assert count(hf_config) == run.target.num_parameters
    assert from_files(hf_config) == sizes and sizes.num_full_layers == 16 and shape.num_linear_layers == 48
    for got, want in (
        (shapes.linear_attention_parameters(sizes), 115.9e6), (shapes.full_attention_parameters(sizes), 104.9e6),
        (shapes.mlp_parameters(sizes), 267.4e6), (shapes.table_parameters(sizes), 1.271e9),
        (shapes.layers_parameters(sizes), 24.35e9),
    ):  # fmt: skip
        assert got == pytest.approx(want, rel=1e-3)


def test_the_27b_drafter_has_exactly_the_published_parameters():
    run, _ = run_27b()
    parts = shapes.drafter_parameters(run.drafter)
    assert sum(parts.values()) == 1_730_213_120
    assert parts == {"layers": 1_599_130_880, "fc": 131_072_000, "norms": 10_240}


@pytest.mark.parametrize("bias", [False, True])
def test_the_drafters_formula_counts_its_tensors(bias):
    drafter = toy_drafter(attention_bias=bias)
    shapes_of = parameter_shapes(drafter).values()
    assert sum(shapes.drafter_parameters(drafter).values()) == sum(torch.Size(s).numel() for s in shapes_of)


def test_smollm2_has_the_parameters_its_yaml_says():
    target = build_plan("target=smollm2_135m").target
    assert shapes.target_parameters(shapes.target_sizes(target)[0]) == target.num_parameters


def test_a_pass_reads_the_experts_its_tokens_can_choose_and_never_the_embedding():
    sizes = from_files(tiny_config(Options(arch="qwen3_5_moe")))
    one, two, many = (shapes.read_parameters(sizes, n) for n in (1, 2, 99))
    per_expert = 3 * sizes.hidden_size * sizes.shape.expert_size * sizes.num_layers
    assert two - one == 2 * per_expert and two == many
    assert many == shapes.target_parameters(sizes)  # tied: the head is the embedding
    dense = from_files(tiny_config(Options(arch="qwen3_5", tied=False)))
    unread = shapes.target_parameters(dense) - shapes.read_parameters(dense, 1)
    assert unread == shapes.table_parameters(dense)


def test_what_is_not_known_is_named_by_its_key():
    sizes, unknown = shapes.target_sizes(TargetConfig(name="x", kind="hf", hidden_size=8, num_layers=2))
    assert sizes is None
    assert unknown == ["target.vocab_size", *(f"target.shape.{n}" for n in
                       ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "tied"))]  # fmt: skip
    run, _ = run_27b()
    shape = TargetShape(**{**vars(run.target.shape), "conv_kernel": 0})
    assert shapes.target_sizes(TargetConfig(**{**vars(run.target), "shape": shape})) == (
        None, ["target.shape.conv_kernel"])  # fmt: skip


def test_a_yaml_that_contradicts_the_files_is_refused_naming_both():
    text = tiny_config(Options(arch="qwen3")).to_dict()
    with pytest.raises(UserError, match=r"num_layers=9(.|\n)*num_layers=3"):
        shapes.sizes_from_files(TargetConfig(name="x", kind="hf", num_layers=9), text)
    with pytest.raises(UserError, match=r"num_heads=7(.|\n)*num_heads=4"):
        shapes.sizes_from_files(TargetConfig(name="x", kind="hf", shape=TargetShape(num_heads=7)), text)
    with pytest.raises(UserError, match="model type gemma"):
        shapes.sizes_from_files(TargetConfig(name="x", kind="hf"), {"model_type": "gemma"})
