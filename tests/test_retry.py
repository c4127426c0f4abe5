"""Pauses before asking again: what a server says is obeyed, in every form it may say it."""

import time
from email.utils import formatdate

import pytest

from dflash_train.util.retry import backoff_s, retry_after_s


@pytest.mark.parametrize("header, seconds", [
    ("12", 12), (" 7 ", 7), ("0.5", 0.5), (None, 0), ("", 0), ("soon", 0), ("-3", 0), ("nan", 0), ("inf", 0),
    ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("Wed Oct 21 07:28:00 2015", 0), ("Wed, 21 Oct 99999 07:28:00 GMT", 0),
])  # fmt: skip
def test_retry_after_is_seconds_or_a_date_and_nothing_else(header, seconds):
    assert retry_after_s(header) == seconds


@pytest.mark.parametrize("zone", ["TZ=UTC", "TZ=Asia/Tokyo"])
def test_a_date_is_in_gmt_with_or_without_its_zone(monkeypatch, zone):
    """The old asctime form has no zone; it is not local time."""
    monkeypatch.setenv(*zone.split("="))
    time.tzset()
    try:
        when = time.time() + 100
        for header in (formatdate(when, usegmt=True), time.asctime(time.gmtime(when))):
            assert 97 < retry_after_s(header) <= 100
    finally:
        monkeypatch.undo()
        time.tzset()


def test_pauses_double_up_to_a_limit_and_half_of_each_is_chance():
    for tries, full in ((1, 0.5), (2, 1.0), (5, 8.0), (7, 30.0), (10_000, 30.0)):
        drawn = {backoff_s(tries, 0.5, 30.0) for _ in range(50)}
        assert len(drawn) > 40 and full / 2 <= min(drawn) and max(drawn) <= full
