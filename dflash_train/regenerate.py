"""The target answers the mix: here, in batches, or on any OpenAI-compatible server (data.answers.server=<url>).

reads    <mix_dir>/prompts.jsonl, heldout.jsonl, reserve.jsonl     (runs `mix` when they are absent)
writes   <answers_dir>/samples.jsonl, heldout.jsonl, manifest.json, card.md, card.html
while it runs: <answers_dir>/parts/*.jsonl, every answer that came; what is there is never asked again

    eight fixed questions -> every row -> reserve rows in place of lost ones, until none is lost -> merge
"""

import dataclasses
import shutil
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from dflash_train import cli, mix, plan
from dflash_train.config import RegenerateRun, Run
from dflash_train.data.answers import rules
from dflash_train.data.answers.identity import check_identity, has_answers_of, make_identity, open_parts
from dflash_train.data.answers.journal import Journal, claim
from dflash_train.data.answers.mix_rows import FILES, MixRows
from dflash_train.data.answers.probes import Probe, check_probes
from dflash_train.data.answers.served import Served
from dflash_train.data.answers.server import Server
from dflash_train.data.answers.work import Work
from dflash_train.data.card import write_card
from dflash_train.data.chat import Renderer
from dflash_train.decode.batched import Batches, window_rows
from dflash_train.decode.greedy import check_greedy
from dflash_train.target import TARGETS
from dflash_train.target.base import TargetModel
from dflash_train.target.canary import check_target
from dflash_train.util.device import cpu_has_bfloat16, cuda_problem
from dflash_train.util.errors import UserError
from dflash_train.util.io import count_lines, full_disk_said, human_bytes, read_json, write_json, write_jsonl
from dflash_train.util.log import Progress, duration, say, table
from dflash_train.util.provenance import provenance

DISK_FULL = "free some space, then run the same command again: what was answered is kept"
BYTES_PER_TOKEN = 24  # text and ids in samples.jsonl, and the same again in parts/ until the merge


def main(run: RegenerateRun) -> None:
    """Answer everything, or one share of it."""
    if run.data.answers.worker:
        answer_share(run)
    else:
        ensure_answers(run)
        say("next: " + cli.next_command("extract", run))


def ensure_answers(run: Run) -> Path:
    """The folder with every sample answered; answers what is missing. Raises UserError when the folder holds answers
    of another target, template, sampling or mix."""
    folder = run.answers_dir
    if run.data.answers.worker:
        raise UserError("data.answers.worker", got=run.data.answers.worker, want="null: this needs all the answers",
                        fix="only python -m dflash_train.regenerate answers a share")  # fmt: skip
    opened = open_work(run)
    if opened is None:
        return folder
    files, identity, parts, server = opened
    started = time.monotonic()
    with claim(parts, None), full_disk_said(folder, DISK_FULL):
        work = Work(run.data, MixRows(run.mix_dir), files, Renderer(files.tokenizer), Journal(parts), parts)
        answerer = open_answerer(run, work, server)
        stand_ins = work.waves(answerer.answer)
        merge(run, work, identity, stand_ins, time.monotonic() - started)
    shutil.rmtree(parts, ignore_errors=True)
    return folder


def answer_share(run: Run) -> None:
    """Share i of n of the mix's rows. What is lost among them is refilled by the run that merges all shares."""
    opened = open_work(run)
    if opened is None:
        return
    files, _, parts, server = opened
    with claim(parts, run.data.answers.worker), full_disk_said(parts, DISK_FULL):
        work = Work(run.data, MixRows(run.mix_dir), files, Renderer(files.tokenizer), Journal(parts), parts)
        open_answerer(run, work, server).answer(work.asked_rows)
    say(f"share {run.data.answers.worker} is answered; once all are, the same command without data.answers.worker "
        "refills what was lost, and merges")  # fmt: skip


