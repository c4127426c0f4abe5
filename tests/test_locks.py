"""One process at a time: others wait, say for what and for whom, and not for ever."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash_train.util.errors import UserError
from dflash_train.util.locks import one_at_a_time

HOLDER = """
import sys, time
from pathlib import Path
from dflash_train.util.locks import one_at_a_time
with one_at_a_time(Path(sys.argv[1]), "the mix", 5):
    print("held", flush=True)
    time.sleep(60)
"""


def test_many_that_come_at_once_go_in_one_after_another(tmp_path):
    inside, most = [], []

    def work():
        with one_at_a_time(tmp_path / "a" / "lock", "the mix", 30):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 5


def test_the_wait_is_said_with_whom_it_is_for_and_bounded(tmp_path, capsys):
    me = f"process {os.getpid()} on"
    wait = lambda patience_s: one_at_a_time(tmp_path / "lock", "the mix", patience_s)
    with wait(1), pytest.raises(UserError, match=f"the mix\n.*{me}"), wait(0.3):
        pass
    assert f"waiting for the mix: {me}" in capsys.readouterr().out
    with wait(0.0):
        pass


def test_a_killed_holder_holds_nothing(tmp_path):
    lock = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE,
                              cwd=Path(__file__).parents[1])  # fmt: skip
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=f"process {holder.pid}"), one_at_a_time(lock, "the mix", 0.0):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with one_at_a_time(lock, "the mix", 1):
        pass
