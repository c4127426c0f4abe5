"""What a target's folder must be: refused by name before weights load, complete, told apart by its fingerprint."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers_target import (
    one_thread,  # noqa: F401
    plain_logits,
    random_ids,
)
from safetensors.torch import load_file, save_file

from dflash_train.config import HardwareConfig, TargetConfig
from dflash_train.target import TARGETS, files, hf, tiny
from dflash_train.target.mask_token import check_mask_token, mask_candidates
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers

CPU = HardwareConfig(device="cpu")


def hf_config(path, **changes) -> TargetConfig:
    return TargetConfig(**{"name": "x", "kind": "hf", "path": str(path), "dtype": "float32", **changes})


@pytest.fixture
def folder(tmp_path):
    return tiny.save_tiny(tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tiny_target_is_an_ordinary_folder_that_hf_loads_with_the_same_logits(folder):
    target, again = tiny.make_tiny_target(), hf.load(hf_config(folder, mask_token_id=127), CPU)
    ids = random_ids(12, 1)
    assert torch.equal(plain_logits(target, ids), plain_logits(again, ids))
    assert again.spec.fingerprint == target.spec.fingerprint
    assert again.spec.stop_ids == (2,) and again.spec.embedding_rows == again.spec.vocab_size == 128


def test_every_kind_exports_the_same_four_names():
    import importlib

    for module in map(importlib.import_module, TARGETS.values()):
        assert all(hasattr(module, name) for name in ("Options", "weights", "prepare", "load"))


def test_tied_models_ship_no_head_and_the_head_is_the_embedding(folder, tmp_path):
    """Trap 7: a tied head is no missing weight, and the loaded head is the embedding itself."""
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    head = hf.load(hf_config(folder), CPU).head()
    assert head.head is head.embedding
    untied = tiny.save_tiny(tmp_path / "untied", tiny.Options(tied=False))
    head = hf.load(hf_config(untied), CPU).head()
    assert head.head is not head.embedding and not torch.equal(head.head, head.embedding)


@pytest.mark.parametrize("name", ("layers.1.mlp.up_proj.weight", "norm.weight", "embed_tokens.weight"))
def test_a_missing_weight_is_an_error_that_names_it(folder, name):
    """Trap 7: never random weights."""
    edit_weights(folder, lambda tensors: tensors.pop(f"model.{name}"))
    with pytest.raises(UserError, match=re.escape(name)):
        hf.load(hf_config(folder), CPU)


def test_an_untied_model_without_its_head_is_an_error(tmp_path):
    """Trap 7: only a tied head may be absent."""
    folder = tiny.save_tiny(tmp_path / "untied", tiny.Options(tied=False))
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(UserError, match="lm_head"):
        hf.load(hf_config(folder), CPU)


def test_a_weight_of_another_shape_is_an_error(folder):
    edit_weights(folder, lambda t: t.update({"model.norm.weight": torch.ones(32)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight"):
        hf.load(hf_config(folder), CPU)


def test_dtype_is_given_to_the_loader_so_rope_frequencies_stay_float32(folder):
    """Trap 19: the target's inv_freq is float32 and equal in a bfloat16 model."""
    exact, half = (hf.load(hf_config(folder, dtype=dtype), CPU) for dtype in ("float32", "bfloat16"))
    assert half.dtype == torch.bfloat16 and half.decoder.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(half.decoder.rotary_emb.inv_freq, exact.decoder.rotary_emb.inv_freq)
    assert half.spec.fingerprint == exact.spec.fingerprint


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention layers"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quantized with fp8"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type=dynamic"),
    ],
)
def test_targets_this_version_cannot_run_are_refused_by_name_before_weights_are_read(folder, changes, message):
    edit_config(folder, **changes)
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UserError, match=message):
        hf.load(hf_config(folder), CPU)
    status = hf.weights(hf_config(folder))
    assert not status.ok


def test_a_qwen3_5_config_is_read_through_its_text_part(tmp_path):
    """Trap 7: composite configs; the sizes are the text model's."""
    text = {"num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 128,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    config = files.read_config(hf_config(tmp_path))
    assert config.get_text_config().hidden_size == 64
    files.refuse_unsupported(config, "mine")
    text["layer_types"] = ["linear_attention"] * 4
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    with pytest.raises(UserError, match="qwen3_5_text without a full-attention layer"):
        hf.load(hf_config(tmp_path), CPU)


def test_an_unknown_family_and_a_windowed_one_are_refused(tmp_path):
    transformers.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="model type gpt2"):
        hf.load(hf_config(tmp_path), CPU)
    transformers.MistralConfig(sliding_window=64).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="sliding"):
        hf.load(hf_config(tmp_path), CPU)