def open_work(run: Run):
    """(target's files, identity, folder of the answers so far, server or None); None where all is answered."""
    folder, target_module = run.answers_dir, cli.plugin(TARGETS, run.target.kind, "target.kind")
    run = dataclasses.replace(run, stage="regenerate")
    complete = (folder / "manifest.json").exists()
    problem = prompts_problem(run, complete)
    if not complete:
        preflight(run, target_module.weights(run.target), problem)
    if problem:
        say(f"{problem}: running mix first")
        mix.ensure_mix(run)
    files = target_module.prepare(run.target)
    renderer = Renderer(files.tokenizer)
    identity = make_identity(run.data, run.target.dtype, files.spec, renderer.template_hash, mix_paths(run))
    if complete:
        check_identity(read_json(folder / "manifest.json").get("identity", {}), identity, folder)
        shutil.rmtree(folder / "parts", ignore_errors=True)  # of a run that was killed behind its last step
        say(f"answers are complete: {folder}")
        return None
    answers, server = run.data.answers, None
    if answers.server:
        server = Server(answers.server, answers.client, files.spec.stop_ids)
        say(f"server {server.url}: {server.describe()}")
    size = answers.batch_size
    how = {"model": server.model} if server else {"batch_size": size, "window_rows": window_rows(size)}
    return files, identity, open_parts(folder, identity | {"answered_by": how}), server


# ---------------------------------------------------------------- before


def prompts_problem(run: Run, complete: bool) -> str | None:
    """Why `mix` has to run first, or None. Complete answers do without prompts, as on another machine.

    Prompts that were paid for are not made anew: raises UserError where the mix is out of date and there are answers
    of it, unless data.answers.accept_stale_mix."""
    problem, folder = mix.mix_problem(run), run.answers_dir
    if problem is None or (complete and not any(path.exists() for path in mix_paths(run))):
        return None
    if not has_answers_of(folder, mix_paths(run)):
        return problem
    if run.data.answers.accept_stale_mix:
        say(f"{run.mix_dir} is out of date ({problem}); going on with the answers of it")
        return None
    raise UserError(f"answers in {folder}", got=f"they are of a mix that is out of date: {problem}",
                    want="the mix of this recipe as it is now", fix=f"data.answers.accept_stale_mix=true goes on with "
                    f"them; delete {folder} to mix and answer anew; or give this run another data.name")  # fmt: skip


def preflight(run: Run, weights, problem: str | None) -> None:
    """The table: prompts, weights, disk, memory, device. Exits 2 when something is missing, before any download.
    problem: why mix runs first."""
    answers = run.data.answers
    loaded = answers.server is None or answers.client.compare
    rows = (run.data.total or 0) if problem else sum(map(count_lines, mix_paths(run)[:2]))
    text_bytes = rows * answers.max_new_tokens * BYTES_PER_TOKEN
    there_bytes = sum(path.stat().st_size for path in (run.answers_dir / "parts").glob("*.jsonl"))
    found = f"{problem}: mix runs first" if problem else f"{rows:,} in {run.mix_dir}"
    weight_bytes = weights.download_bytes + (weights.num_bytes if weights.download_bytes else 0)
    on_disk = weight_bytes + max(0, text_bytes - there_bytes)
    in_memory = int(1.3 * weights.num_bytes) * (2 if run.target.dtype == "float32" else 1) + 500_000_000
    checks = [
        plan.Check("prompts", True, found),
        plan.Check(f"target {run.target.name}", weights.ok, weights.detail, weights.fix),
        plan.check_disk(run.answers_dir, on_disk),
        *([plan.check_device(run), plan.check_memory(in_memory)] if loaded else []),
    ]
    at_once = answers.client.concurrency if answers.server else answers.batch_size
    where = f" on {answers.server}" if answers.server else ""
    there = f", of which {human_bytes(there_bytes)} are there" if there_bytes else ""
    todo = [f"regenerate: {run.target.name} answers {f'{rows:,} prompts' if rows else 'the mix'}, up to "
            f"{answers.max_new_tokens} tokens each, {at_once} at a time{where}, into {run.answers_dir} "
            f"(at most {human_bytes(text_bytes)}{there})"]  # fmt: skip
    if loaded and (slow := bfloat16_problem(run)):
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
    """prompts.jsonl, heldout.jsonl, reserve.jsonl; a mix may have no reserve."""
    return [run.mix_dir / name for name in FILES.values()]


# ---------------------------------------------------------------- the work


def open_answerer(run: Run, work: Work, server: Server | None) -> Served | Batches:
    """Who answers: the server, or the target loaded here when something is to do. The first questions are probes."""
    answers = run.data.answers
    say(f"{len(work.asked_rows):,} prompts, {len(work.rows.rows['reserve']):,} more in reserve; "
        f"{len(work.journal.places):,} are answered already; at most {work.limits.max_new:,} tokens each, into "
        f"{run.answers_dir}")  # fmt: skip

    def ready(answerer: Served | Batches) -> None:
        if answers.probe:
            loaded = answerer.target if server is None else load(run) if answers.client.compare else None
            check_first(work, answerer.probe(), loaded)

    return Served(work, server, ready) if server else Batches(work, lambda: load(run), ready)


