"""Worker processes: results in the order of the jobs; counts and errors come through; a killed one is one message."""

import os
import signal

import pytest

from dflash_train.util.errors import UserError
from dflash_train.util.parallel import Workers, count


def square(number: int) -> int:
    count(number)
    return number * number


def refuse(number: int) -> int:
    raise UserError("data.sources.x", got=number, want="another", fix="data.sources.x.take=1")


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_jobs_and_counts_are_heard(processes):
    heard = []
    with Workers(processes, heard.append) as workers:
        assert list(workers.map(square, range(20), ahead=2)) == [n * n for n in range(20)]
        assert list(workers.map(square, [3])) == [9] and list(workers.map(square, [])) == []
        assert sum(heard) == sum(range(20)) + 3


def test_an_error_for_the_user_arrives_whole():
    with Workers(2) as workers, pytest.raises(UserError) as error:
        list(workers.map(refuse, [1, 2]))
    assert (error.value.field, error.value.fix) == ("data.sources.x", "data.sources.x.take=1")


def test_a_killed_process_is_one_message():
    with Workers(2) as workers, pytest.raises(UserError, match="a worker process was killed"):
        list(workers.map(die, [1, 2, 3]))
