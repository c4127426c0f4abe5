"""Texts of evaluation sets that no training row may contain, by the names that data.decontaminate takes.

humaneval, gsm8k, mtbench          bare questions, solutions and turns of the tasks of prompts.py
bfcl                               every user turn of the function-calling leaderboard's questions     bfcl-eval
file:<path.jsonl>                  every turn of JSON lines with {"turns": [str, ...]}
hub:<owner/name>[@commit]:<subset/split or split>:<column>     one text column of a data set on the hub
heldout                            the mix's own held-out rows (the mixer has them)
"""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from dflash_train.bench.prompts import TASKS, file_prompts
from dflash_train.config import SourceConfig
from dflash_train.data.hub import hub
from dflash_train.data.hub.files import hub_rows
from dflash_train.data.mixing.candidates import HELDOUT_TASK
from dflash_train.data.mixing.decontaminate import words_of
from dflash_train.data.reachable import source_need, wheel_need
from dflash_train.util.checks import Check
from dflash_train.util.errors import UserError
from dflash_train.util.packages import fetch_wheel
from dflash_train.util.provenance import digest

BFCL = ("bfcl-eval", "2026.3.23")
MIN_TURN_WORDS = 5  # or CJK characters
_HUB = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:@([0-9a-f]{40}))?:(?:([\w.-]+)/)?([\w.-]+):(\w+)")
NAMES = (*TASKS, "bfcl", "file:<path.jsonl>", "hub:<owner/name>:<subset/split>:<column>", HELDOUT_TASK)


def contamination_texts(tasks: list[str]) -> dict[str, list[tuple[str, ...]]]:
    """{task: [item]}, an item being the texts of one example that training rows must not contain. Raises UserError for
    an unknown task and for one that cannot be read."""
    return {name: _texts(name, tasks) for name in tasks if name != HELDOUT_TASK}


def _texts(name: str, tasks: Sequence[str] = ()) -> list[tuple[str, ...]]:
    if name in TASKS:
        return [TASKS[name].texts(row) for row in TASKS[name].rows()]
    if name == "bfcl":
        return _bfcl_texts()
    if name.startswith("file:"):
        return [tuple(prompt.turns) for prompt in file_prompts(name)]
    source, column = hub_set(name)
    label = f"data.decontaminate: {name}"
    try:
        rows = [row for _, _, row in hub_rows(name, source) if isinstance(row, dict)]
    except UserError as problem:  # it speaks of a source, which this set is none of
        raise UserError(label, got=problem.got, want=problem.want, fix=_fix(problem.fix, name, tasks)) from problem
    items = [(row[column],) for row in rows if isinstance(row.get(column), str)]
    if not items:
        columns = ", ".join(sorted({str(key) for row in rows for key in row}))
        raise UserError(label, got=f"no text in column '{column}'", want=f"one of {columns}",
                        fix=without(name, tasks))  # fmt: skip
    return items


def _bfcl_texts() -> list[tuple[str, ...]]:
    folder = fetch_wheel(*BFCL) / "bfcl_eval" / "data"
    items = []
    for path in sorted(folder.glob("BFCL_v4_*.json")):
        lines = path.read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.startswith('{"id"')]  # one file is a single object
        turns = ([message for turn in row["question"] for message in turn] for row in rows)
        items += [
            tuple(text for m in messages if m["role"] == "user" and _says(text := m["content"])) for messages in turns
        ]
    return items


def _says(text: str) -> bool:
    """Turns such as "bye" or "can you help" are no item: nothing is learnt for it from a row that has them."""
    words, cjk = words_of(text)
    return len(words) + len(cjk) >= MIN_TURN_WORDS


def hub_set(name: str) -> tuple[SourceConfig, str]:
    """(the data set as a source, its text column) of a hub: name. Raises UserError for any other name."""
    match = _HUB.fullmatch(name)
    if not match:
        raise UserError("data.decontaminate", got=name, want=" | ".join(NAMES))
    path, revision, subset, split, column = match.groups()
    at = {"path": path, "revision": revision, "subset": subset, "split": split}
    return SourceConfig(kind="hub", options={"prompt_field": column}, **at), column  # named, so that it is looked for


def without(name: str, tasks: Sequence[str]) -> str:
    """The override that leaves this set out, as it is typed in a shell."""
    written = (task if task.isidentifier() else f'"{task}"' for task in tasks if task != name)
    return shlex.quote(f"data.decontaminate=[{','.join(written)}]")


def _fix(fix: str | None, name: str, tasks: Sequence[str]) -> str:
    """What helps with an evaluation set: what would help with a source of that data, unless it names that source."""
    return fix if fix and "data.sources." not in fix else f"{without(name, tasks)} leaves it out"


def evaluation_need(name: str, tasks: Sequence[str] = ()) -> Check:
    """Whether the set can be had, found out without downloading it. tasks: all that the recipe names."""
    label = f"evaluation set {name}"
    if name == HELDOUT_TASK:
        return Check(label, True, "the mix's own held-out rows")
    if wheel := _wheel(name):
        return wheel_need(label, *wheel)
    if name.startswith("file:"):
        path = Path(name.removeprefix("file:")).expanduser()
        is_here = path.is_file()
        return Check(label, is_here, str(path) if is_here else f"{path} does not exist", _fix(None, name, tasks))
    if not _HUB.fullmatch(name):
        return Check(label, False, "unknown", f"one of {', '.join(NAMES)}; {_fix(None, name, tasks)}")
    found = source_need(name, hub_set(name)[0])
    return Check(label, found.ok, found.detail, _fix(found.fix, name, tasks))


def evaluation_facts(tasks: list[str]) -> dict[str, str | None]:
    """What a mix depends on of each set, told without network or download: the pinned wheel, a digest of a file's
    turns; null where the name says all (a hub set, the mix's own held-out rows) and for a file that is not here."""
    return {name: _fact(name) for name in tasks}


def _fact(name: str) -> str | None:
    if wheel := _wheel(name):
        return " ".join(wheel)
    is_here = name.startswith("file:") and Path(name.removeprefix("file:")).expanduser().is_file()
    return digest(_texts(name)) if is_here else None


def _wheel(name: str) -> tuple[str, str] | None:
    """Package and version that the set ships in."""
    return BFCL if name == "bfcl" else (TASKS[name].package, TASKS[name].version) if name in TASKS else None


def used_commits(tasks: list[str]) -> dict[str, str]:
    """The commits that the hub sets among these were read at, for the manifest."""
    sources = {name: hub_set(name)[0] for name in tasks if name.startswith("hub:")}
    return {name: hub().sha(name, source) for name, source in sources.items()}
