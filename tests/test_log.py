"""Progress lines: how often, counts, rates and the time that is left, whatever is counted; tables and plain lines."""

import pytest

from dflash_train.util import log
from dflash_train.util.log import Progress, duration


class Clock:
    """time.monotonic that stands still until it is moved."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(log, "time", clock)
    return clock


def lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_line_comes_when_the_time_is_up_and_not_before(clock, capsys):
    progress = Progress("mix", 100, "rows", every_s=10)
    for _ in range(9):
        clock.now += 1
        progress.update()
    assert lines(capsys) == []
    clock.now += 1
    progress.update()
    assert lines(capsys) == ["mix 10/100 rows  1.0 rows/s  ETA 1m30s"]
    clock.now += 9
    progress.update(50)
    assert lines(capsys) == []


def test_the_rate_is_over_the_whole_run_and_further_counters_have_theirs(clock, capsys):
    progress = Progress("regenerate", 512, "rows", every_s=0)
    clock.now += 40
    progress.update(128, tokens=20_000)
    clock.now += 40
    progress.update(128, tokens=61_600)
    assert lines(capsys) == [
        "regenerate 128/512 rows  3.2 rows/s  500 tokens/s  ETA 2m00s",
        "regenerate 256/512 rows  3.2 rows/s  1,020 tokens/s  ETA 1m20s",
    ]


def test_of_an_unknown_total_nothing_is_said_about_the_end(clock, capsys):
    progress = Progress("mix", None, "rows", every_s=0)
    clock.now += 2
    progress.update(3000)
    assert lines(capsys) == ["mix 3,000 rows  1,500.0 rows/s"]


def test_bytes_are_shown_as_people_read_them(clock, capsys):
    progress = Progress("hub", 3_000_000_000, "bytes", every_s=0)
    clock.now += 10
    progress.update(1_500_000_000)
    Progress("hub", None, "bytes", every_s=0).update(999)
    first, second = lines(capsys)
    assert first == "hub 1.5 GB of 3.0 GB  150.0 MB/s  ETA 10s" and second.startswith("hub 999 B  ")


def test_no_time_or_no_work_so_far_divides_by_nothing(clock, capsys):
    progress = Progress("x", 5, "rows", every_s=0)
    progress.update(0)
    clock.now += 3
    progress.update(0)
    assert [line.partition("  ")[0] for line in lines(capsys)] == ["x 0/5 rows"] * 2


def test_the_last_line_has_all_counts_no_eta_and_the_time_it_took(clock, capsys):
    progress = Progress("eval", 4, "answers", every_s=1000)
    clock.now += 125
    progress.update(4)
    progress.close()
    assert lines(capsys) == ["eval 4/4 answers  0.0 answers/s", "eval: 2m05s"]


def test_only_the_main_rank_prints(clock, capsys, monkeypatch):
    monkeypatch.setattr(log, "is_main", lambda: False)
    log.say("nothing")
    log.table("t", ["a"], [[1]])
    Progress("x", 1, "rows").close()
    assert lines(capsys) == []


def test_markup_in_a_line_or_cell_is_text(capsys):
    log.say("data=[a,b] [red]not red[/red]")
    log.table("t", ["c"], [["[bold]x[/bold]"]])
    out = capsys.readouterr().out
    assert "data=[a,b] [red]not red[/red]" in out and "[bold]x[/bold]" in out


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3725, "1h02m05s")])
def test_durations_are_rounded_once(seconds, text):
    assert duration(seconds) == text
