"""The target answers the mix, in batches.

reads    <mix_dir>/prompts.jsonl, heldout.jsonl             (runs `mix` when they are absent)
writes   <answers_dir>/samples.jsonl, heldout.jsonl, manifest.json
while it runs: <answers_dir>/parts/<batch>.jsonl, each whole or absent, so a killed run loses at most one batch
"""

import dataclasses
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from dflash_train import cli, mix, plan
from dflash_train.config import RegenerateRun, Run
from dflash_train.data import answers as rules
from dflash_train.data.chat import RenderDrop, Renderer
from dflash_train.records import Sample
from dflash_train.target import TARGETS
from dflash_train.target.canary import check_target
from dflash_train.util.device import cpu_has_bfloat16, cuda_problem
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes, read_json, read_jsonl, sha256_file, write_json, write_jsonl
from dflash_train.util.log import Progress, duration, say, table
from dflash_train.util.provenance import canonical_json, provenance, redact

MIX_FILES = ("prompts.jsonl", "heldout.jsonl")
BYTES_PER_TOKEN = 24  # text and ids in samples.jsonl, and the same again in parts/ until the merge


def main(run: RegenerateRun) -> None:
    ensure_answers(run)
    say("next: " + cli.next_command("extract", run))


def ensure_answers(run: Run) -> Path:
    """The folder with every sample answered; answers what is missing. Raises UserError when the folder holds answers
    of another target, template, sampling or mix."""
    folder, target_module = run.answers_dir, cli.plugin(TARGETS, run.target.kind, "target.kind")
    run = dataclasses.replace(run, stage="regenerate")
    complete = (folder / "manifest.json").exists()
    if not complete:
        preflight(run, target_module.weights(run.target))
    ensure_prompts(run, complete)
    files = target_module.prepare(run.target)
    renderer = Renderer(files.tokenizer)
    identity = make_identity(run, files, renderer)
    if complete:
        check_identity(read_json(folder / "manifest.json")["identity"], identity, folder)
        say(f"answers are complete: {folder}")
        return folder

    samples = read_samples(run)
    prompts, dropped = make_prompts(run, samples, renderer, files.hf_config.get_text_config().max_position_embeddings)
    batches = rules.plan_batches(prompts, run.data.answers.batch_size, run.data.seed)
    parts = open_parts(folder, identity)
    todo = [batch for batch in batches if not part_path(parts, batch).exists()]
    num_todo = sum(len(batch.prompts) for batch in todo)
    say(f"{len(samples):,} prompts, {len(prompts):,} to answer in {len(batches)} batches of up to "
        f"{run.data.answers.batch_size}; {len(batches) - len(todo)} batches are there already; at most "
        f"{num_todo * run.data.answers.max_new_tokens:,} tokens to write into {folder}")  # fmt: skip
    start, num_tokens = time.monotonic(), 0
    if todo:
        target = target_module.load(run.target, run.hardware)
        check_target(target, run.target, ["capture", "answer"])
        num_tokens = answer_batches(run, target, todo, parts)
    seconds = time.monotonic() - start
    facts = {"tokens_this_run": num_tokens, "seconds_this_run": round(seconds, 1),
             "tokens_per_s": round(num_tokens / seconds, 1) if num_tokens else None}  # fmt: skip
    merge(run, samples, batches, parts, dropped, files, renderer, identity, facts)
    shutil.rmtree(parts)
    return folder


# ---------------------------------------------------------------- before


def preflight(run: Run, weights) -> None:
    """The table: prompts, weights, disk, memory, device. Exits 2 when something is missing, before any download."""
    answers = run.data.answers
    problem = mix_problem(run)
    rows = (run.data.total or 0) if problem else sum(1 for path in mix_paths(run) for _ in read_jsonl(path))
    text_bytes = rows * answers.max_new_tokens * BYTES_PER_TOKEN
    found = f"{problem}: mix runs first" if problem else f"{rows:,} in {run.mix_dir}"
    on_disk = text_bytes + weights.download_bytes + (weights.num_bytes if weights.download_bytes else 0)
    in_memory = int(1.3 * weights.num_bytes) * (2 if run.target.dtype == "float32" else 1) + 500_000_000
    checks = [
        plan.Check("prompts", True, found),
        plan.Check(f"target {run.target.name}", weights.ok, weights.detail, weights.fix),
        plan.check_disk(run.answers_dir, on_disk),
        plan.check_device(run),
        plan.check_memory(in_memory),
    ]
    say_what = f"regenerate: {run.target.name} answers {f'{rows:,} prompts' if rows else 'the mix'}, up to "
    todo = [say_what + f"{answers.max_new_tokens} tokens each, {answers.batch_size} at a time, into {run.answers_dir} "
            f"(at most {human_bytes(text_bytes)})"]  # fmt: skip
    if slow := bfloat16_problem(run):
        todo.append(slow)
    if problem:
        checks += [check for check in mix.checks(run) if check.name != "disk"]
        todo = [*mix.todo(run), *todo]
    plan.preflight(run, checks, todo)