def test_missing_and_wrong_paths_are_one_clear_message(tmp_path, folder):
    with pytest.raises(UserError, match="hub id"):
        hf.load(TargetConfig(name="x", kind="hf"), CPU)
    for path in (tmp_path / "nothing", "./nowhere", "~/nowhere/at/all"):
        with pytest.raises(UserError, match=r"config\.json"):
            hf.load(hf_config(path), CPU)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        hf.load(hf_config(folder), CPU)
    assert not hf.weights(hf_config(folder)).ok


def test_sizes_that_plan_was_told_must_be_the_models(folder):
    with pytest.raises(UserError, match=r"target\.num_layers"):
        hf.load(hf_config(folder, num_layers=30), CPU)


def test_the_fingerprint_tells_weights_and_configs_apart_and_ignores_where_they_lie(folder, tmp_path):
    first = files.fingerprint(folder)
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert files.fingerprint(tmp_path / "elsewhere") == first
    edit_weights(folder, lambda t: t["model.layers.2.mlp.down_proj.weight"].view(-1)[-1].add_(1))
    second = files.fingerprint(folder)
    edit_config(folder, rms_norm_eps=1e-5)
    assert len({first, second, files.fingerprint(folder)}) == 3
    assert tiny.make_tiny_target(seed=1).spec.fingerprint != first


def test_the_chat_template_can_be_given_by_path(folder, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert hf.prepare(hf_config(folder, chat_template=str(path))).tokenizer.chat_template == path.read_text()
    with pytest.raises(UserError, match="chat_template"):
        hf.prepare(hf_config(folder, chat_template="nowhere.jinja"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="ships no chat template"):
        hf.prepare(hf_config(folder))


def test_code_from_a_repository_is_not_run_unless_asked(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "c.C"}}))
    (tmp_path / "c.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="trust_remote_code"):
        hf.load(hf_config(tmp_path), CPU)


# ---------------------------------------------------------------- the mask token


def test_a_mask_token_must_be_an_unused_real_row(folder):
    """Trap 20: null, pad, eos, text tokens, beyond the rows, zero rows: refused, naming candidates."""
    prepared = hf.prepare(hf_config(folder))
    assert check_mask_token(127, prepared) == 127
    assert mask_candidates(prepared)[0] == "127 <|mask|>"
    refused = {None: "null", 0: "pad", 2: "eos", 40: "text token", 3: "text token", 128: "128 rows", -1: "128 rows"}
    for bad, message in refused.items():
        with pytest.raises(UserError, match=message) as error:
            check_mask_token(bad, prepared)
        assert "127 <|mask|>" in str(error.value) and "target.mask_token_id=127" in str(error.value)
    edit_weights(folder, lambda t: t["model.embed_tokens.weight"][127].zero_())
    with pytest.raises(UserError, match="all zeros"):
        check_mask_token(127, prepared)


def test_a_mask_token_is_checked_against_rows_not_against_the_tokenizer(tmp_path):
    """Trap 20: a row behind the tokenizer's vocabulary is a good mask; one behind the embedding is not."""
    prepared = hf.prepare(hf_config(tiny.save_tiny(tmp_path / "wide", tiny.Options(vocab=160))))
    assert prepared.spec.embedding_rows == 160 and len(prepared.tokenizer) == 128
    assert check_mask_token(159, prepared) == 159
    with pytest.raises(UserError, match="160 rows"):
        check_mask_token(160, prepared)


def test_a_wrong_mask_token_is_refused_before_the_weights_are_loaded(folder, monkeypatch):
    """Trap 20."""
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(UserError, match="mask_token_id"):
        hf.load(hf_config(folder, mask_token_id=2), CPU)


def test_transformers_is_imported_in_one_place_that_hides_fla_without_a_gpu():
    """Elsewhere `import transformers` could come first, and bind kernels that crash without a GPU."""
    import sys

    package = Path(files.__file__).parents[1]
    statement = re.compile(r"^\s*(from|import) transformers\b", re.M)
    importing = [p for p in package.rglob("*.py") if statement.search(p.read_text())]
    assert [p.relative_to(package).as_posix() for p in importing] == ["util/hf.py"]
    if not torch.cuda.is_available():
        assert sys.modules["fla"] is None
