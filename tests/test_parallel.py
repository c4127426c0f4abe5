"""Worker processes: results in the order of the jobs; counts and errors come through; the first failure ends them all;
a killed one is one message."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dflash_train.util.errors import UserError
from dflash_train.util.parallel import Workers, count

LONG_S = 40  # what a job that is not ended would take


def square(number: int) -> int:
    count(number)
    return number * number


def refuse(number: int) -> int:
    raise UserError("data.sources.x", got=number, want="another", fix="data.sources.x.take=1")


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


class Unsendable(Exception):
    def __init__(self, field: str, value: object):
        super().__init__(f"{field} is {value}")


def act(job: tuple[str, Path]) -> str:
    """A long job marks its beginning, and its end if it comes to it; the others wait for such a beginning first."""
    what, folder = job
    if what == "long":
        (folder / f"pid-{os.getpid()}").touch()
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            time.sleep(0.05)
        (folder / "left to its end").touch()
        return what
    while not list(folder.glob("pid-*")):
        time.sleep(0.02)
    if what == "quick":
        return what
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"value": ValueError("odd value 7"), "full": OSError(28, "No space left"), "odd": Unsendable("x", 3)}[what]


def assert_ended(folder: Path) -> None:
    (mark,) = folder.glob("pid-*")
    pid = int(mark.name.removeprefix("pid-"))
    assert not (folder / "left to its end").exists()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_jobs_and_counts_are_heard(processes):
    heard = []
    with Workers(processes, heard.append) as workers:
        assert list(workers.map(square, range(20), ahead=2)) == [n * n for n in range(20)]
        assert list(workers.map(square, [3])) == [9] and list(workers.map(square, [])) == []
        assert sum(heard) == sum(range(20)) + 3


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_for_the_user_arrives_whole(processes):
    with Workers(processes) as workers, pytest.raises(UserError) as error:
        list(workers.map(refuse, [1, 2]))
    assert (error.value.field, error.value.fix) == ("data.sources.x", "data.sources.x.take=1")


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("value", ValueError, "odd value 7"),
        ("full", OSError, "No space left"),
        ("odd", RuntimeError, "Unsendable: x is 3"),
    ],
)
def test_the_first_failure_is_raised_before_earlier_jobs_are_done_and_ends_them(tmp_path, what, kind, message):
    with Workers(2) as workers, pytest.raises(kind, match=message) as error:
        list(workers.map(act, [("long", tmp_path), (what, tmp_path)]))
    assert what != "full" or error.value.errno == 28
    assert_ended(tmp_path)


def test_a_killed_process_is_one_message_that_says_what_it_was_doing_and_ends_the_others(tmp_path):
    said = lambda job: {"long": "reading a", "die": "reading b", "value": "reading c"}[job[0]]
    with Workers(2) as workers, pytest.raises(UserError, match="a worker process was killed") as error:
        list(workers.map(act, [("long", tmp_path), ("die", tmp_path), ("value", tmp_path)], said=said))
    assert "while reading a or reading b;" in str(error.value) and "memory" in str(error.value)
    assert_ended(tmp_path)


def test_workers_can_work_again_after_a_failure():
    with Workers(2) as workers:
        with pytest.raises(UserError, match="a worker process was killed"):
            list(workers.map(die, [1, 2, 3]))
        assert list(workers.map(square, [1, 2, 3])) == [1, 4, 9]


def test_a_consumer_that_fails_ends_the_workers(tmp_path):
    with pytest.raises(KeyboardInterrupt), Workers(2) as workers:
        for _ in workers.map(act, [("quick", tmp_path), ("long", tmp_path)]):
            raise KeyboardInterrupt
    assert_ended(tmp_path)


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_parallel import act
from dflash_train.util.parallel import Workers
if __name__ == "__main__":
    with Workers(2) as workers:
        list(workers.map(act, [("long", Path({folder!r})), ("long", Path({folder!r}))]))
"""


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    parent = subprocess.Popen([sys.executable, str(script)], env=env)
    while len(marks := list(tmp_path.glob("pid-*"))) < 2 and parent.poll() is None:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert len(marks) == 2
    workers = [int(mark.name.removeprefix("pid-")) for mark in marks]
    deadline = time.monotonic() + LONG_S / 2
    while any(psutil.pid_exists(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in workers) and not (tmp_path / "left to its end").exists()
