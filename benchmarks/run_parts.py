"""A benchmark as a list of named parts: each is done whatever became of the others, and is on file at once."""

import gc
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from dflash_train.util.io import write_json
from dflash_train.util.log import say


class Run:
    """Figures by part, and the parts that failed; written after each, since a run may be cut.

    more: what else is written, made of the figures. minutes: a part is not begun after so long, which is said too.
    """

    def __init__(self, path: Path, more: Callable[[dict], dict] = lambda figures: {}, minutes: float | None = None):
        self.path, self.more, self.figures, self.failed = path, more, {}, {}
        self.until = None if minutes is None else time.monotonic() + 60 * minutes

    def part(self, name: str, work: Callable[[], object]) -> object:
        """Do one part; a failure is said and kept, and the next ones still run. None when it failed."""
        start, result = time.monotonic(), None
        if self.until is not None and start > self.until:
            self.failed[name] = "not begun: the time was over"
            say(f"{name}: {self.failed[name]}")
            return None
        try:
            result = work()
        except Exception as problem:
            traceback.print_exc(limit=-4, file=sys.stdout)
            self.failed[name] = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        gc.collect()  # what a failed part still held
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say(f"{name}: {self.failed.get(name, 'done')} ({time.monotonic() - start:.1f} s)")
        return result

    def keep(self, name: str, work: Callable[[], dict]) -> None:
        """Do one part, whose figures count."""
        result = self.part(name, work)
        if result is not None:
            self.figures[name] = result
        write_json(self.path, {"figures": self.figures, "failed": self.failed, **self.more(self.figures)})
