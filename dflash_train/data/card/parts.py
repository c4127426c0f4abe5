"""What a data card is made of: sections of tables, bars, histograms and examples, in plain values.

Everything here may hold text out of data sets, as it is; the writers (card_markdown, card_html) make it harmless.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Table:
    """Rows of cells; an int is a count, None an empty cell. The first column names the row."""

    title: str
    columns: list[str]
    rows: list[list[str | int | None]]

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, and so stand to the right."""
        is_number = lambda cell: isinstance(cell, int) or (cell or "").endswith(" %")
        return [i > 0 and any(is_number(row[i]) for row in self.rows) for i in range(len(self.columns))]


@dataclass(frozen=True)
class Bars:
    """Labelled counts to compare by eye."""

    title: str
    bars: list[tuple[str, int]]

    def scaled(self, length: float) -> list[float]:
        """Lengths of the bars when the longest is `length`."""
        return scale([count for _, count in self.bars], length)


@dataclass(frozen=True)
class Histogram:
    """counts[i] values v with edges[i] <= v < edges[i + 1]; caption: its quantiles in words."""

    title: str
    unit: str
    edges: list[int]
    counts: list[int]
    caption: str

    def scaled(self, length: float) -> list[float]:
        """Heights of the bins when the highest is `length`."""
        return scale(self.counts, length)


@dataclass(frozen=True)
class Example:
    """One conversation, shortened: (role, text) a message."""

    title: str
    messages: list[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """A heading, sentences, and parts in order."""

    title: str
    notes: list[str] = field(default_factory=list)
    parts: list[Table | Bars | Histogram | Example] = field(default_factory=list)


@dataclass(frozen=True)
class Card:
    """The whole card. figures: the few numbers to see first, (value, what it counts)."""

    title: str
    subtitle: str
    figures: list[tuple[str, str]]
    sections: list[Section]


def scale(counts: list[int], length: float) -> list[float]:
    """Counts in proportion, the largest as `length`."""
    most = max(counts, default=0)
    return [length * count / most if most else 0.0 for count in counts]


def share(part: int, whole: int) -> str:
    """'12.3 %'; '' where there is nothing to share."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def quantile(lengths: Counter, q: float) -> int:
    """The smallest length that at least a share `q` of all values does not exceed."""
    rank, seen = q * lengths.total(), 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= rank:
            return length
    raise ValueError("no lengths")


def log_edges(low: int, high: int) -> list[int]:
    """Integer edges half an octave apart whose bins hold every length in low..high (and one bin for 0, if low is)."""
    powers = sorted({round(2 ** (k / 2)) for k in range(2 * high.bit_length() + 2)})
    start = max(i for i, edge in enumerate([0, *powers]) if edge <= low)
    stop = min(i for i, edge in enumerate([0, *powers]) if edge > high)
    return [0, *powers][start : stop + 1]


def length_facts(lengths: Counter) -> list[int]:
    """[number, median, 95th percentile, longest]; LENGTH_COLUMNS names them."""
    return [lengths.total(), quantile(lengths, 0.5), quantile(lengths, 0.95), max(lengths)]


LENGTH_COLUMNS = ["rows", "median", "95 % up to", "longest"]


def histograms(groups: dict[str, Counter], unit: str) -> list[Histogram]:
    """One histogram a group that has values, all over the same edges so that they compare."""
    groups = {name: lengths for name, lengths in groups.items() if lengths}
    if not groups:
        return []
    edges = log_edges(min(min(c) for c in groups.values()), max(max(c) for c in groups.values()))
    out = []
    for name, lengths in groups.items():
        counts = [sum(n for v, n in lengths.items() if a <= v < b) for a, b in pairwise(edges)]
        rows, median, high, longest = length_facts(lengths)
        caption = f"{rows:,} rows; median {median:,}, 95 % up to {high:,}, longest {longest:,} {unit}"
        out.append(Histogram(name, unit, edges, counts, caption))
    return out
