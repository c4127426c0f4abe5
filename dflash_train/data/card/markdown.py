"""Text out of data sets made visible and harmless, and a card as Markdown."""

import html
import re
import unicodedata
from itertools import pairwise

from dflash_train.data.card.parts import Bars, Card, Example, Histogram, Section, Table

# What begins markup inside a line, or makes a link out of an address or a formula out of money; a backslash makes each
# of them plain. The second kind counts at the start of a line only.
_MARKUP = re.compile(r"[\\`*_{}\[\]|~$@]|(?<=:)/(?=/)|(?<=www)\.", re.IGNORECASE)
_LINE_MARKUP = re.compile(r"^(?=[#+=-])|^(\d+)(?=[.)])")
BAR = 30  # characters of the longest bar


def visible(text: str) -> str:
    """The text with invisible characters spelled out: controls (but newline and tab), formats such as those that turn
    the reading direction, surrogates, private use. What is left can be stored as UTF-8 and shown anywhere."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char)[0] != "C" else f"\\u{ord(char):04x}"
        for char in text.replace("\r\n", "\n")
    )


def inline(text: object) -> str:
    """One line of Markdown that shows exactly this text, in a table cell too."""
    flat = " ".join(visible(str(text)).split())
    return html.escape(_LINE_MARKUP.sub(r"\1\\", _MARKUP.sub(r"\\\g<0>", flat)), quote=False)


def fenced(text: str) -> str:
    """A code block that the text cannot end."""
    text = visible(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def number(cell: str | int | None) -> str:
    """A cell as text: 1234 -> '1,234', None -> ''."""
    return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell


def markdown(card: Card) -> str:
    """The whole card; no data in it can become markup."""
    lines = [f"# {inline(card.title)}", "", inline(card.subtitle), ""]
    lines += [f"- {inline(value)} {inline(what)}" for value, what in card.figures]
    for section in card.sections:
        lines += ["", *_section(section)]
    return "\n".join(lines) + "\n"


def _section(section: Section) -> list[str]:
    lines = [f"## {inline(section.title)}"]
    for note in section.notes:
        lines += ["", inline(note)]
    for part in section.parts:
        lines += ["", *_PARTS[type(part)](part)]
    return lines


def _table(table: Table) -> list[str]:
    lines = [f"**{inline(table.title)}**", ""] if table.title else []
    lines.append("| " + " | ".join(inline(column) or " " for column in table.columns) + " |")
    lines.append("|" + "|".join("---:" if numeric else "---" for numeric in table.numeric) + "|")
    return lines + ["| " + " | ".join(inline(number(cell)) for cell in row) + " |" for row in table.rows]


def _lines(labels: list[str], counts: list[int], lengths: list[float]) -> str:
    """A bar chart of text."""
    width = max((len(label) for label in labels), default=0)
    rows = zip(labels, counts, lengths, strict=True)
    return fenced("\n".join(f"{label:<{width}} {count:>11,} {'#' * round(n)}".rstrip() for label, count, n in rows))


def _bars(bars: Bars) -> list[str]:
    labels = [" ".join(visible(label).split()) for label, _ in bars.bars]
    counts = [count for _, count in bars.bars]
    return [f"**{inline(bars.title)}**", "", _lines(labels, counts, bars.scaled(BAR))]


def _histogram(histogram: Histogram) -> list[str]:
    spans = [f"{low:,} to {high - 1:,}" for low, high in pairwise(histogram.edges)]
    widest = max(map(len, spans))
    title = f"**{inline(histogram.title)}**: {inline(histogram.caption)}"
    return [title, "", _lines([f"{span:>{widest}}" for span in spans], histogram.counts, histogram.scaled(BAR))]


def _example(example: Example) -> list[str]:
    lines = [f"**{inline(example.title)}**"]
    for role, text in example.messages:
        lines += ["", inline(role), "", fenced(text)]
    return lines


_PARTS = {Table: _table, Bars: _bars, Histogram: _histogram, Example: _example}
