"""Does a training row contain an evaluation item? 13-word n-grams, 40-character grams for CJK, whole texts where
shorter, and functions of the same name and docstring.

Grams are compared as 64-bit sums over their words' hashes, so that a million of them take 10 MB and a text is checked
in a few array operations; a false hit is expected once in some 10,000 mixes of a million rows.
"""

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b

import numpy as np

NUM_WORDS = 13
NUM_CJK_CHARS = 40
MIN_CONTAINED_WORDS = 8  # shorter evaluation texts ("return x + 1") only count when they are a whole message
MIN_CONTAINED_CJK = 13
MAX_ITEMS = 2  # an n-gram of more evaluation items than this is a prompt wrapper, not content

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[^\W_{_CJK}]+")
_CJK_CHAR = re.compile(f"[{_CJK}]")
_FUNCTION = re.compile(r"\bdef\s+(\w+)\s*\([^)]*\)[^:\n]*:\s*[rR]?(?:\"\"\"(.*?)\"\"\"|'''(.*?)''')", re.DOTALL)
_MAX_KNOWN_UNITS = 500_000
# Odd, so that multiplying by them loses nothing modulo 2^64.
_POWERS = np.array([pow(0x9E3779B97F4A7C15, k, 2**64) for k in range(NUM_CJK_CHARS)], dtype=np.uint64)


def words_of(text: str) -> tuple[list[str], str]:
    """Lower-case words of NFKC text without punctuation, and its CJK characters as one string."""
    if text.isascii():  # NFKC changes nothing
        return _WORD.findall(text.lower()), ""
    text = unicodedata.normalize("NFKC", text).lower()
    return _WORD.findall(text), "".join(_CJK_CHAR.findall(text))


