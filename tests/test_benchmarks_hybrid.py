"""The small hybrid of benchmarks/: trained end to end in tiny, one document a row, its folder an ordinary target."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_train.config import HardwareConfig, TargetConfig
from dflash_train.target import hf
from dflash_train.target.tiny import MASK_TOKEN_ID, tiny_tokenizer
from dflash_train.util.errors import UserError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import hybrid_target  # noqa: E402
import hybrid_text  # noqa: E402
from hybrid_text import NO_LOSS, Document  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder with a tokenizer, samples, and targets a and b of one seed."""
    folder = tmp_path_factory.mktemp("hybrid")
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    write_samples(folder / "samples.jsonl", "train", 60)
    write_samples(folder / "heldout.jsonl", "heldout", 8)
    for name in ("a", "b"):
        assert hybrid_target.main([*arguments(folder), "--seed", "1", "--out", str(folder / name)]) == 0
    return folder


def arguments(folder, steps=30):
    return ["--tiny", "--steps", str(steps), "--device", "cpu", "--batch-tokens", "512",
            "--tokenizer", str(folder / "tokenizer"),
            "--samples", str(folder / "samples.jsonl"), str(folder / "heldout.jsonl")]  # fmt: skip


def write_samples(path, split, num):
    """Questions whose answers can be guessed: a word, said three times."""
    with open(path, "w", encoding="utf-8") as file:
        for i in range(num):
            word = ("red", "blue", "green", "tea")[i % 4]
            turns = [("user", f"Say {word}, {i}"), ("assistant", f"{word} {word} {word}")]
            row = {"id": f"{split}/{i}", "source": "words", "license": "MIT", "bucket": "chat", "split": split,
                   "thinking": "off", "messages": [{"role": who, "content": text} for who, text in turns]}  # fmt: skip
            file.write(json.dumps(row) + "\n")


def read_record(folder):
    return json.loads((folder / "training.json").read_text("utf-8"))


def test_the_loss_falls_and_the_held_out_one_ends_below_the_unigrams(made):
    record = read_record(made / "a")
    first, last = record["loss"][0][-1], record["loss"][-1][-1]
    assert record["steps"] == 30 and last < 0.8 * first
    assert record["heldout_answer_loss"] < 0.8 * record["unigram_answer_loss"]
    assert record["data_tokens"]["sources"] > 5000 and record["heldout_answer_loss"] > 0.05


