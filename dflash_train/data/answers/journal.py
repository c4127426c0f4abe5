"""Answers on disk while they come in: one record a line, appended and never changed, found again by row number.

    {"row": 17, "dropped": null, "finish_reason": "stop", "n_prompt": 96, "num_cut": 0, "sampling": {...},
     "token_ids": [...]}

`row` is a number of MixRows. dropped: why the row gives no sample; then the rest may be absent. A process that is
killed loses only what it had not received: a torn last line is ignored, and cut off before the next append.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dflash_train.util.errors import UserError
from dflash_train.util.io import json_line
from dflash_train.util.locks import try_lock
from dflash_train.util.log import Progress

FSYNC_EVERY_S = 1.0  # against power loss; against a kill, the write alone is enough


class Journal:
    """Every record in a folder's *.jsonl files. Memory holds a place a row, not the answers.

    Raises UserError for a line that is whole and yet no record. Of two records of one row the first counts, files in
    the order of their names.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.places: dict[int, tuple[Path, int]] = {}
        self.dropped: dict[int, str] = {}
        progress = Progress("reading", None, "answers")  # says nothing unless there are many
        for path in sorted(folder.glob("*.jsonl")):
            self.scan(path, progress)

    def scan(self, path: Path, progress: Progress | None = None) -> None:
        """Take in the records of one file."""
        offset = 0
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self.note(json.loads(line), path, offset)
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{path}:{number}", got=f"not a record ({error})", want="lines this program wrote",
                                    fix="delete that line: its question is asked again") from None  # fmt: skip
                offset += len(line)
                if progress:
                    progress.update()

    def note(self, record: dict, path: Path | None, offset: int) -> None:
        """A record that lies in the file; without one, a row that was found unfit before it was asked."""
        if record["row"] in self:
            return
        if path is not None:
            self.places[record["row"]] = (path, offset)
        if record["dropped"]:
            self.dropped[record["row"]] = record["dropped"]

    def __contains__(self, row: int) -> bool:
        return row in self.places or row in self.dropped

    def __getitem__(self, row: int) -> dict:
        path, offset = self.places[row]
        with open(path, "rb") as f:
            f.seek(offset)
            return json.loads(f.readline())


class Writer:
    """Appends to one journal file, and tells `journal` of it."""

    def __init__(self, path: Path, journal: Journal):
        self.path, self.journal = path, journal
        self.file = open(path, "ab+")  # noqa: SIM115 (close() below)
        self._cut_torn_line()
        self.offset = self.file.seek(0, os.SEEK_END)
        self.synced = time.monotonic()

    def _cut_torn_line(self) -> None:
        self.file.seek(0)
        whole = 0
        for line in self.file:
            whole += len(line) if line.endswith(b"\n") else 0
        self.file.truncate(whole)

    def append(self, record: dict) -> None:
        """On return the record outlives this process; within a second or with the next one, the machine."""
        line = json_line(record).encode("utf-8")
        self.file.write(line)
        self.file.flush()
        self.journal.note(record, self.path, self.offset)
        self.offset += len(line)
        if time.monotonic() - self.synced > FSYNC_EVERY_S:
            os.fsync(self.file.fileno())
            self.synced = time.monotonic()

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()


@contextmanager
def claim(folder: Path, worker: str | None) -> Iterator[None]:
    """Nobody else writes what this process writes: worker i/n holds its own lock, one without a share holds all.

    Raises UserError where another process is at it. The lock goes with the process, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"{share_name(worker)}.lock"
    mine.touch()
    whole = folder / f"{share_name(None)}.lock"
    with ExitStack() as stack:
        for path in sorted({mine} if worker else {mine, *folder.glob("*.lock")}):
            _lock(stack, path, fcntl.LOCK_EX)
        if worker:
            whole.touch()
            same_number = set(folder.glob(f"*-of-{worker.partition('/')[2]}.lock"))
            others = set(folder.glob("*-of-*.lock")) - same_number  # shares of another number overlap with this one
            for path in [whole, *sorted(others)]:
                _lock(stack, path, fcntl.LOCK_SH)
        yield


def share_name(worker: str | None) -> str:
    """File name of a share: "answers" or "answers-0-of-4"."""
    return "answers-" + worker.replace("/", "-of-") if worker else "answers"


def _lock(stack: ExitStack, path: Path, how: int) -> None:
    if not try_lock(stack.enter_context(open(path, "ab")), how):  # noqa: SIM115 (the stack closes it)
        raise UserError(f"answers in {path.parent}", got=f"another process is writing there ({path.name})",
                        want="one process a share",
                        fix="wait for it, or give each process its own data.answers.worker=i/n")  # fmt: skip
