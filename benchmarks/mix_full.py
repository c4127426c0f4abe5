"""mix914k at its true size, on synthetic sources with planted faults (mix_full_rows.py), against what the faults say
must come out (mix_full_oracle.py).

    python benchmarks/mix_full.py --scale 0.01                       # one hundredth
    python benchmarks/mix_full.py --again 2 1 --output mix_full.json # all 11.4 million rows, three times

Prints wall time and peak memory (all processes, proportional set size) by run, counts by source as Markdown, whether
all runs wrote the same bytes, recall and precision of near duplicates, and fails where anything is not as expected.
"""

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from math import ceil
from pathlib import Path

import mix_full_oracle as oracle
import mix_full_rows
import psutil
from omegaconf import OmegaConf

from dflash_train import cli
from dflash_train.config import DataConfig
from dflash_train.data import SOURCES
from dflash_train.data.mixture import Mix, build_mix
from dflash_train.util.io import human_bytes, sha256_file, write_jsonl
from dflash_train.util.log import Progress, duration, say
from dflash_train.util.provenance import code_version, stable_hash

SOURCES["synthetic"] = "mix_full_rows"  # at import, so that worker processes, which import this file, have it too
SPLITS = ("train", "heldout", "reserve")


def recipe(scale: float, processes: int | None) -> DataConfig:
    """data_recipes/mix914k.yaml with every source synthetic, and `scale` times its rows and takes."""
    plain = OmegaConf.to_container(OmegaConf.load(cli.RECIPES_DIR / "mix914k.yaml"))
    for name, source in plain["sources"].items():
        rows = round(mix_full_rows.ROWS[name] * scale)
        source |= {"kind": "synthetic", "take": round(source["take"] * scale), "options": {"rows": rows}}
    plain |= {"decontaminate": ["heldout"], "num_processes": processes}
    plain["total"] = sum(source["take"] for source in plain["sources"].values())
    data = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), OmegaConf.create(plain)))
    data.check()
    return data


class PeakMemory(threading.Thread):
    """The most memory that this process and its descendants had at a time: proportional set size, so that pages they
    share count once."""

    def __init__(self):
        super().__init__(daemon=True)
        self.bytes, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.5):
            family = [psutil.Process(), *psutil.Process().children(recursive=True)]
            self.bytes = max(self.bytes, sum(map(_memory, family)))

    def stop(self) -> int:
        self.done.set()
        self.join()
        return self.bytes


