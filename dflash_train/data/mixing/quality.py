"""Is a message text at all? Limits for lines that repeat and for encoded binary data; scraped HTML is cleaning's."""

import re

from dflash_train.config import QualityConfig

MIN_LINES = 10  # fewer may repeat: a short poem, a list of three equal answers
_WRAPPED_LINE = 60  # base64 that is broken into lines has 64 or 76 characters in each
_BASE64 = re.compile(rf"(?:[A-Za-z0-9+/]{{{_WRAPPED_LINE},}}\s?)+={{0,2}}")
_LETTERS = (re.compile("[a-z]"), re.compile("[A-Z]"), re.compile("[0-9]"))


def repeated_share(text: str) -> float:
    """Share of the text's non-empty lines that repeat an earlier one; 0 for fewer than MIN_LINES lines."""
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    return 1 - len(set(lines)) / len(lines) if len(lines) >= MIN_LINES else 0.0


def longest_base64(text: str) -> int:
    """Characters of the longest run of base64, line breaks inside it counted; 0 where there is none.

    Lower case, upper case and digits all occur in encoded data; a row of dashes or one long word has not all three.
    """
    runs = (match[0] for match in _BASE64.finditer(text))
    return max((len(run) for run in runs if all(kind.search(run) for kind in _LETTERS)), default=0)


def poor(text: str, limits: QualityConfig) -> str | None:
    """The reason why this message is no text, or None. A limit that is null is off."""
    if limits.repeated_lines is not None and repeated_share(text) >= limits.repeated_lines:
        return "repeated_lines"
    most = limits.base64_bytes
    if most is not None and len(text) > most and longest_base64(text) > most:
        return "base64"
    return None