def load(run: Run) -> TargetModel:
    target = cli.plugin(TARGETS, run.target.kind, "target.kind").load(run.target, run.hardware)
    check_target(target, run.target, ["capture", "answer"])
    return target


def check_first(work: Work, probes: list[Probe], target: TargetModel | None) -> None:
    """Check the eight answers, and the greedy ones against our own loop where the target is loaded here. What was
    asked, answered and let off stays beside the answers. Raises UserError with what was found."""
    spec = work.files.spec
    odd = check_probes(probes, work.renderer, spec.stop_ids, spec.embedding_rows, work.data.answers.max_repetition)
    if target is not None:
        greedy = [item for item in probes if item.prompt.sampling == rules.GREEDY]
        odd |= check_greedy(target, {item.name: (item.prompt.token_ids, item.token_ids) for item in greedy})
    shown = [{"asked": item.name, "answer": work.files.tokenizer.decode(item.token_ids), "odd": odd.get(item.name)}
             for item in probes]  # fmt: skip
    write_json(work.parts / "probes.json", {"probes": shown})
    say("the first eight answers are as they should be" + "".join(f"\n  but for: {name}: {odd[name]}" for name in odd))


# ---------------------------------------------------------------- after


def merge(run: Run, work: Work, identity: dict, stand_ins: list[int], seconds: float) -> None:
    """Records -> samples.jsonl and heldout.jsonl in the mix's order, then the manifest (last: it says all is there)."""
    counts, rows = rules.Counts(work.limits.context), work.rows.rows
    progress = Progress("merge", None, "rows")

    def write(name: str, split: str, some: Iterable[int]) -> int:
        path = run.answers_dir / name
        return write_jsonl(path, (progress.update() or sample.to_json() for sample in work.kept(some, split, counts)))

    num_train = write("samples.jsonl", "train", chain(rows["train"], stand_ins))
    num_heldout = write("heldout.jsonl", "heldout", rows["heldout"])
    if num_train + num_heldout == 0:
        raise UserError(f"answers in {run.answers_dir}", got=f"none left; dropped: {dict(counts.dropped)}", want="some")
    record = provenance(cli.config_dict(run), target_fingerprint=work.files.spec.fingerprint, seed=run.data.seed,
                        template_hash=work.renderer.template_hash)  # fmt: skip
    probes, refilled = work.parts / "probes.json", work.refilled(stand_ins)
    servers = {path.stem.removeprefix("server-"): read_json(path) for path in work.parts.glob("server-*.json")}
    manifest = {"identity": identity, "prompts": len(work.asked_rows), **counts.to_json(), "refill": refilled,
                "servers": servers, **(read_json(probes) if probes.exists() else {}),
                "seconds_last_run": round(seconds, 1), "provenance": record}  # fmt: skip
    write_card(run.answers_dir, ("samples.jsonl", "heldout.jsonl"), read_json(run.mix_dir / "manifest.json"), manifest)
    write_json(run.answers_dir / "manifest.json", manifest)
    table(f"answers in {run.answers_dir}", ["", "count"], report_rows(num_train, num_heldout, counts, refilled))
    for name, count in refilled.items():
        if count["not_refilled"]:
            say(f"{name}: {count['not_refilled']:,} of {count['lost']:,} lost rows could not be refilled: no reserve "
                f"row is left (data.reserve_fraction={run.data.reserve_fraction:g})")  # fmt: skip
    say(f"done in {duration(seconds)}, with loading")


def report_rows(num_train: int, num_heldout: int, counts: rules.Counts, refilled: dict) -> list[list[str]]:
    rows = [["kept for training", num_train], ["kept held out", num_heldout], ["answer tokens", counts.num_tokens],
            ["cut at the longest answer", sum(counts.capped.values())],
            ["refilled from the reserve", sum(count["refilled"] for count in refilled.values())]]  # fmt: skip
    rows += [[f"dropped: {reason}", count] for reason, count in counts.dropped.most_common()]
    return [[name, f"{count:,}"] for name, count in rows]


if __name__ == "__main__":
    cli.main("regenerate", main)
