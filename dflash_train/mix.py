"""Stage 1: a recipe's sources become prompts.jsonl, heldout.jsonl and, where asked for, reserve.jsonl, with every count
and every dropped row's reason in manifest.json.

    sources -> forms -> cleaning -> filters -> hold out, take by hash order -> <work_dir>/data/<recipe>/

CPU only. The rows are canonical Samples that end where the target is to answer. The same recipe gives the same bytes on
every run and machine; an existing mix is reused only when nothing that its rows depend on has changed.
"""

import errno
import shutil
import socket
import tempfile
from collections import Counter
from pathlib import Path

from dflash_train import cli
from dflash_train.bench.contamination import contamination_texts, evaluation_facts, evaluation_need, used_commits
from dflash_train.config import DataConfig, Run
from dflash_train.data.answers.mix_rows import FILES
from dflash_train.data.card import write_card
from dflash_train.data.hub import pin
from dflash_train.data.hub.files import download
from dflash_train.data.mixing.pool import SourceReport
from dflash_train.data.mixture import Mix, build_mix
from dflash_train.data.reachable import COLUMNS, download_need, source_need, source_rows
from dflash_train.data.staleness import made_of, recipe_hash, why_stale
from dflash_train.plan import check_disk, preflight
from dflash_train.util.checks import Check
from dflash_train.util.errors import UserError
from dflash_train.util.io import human_bytes, sha256_file, write_json, write_jsonl
from dflash_train.util.locks import one_at_a_time
from dflash_train.util.log import Progress, say, table
from dflash_train.util.provenance import provenance

PATIENCE_S = 4 * 3600.0  # for another process that makes the same mix
BYTES_PER_ROW = 20_000  # spooled and final text of one row, generously; for the disk check alone


def main(run: Run) -> None:
    """Check, mix, say what comes next."""
    if run.dry_run or mix_problem(run):
        table(f"sources of {run.data.name}", COLUMNS, source_rows(run.data))
        preflight(run, checks(run), todo(run))
    ensure_mix(run)
    say("next: " + cli.next_command("regenerate", run))


def ensure_mix(run: Run) -> Path:
    """The folder with this run's mix, made now unless a complete one of the same recipe, limit and inputs is there.
    Of several processes that come at once one makes it, and the others wait.

    Raises UserError when a source or an evaluation set cannot be reached, is short, or (data.strict) has a bad row.
    """
    if mix_problem(run) is not None:
        if missing := [need for need in needs(run) if not need.ok]:
            raise UserError(missing[0].name, got=missing[0].detail, fix=missing[0].fix)
        lock = run.mix_dir.with_name(f".{run.mix_dir.name}.lock")
        with one_at_a_time(lock, f"the mix {run.mix_dir}", PATIENCE_S):
            if problem := mix_problem(run):  # still, now that nobody else makes it
                return _make(run, problem)
    say(f"mix: {run.mix_dir} is complete and up to date")
    return run.mix_dir


def _make(run: Run, problem: str) -> Path:
    """Make the mix. problem: why there is none."""
    evaluation, data = contamination_texts(run.data.decontaminate), pin(run.data)
    record = made_of(data, run.limit, evaluation_facts(run.data.decontaminate))  # before reading: a later change shows
    say(f"mix: making {run.mix_dir} ({problem})")
    download({name: source for name, source in data.sources.items() if source.kind == "hub"})
    run.mix_dir.mkdir(parents=True, exist_ok=True)
    (run.mix_dir / "manifest.json").unlink(missing_ok=True)  # from here until the new one is written there is no mix
    _sweep(run.mix_dir)
    workspace = Path(tempfile.mkdtemp(prefix=".mixing-", suffix=f"@{socket.gethostname()}", dir=run.mix_dir))
    try:
        steps = _Steps()
        mix = build_mix(data, evaluation, workspace, limit=run.limit, on_row=steps.rows, on_step=steps.begin)
        steps.begin("writing")
        written = {split: _write(run.mix_dir, mix, split) for split in FILES}
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(
            str(run.mix_dir), got="the disk is full", fix="free some space, or work_dir=<another>"
        ) from None
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    written = {split: counts for split, counts in written.items() if counts is not None}
    manifest = describe(run, data, mix, written, record)
    write_card(run.mix_dir, (FILES["train"], FILES["heldout"]), manifest)
    write_json(run.mix_dir / "manifest.json", manifest)
    _print_report(run, mix, manifest)
    return run.mix_dir


