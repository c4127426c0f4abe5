"""Limits for text that is none: repeated lines and encoded data; off unless a recipe sets them."""

import base64
import random

from helpers_data import mixed, recipe, write_rows

from dflash_train.config import QualityConfig
from dflash_train.data.mixing.quality import longest_base64, poor, repeated_share

LIMITS = QualityConfig(repeated_lines=0.9, base64_bytes=2000)
BLOB = base64.b64encode(random.Random(0).randbytes(3000)).decode()


def test_nine_of_ten_lines_that_repeat_are_too_many():
    assert poor("no\n" * 19 + "yes\n", LIMITS) == "repeated_lines"
    assert repeated_share("\n".join(["a"] * 10)) == 0.9
    assert poor("\n".join([*"abcdefgh", *["same"] * 20]), LIMITS) is None
    assert poor("ha\n" * 5, LIMITS) is None, "a few lines may repeat"


def test_base64_of_more_than_2000_characters_is_data_also_broken_into_lines():
    assert poor(f"Decode this: {BLOB}", LIMITS) == "base64"
    lines = "\n".join(BLOB[i : i + 76] for i in range(0, len(BLOB), 76))
    assert poor(f"Decode:\n{lines}\nPlease.", LIMITS) == "base64"
    assert poor(f"Decode: {BLOB[:1900]}", LIMITS) is None


def test_long_code_prose_and_rules_are_not_base64():
    assert longest_base64("def function_name(argument):\n    return argument\n" * 100) == 0
    assert longest_base64("=" * 4000) == longest_base64("-" * 4000) == 0
    assert longest_base64("a" * 4000) == longest_base64("0123456789" * 400) == 0
    assert longest_base64("word " * 2000) == 0


def test_limits_are_off_unless_set_and_counted_by_name(tmp_path):
    rows = [{"prompt": "no\n" * 40}, {"prompt": BLOB}, {"prompt": "A question?"}]
    source = {"a": {"path": str(write_rows(tmp_path / "a.jsonl", rows))}}
    assert len(mixed(recipe(source), tmp_path / "1")[0]) == 3
    quality = {"repeated_lines": 0.9, "base64_bytes": 2000}
    train, _, mix = mixed(recipe(source, quality=quality), tmp_path / "2")
    assert len(train) == 1 and mix.reports["a"].filtered == {"repeated_lines": 1, "base64": 1}