def bfloat16_problem(run: Run) -> str | None:
    """One line where bfloat16 would make this CPU crawl."""
    on_cpu = run.hardware.device == "cpu" or cuda_problem() is not None
    if run.target.dtype != "bfloat16" or not on_cpu or cpu_has_bfloat16():
        return None
    return "note: this CPU has no bfloat16 instructions; target.dtype=float32 answers several times faster here"


def mix_paths(run: Run) -> list[Path]:
    return [run.mix_dir / name for name in MIX_FILES]


def mix_problem(run: Run) -> str | None:
    """Why the prompts of this recipe are not there, or None. Needs none of the recipe's sources."""
    manifest = run.mix_dir / "manifest.json"
    if not all(path.exists() for path in [manifest, *mix_paths(run)]):
        return f"no prompts in {run.mix_dir}"
    recipe = lambda data: {key: value for key, value in data.items() if key not in ("answers", "name")}
    mixed = read_json(manifest)["config"]["data"]
    same = canonical_json(recipe(mixed)) == canonical_json(redact(recipe(dataclasses.asdict(run.data))))
    return None if same else f"the recipe of {run.mix_dir} has changed"


def ensure_prompts(run: Run, answered: bool) -> None:
    """Run `mix` first where its rows are absent or of another recipe, and say so. Complete answers do without them."""
    problem = mix_problem(run)
    if problem and not (answered and not any(path.exists() for path in mix_paths(run))):
        say(f"{problem}: running mix first")
        mix.ensure_mix(run)


def read_samples(run: Run) -> list[Sample]:
    """Every row of the mix in its order: training rows, then held-out ones."""
    return [Sample.from_json(row) for path in mix_paths(run) for row in read_jsonl(path)]


def make_prompts(run: Run, samples: list[Sample], renderer: Renderer, max_context: int):
    """-> (prompts that can be answered, {row: reason} of the others)."""
    prompts, dropped = [], {}
    room = max_context - run.data.answers.max_new_tokens
    for row, sample in enumerate(samples):
        try:
            token_ids = renderer.prompt_ids(sample)
        except RenderDrop as drop:
            dropped[row] = f"prompt_{drop.reason}"
            continue
        if len(token_ids) > room:
            dropped[row] = "prompt_too_long"
            continue
        prompts.append(rules.Prompt(row, token_ids, rules.sampling_of(sample, run.data.answers, run.data.seed)))
    return prompts, dropped


def make_identity(run: Run, files, renderer: Renderer) -> dict:
    """Everything that must be equal for two runs' answers to belong together."""
    return {
        "target": files.spec.name,
        "target_fingerprint": files.spec.fingerprint,
        "target_dtype": run.target.dtype,
        "template_hash": renderer.template_hash,
        "seed": run.data.seed,
        "sampling": dataclasses.asdict(run.data.answers),
        "mix": {path.name: sha256_file(path) for path in mix_paths(run) if path.exists()},
    }


def check_identity(old: dict, new: dict, folder: Path) -> None:
    """Raise UserError naming both sides of every difference. A mix that is not here is none: answers may be copied."""
    old, new = flat(old), flat(new)
    differ = [key for key in new if old.get(key) != new[key]]
    if differ:
        say_all = lambda facts: ", ".join(f"{key} = {facts.get(key)}" for key in differ)
        raise UserError(f"answers in {folder}", got=say_all(old), want=say_all(new) + ", as in this run",
                        fix=f"delete {folder}, or give this run another data.name or target.name")  # fmt: skip


def flat(value: dict, prefix: str = "") -> dict:
    """{'a': {'b': 1}} -> {'a.b': 1}."""
    out = {}
    for key, item in value.items():
        out |= flat(item, f"{prefix}{key}.") if isinstance(item, dict) else {prefix + key: item}
    return out