def mix_problem(run: Run) -> str | None:
    """Why this run's mix has to be made, or None where it is there, whole and up to date."""
    return why_stale(run.mix_dir, run.data, run.limit, evaluation_facts(run.data.decontaminate))


def _sweep(folder: Path) -> None:
    """Remove this host's spools, which killed runs left: the lock is ours. Another host's stay, since a disk that it
    shares with us need not share locks."""
    for old in folder.glob(f".mixing-*@{socket.gethostname()}"):
        shutil.rmtree(old, ignore_errors=True)


# ---------------------------------------------------------------- before


def needs(run: Run) -> list[Check]:
    """Every source and evaluation set, found or not, without downloading anything."""
    sources = [source_need(name, source) for name, source in run.data.sources.items()]
    return sources + [evaluation_need(task, run.data.decontaminate) for task in run.data.decontaminate]


def checks(run: Run) -> list[Check]:
    """`needs` and the disk, as rows of the preflight table."""
    takes = [source.take or 0 for source in run.data.sources.values()]
    num_bytes = max(50_000_000, sum(takes) * BYTES_PER_ROW)
    return [
        *needs(run),
        *download_need(run.data, run.mix_dir, num_bytes),
        check_disk(run.mix_dir, num_bytes, "work_dir=<a folder on a larger disk>"),
    ]


def todo(run: Run) -> list[str]:
    """What mixing will do."""
    files = [name for split, name in FILES.items() if split != "reserve" or run.data.reserve_fraction]
    wanted = {name: "all" if source.take is None else f"{source.take:,}" for name, source in run.data.sources.items()}
    return [
        f"mix: recipe {run.data.name}, {len(wanted)} source(s): "
        + ", ".join(f"{count} of {n}" for n, count in wanted.items()),
        f"     hold out {run.data.heldout_fraction:.1%} a source, decontaminate against "
        + (", ".join(run.data.decontaminate) or "nothing"),
        f"     -> {run.mix_dir}/ ({', '.join([*files, 'manifest.json', 'card.html'])})"
        + (f", limit {run.limit}" if run.limit else ""),
    ]


# ---------------------------------------------------------------- after


class _Steps:
    """Says what is being done, and how many rows of it are."""

    def begin(self, what: str) -> None:
        say(f"mix: {what}")
        self.progress = Progress("mix", None, "rows")

    def rows(self, number: int) -> None:
        self.progress.update(number)


def _write(folder: Path, mix: Mix, split: str) -> dict | None:
    """Write one split; returns its counts. Without reserve rows there is no reserve file, and None."""
    path = folder / FILES[split]
    if split == "reserve" and not mix.splits[split]:
        path.unlink(missing_ok=True)
        return None
    thinking: Counter = Counter()
    by_source: Counter = Counter()

    def rows():
        for row in mix.rows(split):
            thinking[f"{row['bucket']}/{row['thinking']}"] += 1
            by_source[row["source"]] += 1
            yield row

    count = write_jsonl(path, rows())
    return {
        "rows": count,
        "thinking": dict(sorted(thinking.items())),
        "sources": dict(by_source),
        "file": {"bytes": path.stat().st_size, "sha256": sha256_file(path), "rows": count},
    }