def test_the_folder_is_an_ordinary_target_of_the_architecture(made):
    config = json.loads((made / "a" / "config.json").read_text("utf-8"))
    assert config["model_type"] == "qwen3_5_text" and config["tie_word_embeddings"] and config["dtype"] == "bfloat16"
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    target = hf.load(TargetConfig(name="hybrid", kind="hf", path=str(made / "a"), dtype="float32",
                                  mask_token_id=MASK_TOKEN_ID), HardwareConfig(device="cpu"))  # fmt: skip
    assert target.spec.stop_ids == (tiny_tokenizer().eos_token_id,)
    assert {tensor.dtype for tensor in load_file(made / "a" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_folder_with_another_weight_has_a_reload_difference(tmp_path):
    tokenizer = tiny_tokenizer()
    model = hybrid_target.make_model(hybrid_target.TINY, tokenizer, seed=0)
    hybrid_target.round_to_bfloat16(model)
    hybrid_target.save(model, tokenizer, {}, str(tmp_path / "x"))
    ids = torch.arange(7, 40)[None]
    assert hybrid_target.reload_difference(model, str(tmp_path / "x"), ids) == 0
    with torch.no_grad():
        model.model.layers[1].linear_attn.A_log += 0.5
    assert hybrid_target.reload_difference(model, str(tmp_path / "x"), ids) > 0


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(made):
    a, b = (load_file(made / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    fresh = [hybrid_target.make_model(hybrid_target.TINY, tiny_tokenizer(), seed).state_dict() for seed in (1, 2)]
    assert any(not torch.equal(fresh[0][name].bfloat16(), a[name]) for name in a)
    assert not torch.equal(fresh[0]["model.embed_tokens.weight"], fresh[1]["model.embed_tokens.weight"])


def test_more_than_28_million_parameters_are_refused():
    recipe = hybrid_target.Recipe()

    class SmolLM2sSize:
        eos_token_id = pad_token_id = 2

        def __len__(self):
            return 49152

    model = hybrid_target.make_model(recipe, SmolLM2sSize(), seed=0)
    assert 27_000_000 < sum(p.numel() for p in model.parameters()) <= 28_000_000
    with pytest.raises(UserError, match="at most 28,000,000"):
        hybrid_target.make_model(replace(recipe, intermediate=recipe.intermediate + 8), SmolLM2sSize(), seed=0)


def test_a_document_is_read_alone_whatever_shares_its_batch():
    """Trap 4: rows of one document, right-padded, so that no state runs from one document into the next."""
    rng = np.random.default_rng(0)
    documents = [Document(rng.integers(7, 100, n).astype(np.int32), n // 2) for n in (20, 33, 64, 100, 128, 5)]
    corpus = hybrid_text.Corpus(answers=documents[:3], sources=documents[3:])
    batches = hybrid_text.training_batches(corpus, (64, 128), 256, 0.5, pad_id=0, seed=0)
    known = {tuple(document.token_ids) for document in documents}
    for _, batch in zip(range(12), batches, strict=False):
        for ids, labels in zip(batch.token_ids, batch.labels, strict=True):
            length = int(ids.ne(0).sum())
            assert tuple(ids[:length].tolist()) in known and not ids[length:].any()
            assert labels[length:].eq(NO_LOSS).all() and torch.equal(
                labels[length // 2 : length], ids[length // 2 : length]
            )
    model = hybrid_target.make_model(hybrid_target.TINY, tiny_tokenizer(), seed=0).eval()
    together = hybrid_text.collate(documents[:5], 128, 8, pad_id=0)
    with torch.no_grad():
        sums = [hybrid_target.loss_sum(model, hybrid_text.collate([d], len(d), 1, 0), CPU) for d in documents[:5]]
        total, num = hybrid_target.loss_sum(model, together, CPU)
    assert num == sum(n for _, n in sums) == sum(len(d) - len(d) // 2 for d in documents[:5])
    torch.testing.assert_close(total, torch.stack([s for s, _ in sums]).sum(), rtol=1e-5, atol=0)


def test_answers_keep_their_share_of_the_tokens_and_every_document_comes_once_an_epoch():
    answers = [Document(np.full(10 + i, 7 + i, np.int32)) for i in range(30)]
    sources = [Document(np.full(60, 50 + i, np.int32)) for i in range(30)]
    corpus = hybrid_text.Corpus(answers=answers, sources=sources)
    batches = hybrid_text.training_batches(corpus, (64,), 64, 0.25, pad_id=0, seed=3)
    rows = [next(batches).token_ids[0] for _ in range(60)]
    from_answers = sum(int(row.ne(0).sum()) for row in rows if row[0] < 50)
    assert from_answers / sum(int(row.ne(0).sum()) for row in rows) == pytest.approx(0.25, abs=0.02)
    first = [int(row[0]) for row in rows if row[0] >= 50][:30]
    assert sorted(first) == list(range(50, 80)) and first != sorted(first)


def test_samples_without_held_out_rows_and_those_of_another_tokenizer_are_refused(made, tmp_path, capsys):
    alone = arguments(made)[:-1]
    assert hybrid_target.main([*alone, "--out", str(tmp_path / "x")]) == 2
    assert "no usable row of split heldout" in capsys.readouterr().err
    row = json.loads((made / "samples.jsonl").read_text("utf-8").splitlines()[0])
    row["regen"] = {"token_ids": [40, 41, 42]}
    (tmp_path / "other.jsonl").write_text(json.dumps(row) + "\n")
    assert hybrid_target.main([*alone[:-1], str(tmp_path / "other.jsonl"), "--out", str(tmp_path / "x")]) == 2
    assert "another tokenizer" in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.parametrize("name, steps", [
    ("hybrid_gpu.sh", ("target", "answer", "train", "eval", "report")),
    ("smollm2_gpu.sh", ("answer", "train", "eval", "replay", "report")),
])  # fmt: skip
def test_the_gpu_scripts_parse_and_name_their_steps(name, steps, tmp_path):
    for script in (name, "gpu_drafters.sh"):
        assert subprocess.run(["bash", "-n", str(BENCHMARKS / script)]).returncode == 0
    environment = {**os.environ, "WORK": str(tmp_path)}
    usage = subprocess.run(["bash", str(BENCHMARKS / name)], capture_output=True, text=True, env=environment)
    assert usage.returncode == 2 and all(f"{name} {step}" in usage.stdout for step in steps)