def open_parts(folder: Path, identity: dict) -> Path:
    """The folder of finished batches; those of another target, template, sampling or mix are refused."""
    parts = folder / "parts"
    record = parts / "identity.json"
    if record.exists():
        check_identity(read_json(record), identity, folder)
    else:
        write_json(record, identity)
    return parts


# ---------------------------------------------------------------- the work


def part_path(parts: Path, batch: rules.Batch) -> Path:
    return parts / f"{batch.index:06d}.jsonl"


def answer_batches(run: Run, target, todo: list[rules.Batch], parts: Path) -> int:
    """Answer and store batch by batch; returns the number of tokens written."""
    progress = Progress("regenerate", sum(len(batch.prompts) for batch in todo), "answers")
    total = 0
    for batch in todo:
        try:
            results = target.answer([prompt.token_ids for prompt in batch.prompts], seed=batch.seed,
                                    max_new_tokens=run.data.answers.max_new_tokens,
                                    **dataclasses.asdict(batch.sampling))  # fmt: skip
        except torch.OutOfMemoryError:
            raise UserError("data.answers.batch_size", got=f"{len(batch.prompts)}: the GPU's memory is too small",
                            want="a smaller batch", fix=f"data.answers.batch_size={max(1, len(batch.prompts) // 2)} "
                            "(finished batches belong to the old size: delete parts/)") from None  # fmt: skip
        rows = [
            {"row": prompt.row, "finish_reason": finish_reason, "token_ids": token_ids}
            for prompt, (token_ids, finish_reason) in zip(batch.prompts, results, strict=True)
        ]
        write_jsonl(part_path(parts, batch), rows)
        tokens = sum(len(row["token_ids"]) for row in rows)
        total += tokens
        progress.update(len(rows), tokens=tokens)
    progress.close()
    return total


# ---------------------------------------------------------------- after


def merge(run: Run, samples: list[Sample], batches: list[rules.Batch], parts: Path, dropped: dict[int, str],
          files, renderer: Renderer, identity: dict, facts: dict) -> None:  # fmt: skip
    """Parts -> samples.jsonl and heldout.jsonl in the mix's order, then the manifest (last: it says all is there)."""
    found = {}
    for batch in batches:
        record = rules.sampling_record(batch)
        for part in read_jsonl(part_path(parts, batch)):
            found[part["row"]] = (part["token_ids"], part["finish_reason"], record)
    counts = rules.Counts(dropped)

    def kept(split: str) -> Iterator[dict]:
        for row, sample in enumerate(samples):
            if sample.split != split or row not in found:
                continue
            token_ids, finish_reason, record = found[row]
            counts.finish_reasons[finish_reason] += 1
            reason = rules.drop_reason(token_ids, finish_reason, files.tokenizer, run.data.answers.max_repetition)
            if reason:
                counts.dropped[reason] += 1
                continue
            regen = rules.regen_record(files.spec, record, finish_reason, token_ids)
            done = rules.answered(sample, regen, files.tokenizer, renderer.has_thinking_modes)
            counts.keep(done)
            yield done.to_json()

    num_train = write_jsonl(run.answers_dir / "samples.jsonl", kept("train"))
    num_heldout = write_jsonl(run.answers_dir / "heldout.jsonl", kept("heldout"))
    if num_train + num_heldout == 0:
        raise UserError(f"answers in {run.answers_dir}", got=f"none left; dropped: {dict(counts.dropped)}", want="some")
    record = provenance(cli.config_dict(run), target_fingerprint=files.spec.fingerprint, seed=run.data.seed,
                        template_hash=renderer.template_hash)  # fmt: skip
    manifest = {"identity": identity, "prompts": len(samples), **counts.to_json(), **facts, "provenance": record}
    write_json(run.answers_dir / "manifest.json", manifest)
    rows = [["kept for training", f"{num_train:,}"], ["kept held out", f"{num_heldout:,}"],
            ["answer tokens", f"{counts.num_tokens:,}"],
            ["cut by max_new_tokens", f"{sum(counts.capped.values()):,}"]]  # fmt: skip
    rows += [[f"dropped: {reason}", f"{count:,}"] for reason, count in counts.dropped.most_common()]
    table(f"answers in {run.answers_dir}", ["", "count"], rows)
    if facts["tokens_per_s"]:
        say(f"{facts['tokens_this_run']:,} tokens in {duration(facts['seconds_this_run'])}, with loading: "
            f"{facts['tokens_per_s']} tokens/s")  # fmt: skip


if __name__ == "__main__":
    cli.main("regenerate", main)
