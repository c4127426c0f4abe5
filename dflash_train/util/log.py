"""What a stage prints: plain lines, tables, and progress with rate and ETA. Rank 0 only."""

import sys
import time

from rich.console import Console
from rich.table import Table

from dflash_train.util.dist import is_main
from dflash_train.util.io import human_bytes

# A pipe or a log file has no width of its own; 80 columns would break every path.
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 140)


def say(message: str = "") -> None:
    """Print one line on rank 0, as it is (no markup)."""
    if is_main():
        console.print(message, markup=False)
        sys.stdout.flush()


def table(title: str, columns: list[str], rows: list[list[object]]) -> None:
    """Print a table on rank 0."""
    if not is_main():
        return
    rich_table = Table(title=title, title_justify="left")
    for column in columns:
        rich_table.add_column(column, overflow="fold")
    for row in rows:
        rich_table.add_row(*[str(cell).replace("[", "\\[") for cell in row])
    console.print(rich_table)
    sys.stdout.flush()


def duration(seconds: float) -> str:
    """3725 -> '1h02m05s'."""
    seconds = int(seconds + 0.5)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m{seconds % 60:02d}s"


class Progress:
    """Progress lines at most every `every_s` seconds: 'regenerate 128/512 rows  3.2 rows/s  1,020 tokens/s  ETA 2m00s'.

    Lines, not a bar: they read the same in a terminal, a log file and CI. total None: nobody knows. Counts of unit
    "bytes" are shown as KB, MB, GB.
    """

    def __init__(self, name: str, total: int | None, unit: str, every_s: float = 10.0):
        self.name, self.total, self.unit, self.every_s = name, total, unit, every_s
        self.done, self.extra = 0, {}
        self.start = self.last = time.monotonic()

    def update(self, count: int = 1, **extra: float) -> None:
        """Add `count` done units and any further counters (their rate is shown too)."""
        self.done += count
        for key, value in extra.items():
            self.extra[key] = self.extra.get(key, 0) + value
        now = time.monotonic()
        if now - self.last >= self.every_s:
            self.last = now
            self._line(now)

    def _line(self, now: float) -> None:
        elapsed = max(now - self.start, 1e-9)
        rate = self.done / elapsed
        speed = human_bytes(rate) if self.unit == "bytes" else f"{rate:,.1f} {self.unit}"
        parts = [f"{self.name} {self._counts()}", f"{speed}/s"]
        parts += [f"{value / elapsed:,.0f} {key}/s" for key, value in self.extra.items()]
        if self.total is not None and rate > 0 and self.done < self.total:
            parts.append(f"ETA {duration((self.total - self.done) / rate)}")
        say("  ".join(parts))

    def _counts(self) -> str:
        """'128/512 rows', '1.5 MB of 3.0 GB'; without the total where nobody knows it."""
        if self.unit == "bytes":
            return human_bytes(self.done) + ("" if self.total is None else f" of {human_bytes(self.total)}")
        return f"{self.done:,}" + ("" if self.total is None else f"/{self.total:,}") + f" {self.unit}"

    def close(self) -> None:
        """Print the last line, with the time it took."""
        now = time.monotonic()
        self._line(now)
        say(f"{self.name}: {duration(now - self.start)}")