def describe(run: Run, data: DataConfig, mix: Mix, written: dict[str, dict], record: dict) -> dict:
    """The manifest: recipe and code, every count, every reason.

    data: the recipe, hub revisions as commits; record: `made_of` it."""
    total: Counter = Counter()
    contaminated: Counter = Counter()
    pairs = lambda kind: {n: dict(found) for n, report in mix.reports.items() if (found := getattr(report, kind))}
    for report in mix.reports.values():
        total.update(report.dropped + report.filtered)
        contaminated.update(report.contaminated)
    return {
        **provenance(cli.config_dict(run), recipe_hash=recipe_hash(record), seed=run.data.seed, limit=run.limit),
        "recipe": run.data.name,
        "made_of": record,
        "rows": {split: counts["rows"] for split, counts in written.items()},
        "sources": {name: _source_entry(data, name, report, written) for name, report in mix.reports.items()},
        "dropped": dict(sorted(total.items())),
        "duplicates": pairs("duplicates"),
        "near_duplicates": pairs("near_duplicates"),
        "contamination": {task: contaminated[task] for task in run.data.decontaminate},
        "evaluation_items": mix.coverage,
        "evaluation_wrappers": mix.num_wrappers,
        "evaluation_commits": used_commits(run.data.decontaminate),
        "thinking": {split: counts["thinking"] for split, counts in written.items()},
        "files": {FILES[split]: counts["file"] for split, counts in written.items()},
        # So that no stage can train on them, whatever file they come to it in.
        "heldout_ids": sorted(candidate.id for candidate in mix.splits["heldout"]),
    }


def _source_entry(data: DataConfig, name: str, report: SourceReport, written: dict[str, dict]) -> dict:
    source = data.sources[name]
    return {
        "kind": source.kind,
        "license": source.license,
        "bucket": source.bucket,
        "revision": source.revision,
        "wanted": source.take,
        "read": report.read,
        "not_needed": report.not_needed,
        "converted": report.converted,
        "dropped": dict(sorted(report.dropped.items())),
        "lost": dict(sorted(report.lost.items())),
        "skipped": dict(sorted(report.skipped.items())),
        "repaired": dict(sorted(report.repaired.items())),
        "prompts": report.prompts,
        "filtered": dict(sorted(report.filtered.items())),
        "contaminated": dict(report.contaminated),
        "kept": report.kept,
        "taken": report.taken,
        "heldout": report.heldout,
        "reserve": report.reserve,
        "written": {split: counts["sources"].get(name, 0) for split, counts in written.items()},
    }


def _print_report(run: Run, mix: Mix, manifest: dict) -> None:
    columns = ["source", "read", "not chosen", "not needed", "dropped", "kept", "taken", "reserve", "held out"]
    rows = []
    for name, report in mix.reports.items():
        dropped = report.dropped.total() + report.filtered.total()
        counts = [report.read, report.skipped.total(), report.not_needed, dropped, report.kept]
        counts += [report.taken, report.reserve, report.heldout]
        rows.append([name, *[f"{count:,}" for count in counts]])
    table(f"mix: {run.data.name}", columns, rows)
    for name, report in mix.reports.items():
        wanted = run.data.sources[name].take
        if report.taken == 0 and wanted != 0:
            say(f"mix: {name} gave no rows and is skipped (data.allow_short=true)")
        elif wanted is not None and report.taken != wanted:
            say(f"mix: {name} gives {report.taken:,} rows where {wanted:,} were asked for (data.allow_short=true)")
    for task, found in mix.coverage.items():
        if found["unchecked"]:
            say(
                f"mix: {found['unchecked']:,} of the {found['items']:,} items of {task} say too little to be looked for"
            )
    size = sum(fact["bytes"] for fact in manifest["files"].values())
    say(
        f"mix: {manifest['rows']['train']:,} train and {manifest['rows']['heldout']:,} held-out prompts, "
        f"{human_bytes(size)} in {run.mix_dir}"
    )
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in manifest["dropped"].items())
    say(f"mix: dropped: {reasons or 'nothing'} (by source in manifest.json)")


if __name__ == "__main__":
    cli.main("mix", main)