def _memory(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:  # it ended meanwhile
        return 0


def run_once(data: DataConfig, folder: Path) -> tuple[Mix, dict]:
    """Mix and write the three files. Returns what happened, seconds and bytes included."""
    workspace = folder / "work"
    workspace.mkdir(parents=True)
    memory, start = PeakMemory(), time.monotonic()
    memory.start()
    progress = Progress("mix", None, "rows", every_s=30)
    mix = build_mix(data, mix_full_rows.evaluation(), workspace, on_row=progress.update, on_step=say)
    built_s = time.monotonic() - start
    num = {split: write_jsonl(folder / f"{split}.jsonl", mix.rows(split)) for split in SPLITS}
    spooled = sum(path.stat().st_size for path in workspace.rglob("*.jsonl"))
    facts = {
        "processes": data.num_processes, "rows": num, "build_s": built_s, "wall_s": time.monotonic() - start,
        "peak_bytes": memory.stop(), "spool_bytes": spooled,
        "sha256": {split: sha256_file(folder / f"{split}.jsonl") for split in SPLITS},
    }  # fmt: skip
    shutil.rmtree(workspace)
    return mix, facts


# ---------------------------------------------------------------- comparing


def compare(data: DataConfig, mix: Mix, expected: dict[str, oracle.Expected]) -> tuple[list[str], dict]:
    """(everything that differs from what was planted, recall and precision of near duplicates)."""
    wrong = []
    check = lambda what, got, want: wrong.append(f"{what}: got {got}, want {want}") if got != want else None
    got_ids = {split: {} for split in SPLITS}
    for split in SPLITS:
        for candidate in mix.splits[split]:
            got_ids[split].setdefault(candidate.source, []).append(candidate.id)
    near_found, near_planted, near_counted = 0, 0, 0
    for name, want in expected.items():
        report = mix.reports[name]
        taken = [id_ for split in SPLITS for id_ in got_ids[split].get(name, [])]
        near_planted += len(want.near_dropped)
        near_found += len(want.near_dropped - set(taken))
        near_counted += report.filtered["near_duplicate"]
        for split, rows in (("train", want.train), ("heldout", want.heldout), ("reserve", want.reserve)):
            check(f"{name} {split} ids", sorted(set(got_ids[split].get(name, [])) ^ set(rows))[:4], [])
        check(f"{name} reserve order", got_ids["reserve"].get(name, []), want.reserve)
        check(f"{name} read", report.read, want.read)
        check(f"{name} skipped", report.skipped, want.skipped)
        check(f"{name} filtered", +report.filtered, +want.filtered)
        check(f"{name} contaminated", +report.contaminated, +want.contaminated)
        check(f"{name} dropped", +report.dropped, dropped(data, name, want, report.not_needed))
        accounted = report.converted + report.skipped.total() + report.dropped.total() + report.not_needed
        check(f"{name} read = converted + skipped + dropped + not needed", accounted, report.read)
    order = [candidate.id for candidate in mix.splits["train"]]
    shuffled = sorted(order, key=lambda id_: (stable_hash(data.seed, "final", id_.partition("/")[0], id_), id_))
    check("train order is the seeded shuffle", order == shuffled, True)
    check("no id twice", len(set(order)), len(order))
    return wrong, {
        "planted": near_planted, "counted": near_counted,
        "recall": near_found / near_planted if near_planted else 1.0,
        "precision": min(1.0, near_found / near_counted) if near_counted else 1.0,
    }  # fmt: skip


def dropped(data: DataConfig, name: str, want: oracle.Expected, not_needed: int) -> Counter:
    """Reasons of the rows that were looked at: in either queue the first, as many as the report says were needed."""
    out = Counter({oracle.AT_READING: want.dropped_at_reading})
    in_order = want.read - want.skipped.total() - want.dropped_at_reading
    heldout, train = want.queues[True], want.queues[False]
    num_heldout = min(len(heldout), int(ceil(data.heldout_fraction * data.sources[name].take) * 1.1) + 200)
    for queue, num in ((heldout, num_heldout), (train, in_order - not_needed - num_heldout)):
        faults = (what.fault for _, _, what, _ in queue[:num])
        out.update(fault for fault in faults if fault in mix_full_rows.BROKEN and fault not in oracle.TEXT_FAULTS)
    return +out


FILTERS = ("duplicate", "near_duplicate", "same_question", "over_cap", "contaminated")


def markdown_counts(mix: Mix) -> str:
    """What became of every source's rows, and below it why those were unusable that no filter names: Markdown."""
    columns = ["source", "read", "not chosen", "not needed", *FILTERS, "unusable", "not asked for", "taken", "reserve",
               "held out"]  # fmt: skip
    counts, unusable = {}, {}
    for name, report in mix.reports.items():
        unusable[name] = Counter({k: n for k, n in (report.dropped + report.filtered).items() if k not in FILTERS})
        named = [report.filtered[reason] for reason in FILTERS]
        used = [report.taken, report.reserve, report.heldout]
        counts[name] = [report.read, report.skipped.total(), report.not_needed, *named, unusable[name].total(),
                        report.kept - sum(used), *used]  # fmt: skip
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    reasons = sorted(set().union(*unusable.values()))
    why = {name: [found[reason] for reason in reasons] for name, found in unusable.items()}
    return f"{_markdown(columns, counts)}\n\n{_markdown(['unusable', *reasons], why)}"


def _markdown(columns: list[str], rows: dict[str, list[int]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[name, *[f"{count:,}" for count in counts]] for name, counts in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def same_bytes(results: list[dict]) -> bool:
    """Whether all runs wrote the same files, which is said with their hashes."""
    first, *others = results
    for facts in others:
        same = "the same bytes" if facts["sha256"] == first["sha256"] else "OTHER BYTES"
        say(f"{facts['processes']} process(es) wrote {same} as {first['processes']}")
    say("sha256: " + ", ".join(f"{split} {text[:16]}" for split, text in first["sha256"].items()))
    return all(facts["sha256"] == first["sha256"] for facts in others)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--again", type=int, nargs="*", default=[], help="process counts of further runs to compare")
    parser.add_argument("--folder", type=Path, default=None, help="where spools and mixes go; a temporary one without")
    parser.add_argument("--output", type=Path, default=None, help="the figures as JSON")
    args = parser.parse_args()
    results, wrong = [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for number, processes in enumerate([args.processes, *args.again]):
            data = recipe(args.scale, processes)
            mix, facts = run_once(data, Path(folder, str(number)))
            read = sum(report.read for report in mix.reports.values())
            say(f"{read:,} rows -> {facts['rows']} in {duration(facts['wall_s'])}, {processes} process(es), "
                f"peak {human_bytes(facts['peak_bytes'])}, spools {human_bytes(facts['spool_bytes'])}")  # fmt: skip
            results.append(facts)
            shutil.rmtree(Path(folder, str(number)))
    print(f"\n{markdown_counts(mix)}\n")
    if not same_bytes(results):
        wrong.append("the runs' files differ")
    differ, near = compare(data, mix, oracle.expect(data))
    wrong += differ
    say(f"near duplicates: {near}")
    for line in wrong:
        say(f"WRONG {line}")
    if args.output:
        args.output.write_text(json.dumps({"scale": args.scale, "code": code_version(), "runs": results,
                                           "near_duplicates": near, "wrong": wrong}, indent=2))  # fmt: skip
    return 1 if wrong or near["recall"] < 0.95 or near["precision"] < 0.95 else 0


if __name__ == "__main__":
    sys.exit(main())