class _UnitHashes(dict):
    """u64 by word or character, the same in every process."""

    def __missing__(self, unit: str) -> int:
        if len(self) >= _MAX_KNOWN_UNITS:
            self.clear()
        value = int.from_bytes(blake2b(unit.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        self[unit] = value
        return value


class _Kind:
    """Words, or CJK characters: how long a gram is, and from how many units on a shorter text counts contained."""

    def __init__(self, size: int, shortest: int):
        self.size, self.shortest, self.hashes = size, shortest, _UnitHashes()

    def sums(self, units: Sequence[str], sizes: Collection[int]) -> Iterator[tuple[int, np.ndarray]]:
        """For each size that fits, ascending: u64[len(units) - size + 1], one number a window, which differs where any
        unit or the order does."""
        lookup = self.hashes
        values = np.array([lookup[unit] for unit in units], dtype=np.uint64)
        running = np.zeros(len(units), dtype=np.uint64)
        for size in range(1, min(max(sizes, default=0), len(units)) + 1):
            count = len(units) - size + 1
            running = running[:count] + values[size - 1 :] * _POWERS[size - 1]
            if size in sizes:
                yield size, running

    def grams(self, units: Sequence[str]) -> tuple[int, np.ndarray] | None:
        """Length and sums of an evaluation text's windows, which are the whole text where it is shorter than one; None
        where it is too short to count."""
        size = min(len(units), self.size)
        return next(self.sums(units, {size})) if len(units) >= self.shortest else None


class _Table:
    """Sums of one length, each with the task that has it. Most sums of a text are told apart from all of them by their
    top bits alone: looking 250 words up in a million costs a cache miss each otherwise."""

    def __init__(self, sums: np.ndarray, tasks: np.ndarray):
        """sums: u64, ascending."""
        self.sums, self.tasks = sums, tasks
        self.shift = np.uint64(64 - min(24, max(8, len(sums).bit_length() + 4)))
        self.present = np.zeros(1 << (64 - int(self.shift)), dtype=bool)
        self.present[sums >> self.shift] = True

    def first(self, sums: np.ndarray) -> tuple[int, int] | None:
        """(index, task) of the first of `sums` that is in the table."""
        maybe = np.flatnonzero(self.present[sums >> self.shift])
        places = np.minimum(np.searchsorted(self.sums, sums[maybe]), len(self.sums) - 1)
        hits = np.flatnonzero(self.sums[places] == sums[maybe])
        return (int(maybe[hits[0]]), int(self.tasks[places[hits[0]]])) if len(hits) else None


class _Grams:
    """Evaluation grams of one kind: sums by length, each with the task that has it."""

    def __init__(self, kind: _Kind):
        self.kind, self.parts = kind, {}
        self.num_wrappers = 0
        self.tables: dict[int, _Table] = {}

    def add(self, texts: list[Sequence[str]], task: int) -> None:
        """One item's texts."""
        by_size: dict[int, list[np.ndarray]] = {}
        for size, sums in filter(None, map(self.kind.grams, texts)):
            by_size.setdefault(size, []).append(sums)
        for size, sums in by_size.items():
            unique = np.unique(np.concatenate(sums))  # an item's repetition of its own text is no wrapper
            self.parts.setdefault(size, []).append((unique, np.full(len(unique), task)))

    def finish(self) -> None:
        for size, parts in self.parts.items():
            sums, tasks = (np.concatenate(column) for column in zip(*parts, strict=True))
            unique, first, counts = np.unique(sums, return_index=True, return_counts=True)
            content = counts <= MAX_ITEMS
            self.num_wrappers += int((~content).sum())
            if content.any():
                self.tables[size] = _Table(unique[content], tasks[first[content]])
        self.parts = {}

    def hit(self, units: Sequence[str]) -> int | None:
        """The task of the earliest gram in `units`, of the shortest where several begin there."""
        found = []
        for size, sums in self.kind.sums(units, self.tables.keys()):
            if (first := self.tables[size].first(sums)) is not None:
                found.append((first[0], size, first[1]))
        return min(found)[2] if found else None


class Decontaminator:
    """Finds evaluation text in training text. tasks: {task: [item]}, an item being the texts of one evaluation
    example. Tasks in `long_only` count by full-length grams alone (a mix's own held-out rows have turns like "go on").

    A text that evaluation sets repeat, one set under several names or one question in several of its files, counts once
    and for the first: as several items it would pass for a prompt wrapper and not be looked for. A turn that held-out
    rows repeat is one: dropping every training row with it would empty its source.
    """

    def __init__(self, tasks: dict[str, list[tuple[str, ...]]], long_only: Sequence[str] = ()):
        self.tasks = list(tasks)
        self._words = _Grams(_Kind(NUM_WORDS, MIN_CONTAINED_WORDS))
        self._cjk = _Grams(_Kind(NUM_CJK_CHARS, MIN_CONTAINED_CJK))
        self._whole: dict[str, str] = {}
        self._functions: dict[tuple[str, str], str] = {}
        known: set[str] = set()
        for number, (task, items) in enumerate(tasks.items()):
            for item in items:
                texts = [words_of(text) for text in item]
                if task not in long_only:
                    texts = [text for text in texts if (whole := _whole(*text)) not in known and not known.add(whole)]
                self._add(number, task, texts, task in long_only)
                if task not in long_only:
                    self._functions.update((found, task) for text in item for found in functions_of(text))
        self._words.finish()
        self._cjk.finish()
        self.num_wrappers = self._words.num_wrappers + self._cjk.num_wrappers

    def unchecked(self, items: list[tuple[str, ...]]) -> int:
        """How many of a task's items a training row could hold unnoticed: they say too little, or only what is a prompt
        wrapper."""
        return sum(not any(self.hit(text) for text in item) for item in items)

    def _add(self, number: int, task: str, texts: list[tuple[list[str], str]], long_only: bool) -> None:
        least = lambda kind: kind.size if long_only else kind.shortest
        self._words.add([words for words, _ in texts if len(words) >= least(self._words.kind)], number)
        self._cjk.add([cjk for _, cjk in texts if len(cjk) >= least(self._cjk.kind)], number)
        for words, cjk in texts if not long_only else ():
            if (words or cjk) and len(words) < MIN_CONTAINED_WORDS and len(cjk) < MIN_CONTAINED_CJK:
                self._whole.setdefault(_whole(words, cjk), task)

    def hit(self, text: str) -> str | None:
        """The task of which `text` contains an item's n-gram or function, or is a whole short text; None for a clean
        text."""
        words, cjk = words_of(text)
        if len(words) < MIN_CONTAINED_WORDS and (task := self._whole.get(_whole(words, cjk))):
            return task
        for grams, units in ((self._words, words), (self._cjk, cjk)):
            if (number := grams.hit(units)) is not None:
                return self.tasks[number]
        known = self._functions and "def " in text
        return next((self._functions[f] for f in functions_of(text) if f in self._functions), None) if known else None


def functions_of(text: str) -> list[tuple[str, str]]:
    """(name, words of the docstring) of every Python function in `text` that has one."""
    found = [(name, words_of(first or second)[0]) for name, first, second in _FUNCTION.findall(text)]
    return [(name, " ".join(words)) for name, words in found if words]


def _whole(words: list[str], cjk: str) -> str:
    return " ".join(words) + "|" + cjk
