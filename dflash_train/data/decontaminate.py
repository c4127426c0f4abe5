"""Does a training row contain an evaluation item? 13-word n-grams, 40-character grams for CJK, whole texts where
shorter."""

import re
import unicodedata
from collections import Counter

NUM_WORDS = 13
NUM_CJK_CHARS = 40
MIN_CONTAINED_WORDS = 8  # shorter evaluation texts ("return x + 1") only count when they are a whole message
MIN_CONTAINED_CJK = 13
MAX_ITEMS = 2  # an n-gram of more evaluation items than this is a prompt wrapper, not content

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[^\W_{_CJK}]+")
_CJK_CHAR = re.compile(f"[{_CJK}]")


def words_of(text: str) -> tuple[list[str], str]:
    """Lower-case words of NFKC text without punctuation, and its CJK characters as one string."""
    text = unicodedata.normalize("NFKC", text).lower()
    return _WORD.findall(text), "".join(_CJK_CHAR.findall(text))


def grams_of(text: str) -> tuple[set[tuple[str, ...]], str | None]:
    """An evaluation text's n-grams (tuples of words, or of CJK characters), or the whole text where it is too short for
    any."""
    words, cjk = words_of(text)
    grams = set(_windows(tuple(words), NUM_WORDS)) if len(words) >= MIN_CONTAINED_WORDS else set()
    if len(cjk) >= MIN_CONTAINED_CJK:
        grams |= set(_windows(tuple(cjk), NUM_CJK_CHARS))
    return grams, None if grams or not (words or cjk) else _whole(words, cjk)


def _windows(units: tuple[str, ...], size: int) -> list[tuple[str, ...]]:
    """All runs of `size` units; the whole where there are fewer."""
    return [units[start : start + size] for start in range(max(1, len(units) - size + 1))]


def _whole(words: list[str], cjk: str) -> str:
    return " ".join(words) + "|" + cjk


class Decontaminator:
    """Finds evaluation text in training text. tasks: {task: [item]}, an item being the texts of one evaluation
    example."""

    def __init__(self, tasks: dict[str, list[tuple[str, ...]]]):
        num_items: Counter = Counter()
        owner: dict[tuple[str, ...], str] = {}
        self._whole: dict[str, str] = {}
        for task, items in tasks.items():
            for item in items:
                of_item: set[tuple[str, ...]] = set()
                for text in item:
                    grams, whole = grams_of(text)
                    of_item |= grams
                    if whole is not None:
                        self._whole.setdefault(whole, task)
                num_items.update(of_item)
                for gram in of_item:
                    owner.setdefault(gram, task)
        self._grams = {gram: task for gram, task in owner.items() if num_items[gram] <= MAX_ITEMS}
        self.num_wrappers = len(owner) - len(self._grams)
        # Grams by their first units, so that a text is walked once whatever lengths the grams have.
        self._heads: dict[tuple[str, ...], set[int]] = {}
        for gram in self._grams:
            size = MIN_CONTAINED_CJK if _CJK_CHAR.fullmatch(gram[0]) else MIN_CONTAINED_WORDS
            self._heads.setdefault(gram[:size], set()).add(len(gram))

    def hit(self, text: str) -> str | None:
        """The task of which `text` contains an item's n-gram, or is a whole short text; None for a clean text."""
        words, cjk = words_of(text)
        task = self._whole.get(_whole(words, cjk))
        return task or self._walk(tuple(words), MIN_CONTAINED_WORDS) or self._walk(tuple(cjk), MIN_CONTAINED_CJK)

    def _walk(self, units: tuple[str, ...], head_size: int) -> str | None:
        for start in range(len(units) - head_size + 1):
            for size in self._heads.get(units[start : start + head_size], ()):
                task = self._grams.get(units[start : start + size])
                if task:
                    return task
        return None
