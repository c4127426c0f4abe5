"""Forms of code instruction sets: one question each, their own answers unread."""

import math

from dflash_train.data.forms.base import Form, Hints, ask, word
from dflash_train.data.forms.chat import from_alpaca
from dflash_train.data.text import Drop, Skip

MIN_TEST_SCORE = 0.9


def from_opencodeinstruct(row: dict, hints: Hints) -> dict:
    """nvidia/OpenCodeInstruct: the question is `input`; only rows whose answer passed at least 90 % of its tests, the
    others' questions are too often broken. The score is stored as text."""
    score = row.get("average_test_score")
    try:
        score = float(score) if isinstance(score, str | float | int) and not isinstance(score, bool) else math.nan
    except (ValueError, OverflowError):
        score = math.nan
    if not 0 <= score <= 1:
        raise Drop("bad_test_score")
    if score < MIN_TEST_SCORE:
        raise Skip("test_score_below_0.9")
    return {"messages": ask(row.get("input")), "kind": word(row.get("domain"))}


def from_evol(row: dict, hints: Hints) -> dict:
    """ise-uiuc/Magicoder-Evol-Instruct-110K, or theblackcat102/evol-codealpaca-v1 (what it was cleaned from)."""
    return {"messages": ask(row.get("instruction"))}


def from_magicoder_oss(row: dict, hints: Hints) -> dict:
    """ise-uiuc/Magicoder-OSS-Instruct-75K: `problem`, and the language its seed was written in."""
    return {"messages": ask(row.get("problem")), "kind": word(row.get("lang"))}


FORMS = {
    "opencodeinstruct": Form(
        from_opencodeinstruct,
        (("input",), ("average_test_score",)),
        unread=("output", "llm_judgement", "unit_tests", "tests_execution_status"),
    ),
    "magicoder_evol": Form(from_evol, (("instruction",), ("response", "output"))),
    "magicoder_oss": Form(from_magicoder_oss, (("problem",),)),
    "codealpaca": Form(from_alpaca, (("instruction",), ("input",))),
}
