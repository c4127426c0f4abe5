"""Write a trained drafter as what vLLM, SGLang, speculators and z-lab's code load, and say how to serve it.

zlab           config.json + model.safetensors as published; is_causal only where loaders would assume otherwise
vllm, sglang   the same without auto_map (no remote code comes with it)
speculators    the same tensors, the config nested, layer ids counted from 1
"""

import json
import shlex
from pathlib import Path

import torch

from dflash_train import cli, plan
from dflash_train.config import DrafterConfig, ExportRun
from dflash_train.drafter.files import CONFIG, PROVENANCE, find_checkpoint, load_drafter, save_drafter
from dflash_train.drafter.mask import FULL, SLIDING, layer_types, mask_kind
from dflash_train.drafter.resolve import check_compatible
from dflash_train.drafter.zlab import to_zlab
from dflash_train.target import TARGETS
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes, read_json, write_json
from dflash_train.util.log import say
from dflash_train.util.provenance import provenance

SPECULATORS_VERSION = "0.9.0"
# Keys of a z-lab config that speculators keeps outside `transformer_layer_config`.
_NOT_TRANSFORMER = {
    "architectures", "auto_map", "block_size", "dflash_config", "num_target_layers", "is_causal", "dtype",
}  # fmt: skip


def main(run: ExportRun) -> None:
    source = find_checkpoint(run.export.checkpoint, run.checkpoints_dir)
    folder = output_folder(run, source)
    size = sum(file.stat().st_size for file in ([source] if source.is_file() else source.glob("*.safetensors")))
    plan.preflight(
        run,
        [plan.check_disk(folder, 2 * size), plan.check_memory(3 * size)],
        [f"export {source} ({human_bytes(size)}) for {run.export.format} as {run.export.dtype} into {folder}"],
    )
    model, config = load_drafter(source, run.drafter, dtype=getattr(torch, run.export.dtype))
    check_target(config, run)
    record = source.parent / PROVENANCE if source.is_file() else source / PROVENANCE
    trained = read_json(record) if record.exists() else None
    facts = provenance(cli.config_dict(run), exported_from=str(source), drafter=trained)
    target = target_place(run)
    raw = config_for(config, run, target)
    save_drafter(folder, model, config, facts)
    write_json(folder / CONFIG, raw)
    say(f"wrote {folder}: {sum(p.numel() for p in model.parameters()):,} parameters, block_size {config.block_size}")
    say("serve: " + serving_command(config, run, folder, target))
    say("next: " + cli.next_command("eval", run, **{"eval": "dflash", "eval.checkpoint": str(folder)})
        if run.export.format != "speculators" else "next: the serving command above")  # fmt: skip


def output_folder(run: ExportRun, source: Path) -> Path:
    """export.output_dir, or <work_dir>/export/<run>-<step>-<format>. Never the source itself."""
    if source.name == "drafter":
        name = f"{source.parent.parent.name}-{source.parent.name}"
    else:
        name = source.stem if source.is_file() else source.name
    folder = Path(run.export.output_dir or Path(run.work_dir, "export", f"{name}-{run.export.format}"))
    own = source.parent if source.is_file() else source
    if folder.resolve() == own.resolve():
        raise UserError("export.output_dir", got=f"{folder}, which holds the checkpoint", want="another folder")
    return folder


def target_place(run: ExportRun) -> str:
    """What a server is given as the target: its path or hub id, else the folder this machine keeps it in.

    A target that would have to be downloaded for that gets a placeholder, and a line that says what makes the folder.
    """
    if run.target.path:
        return run.target.path
    module = cli.plugin(TARGETS, run.target.kind, "target.kind")
    status = module.weights(run.target)
    if status.ok and not status.download_bytes:
        return str(module.prepare(run.target).folder)
    say(f"{run.target.name} is not on this machine ({status.detail}): once eval has loaded it here, the same export "
        "names its folder")  # fmt: skip
    return f"<folder of {run.target.name}>"


def check_target(config: DrafterConfig, run: ExportRun) -> None:
    """The serving command names run.target, so the drafter must be for it. Raises UserError naming both."""
    target = run.target
    check_compatible(config, name=target.name, hidden_size=target.hidden_size, num_layers=target.num_layers,
                     vocab_size=target.vocab_size, mask_token_id=target.mask_token_id)  # fmt: skip


def config_for(config: DrafterConfig, run: ExportRun, target: str) -> dict:
    """config.json of the chosen flavour."""
    raw = to_zlab(config, run.export.dtype)
    if run.export.format == "speculators":
        return to_speculators(config, raw, target, target_architectures(target))
    if run.export.format in ("vllm", "sglang"):
        del raw["auto_map"]
    return raw


def target_architectures(target: str) -> list[str]:
    """`architectures` of a target that lies in a local folder; otherwise unknown, and left empty."""
    file = Path(target, CONFIG)
    return read_json(file).get("architectures", []) if file.exists() else []


def to_speculators(config: DrafterConfig, raw: dict, verifier: str, architectures: list[str]) -> dict:
    """z-lab config -> speculators 0.9 config. Raises UserError for causal full layers, which it cannot express."""
    types = layer_types(config)
    if FULL in types and mask_kind(config, FULL).causal:
        raise UserError("export.format", got="speculators, for a drafter whose full-attention layers are causal",
                        want="zlab | vllm | sglang: speculators' full layers are always bidirectional")  # fmt: skip
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": {key: value for key, value in raw.items() if key not in _NOT_TRANSFORMER},
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        # Counted as in EAGLE and vLLM: our id + 1.
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": SLIDING in types and not mask_kind(config, SLIDING).causal,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": raw["dtype"],
    }


def serving_command(config: DrafterConfig, run: ExportRun, folder: Path, target: str) -> str:
    """The command that serves target and drafter. vLLM counts drafted tokens (B-1), SGLang the block (B)."""
    target, draft = shlex.quote(target), shlex.quote(str(folder))
    if run.export.format == "vllm":
        options = {"method": "dflash", "model": str(folder), "num_speculative_tokens": config.block_size - 1}
        mixed = len(set(layer_types(config))) > 1  # needs vLLM's second model runner
        prefix = "VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else ""
        return f"{prefix}vllm serve {target} --speculative-config {shlex.quote(json.dumps(options))}"
    if run.export.format == "sglang":
        options = f"--speculative-draft-model-path {draft} --speculative-num-draft-tokens {config.block_size}"
        return f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH {options}"
    if run.export.format == "speculators":
        return f"vllm serve {draft}"
    return f"dflash generate transformers --model {target} --draft {draft} 'Why is the sky blue?'"


if __name__ == "__main__":
    cli.main("export", main)
