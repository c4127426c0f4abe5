"""One host that extracts the tiny target, as a process of its own: to be killed, stopped and watched from outside.

    python tests/helpers_host.py <folder> <options as JSON>

The options are the changes of helpers_store.make_run, and those of OWN. Answers are there, one sample makes a shard or
more of them, and the code's version is a fixed one, so that what hosts make can be compared byte by byte.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
from helpers_store import make_run, write_answers

from dflash_train import extract, regenerate
from dflash_train.capture import worker
from dflash_train.config import ExtractRun, MonitorConfig
from dflash_train.store import hosts
from dflash_train.store.base import ObjectStore
from dflash_train.store.claims import Claims
from dflash_train.util import provenance
from dflash_train.util.errors import UserError

ROOT = Path(__file__).parents[1]
OWN = ("samples", "pace_s", "machine", "die_at", "port")
"""samples: [train, held out]; pace_s: a shard takes a worker so much longer; machine: another name is another machine;
die_at: kill -9 of this process at its n-th marker; port: of the monitor's page."""
COMPARED = ("shards/", "markers/", "target/")
PATIENCE_S = 120.0
TAG = "DFLASH_TEST_HOST"


def build_run(folder: Path, options: dict) -> ExtractRun:
    """The run of a host with these options; writes its answers."""
    run = make_run(folder, **{key: value for key, value in options.items() if key not in OWN})
    if "samples" in options:
        write_answers(run, *options["samples"])
    run.extract.monitor = MonitorConfig("port" in options, port=options.get("port", 0))
    return run


def contents(store: ObjectStore) -> dict[str, bytes]:
    """Key -> bytes of everything that training reads."""
    return {key: store.get_bytes(key) for key, _ in store.list() if key.startswith(COMPARED)}


class Host:
    """A host that was started, and what it said."""

    def __init__(self, folder: Path, log: Path, options: dict):
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self.port = log, options.get("port")
        environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1", TAG: str(log)}
        command = [sys.executable, __file__, str(folder), json.dumps(options)]
        with open(log, "w") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)

    def said(self, pattern: str) -> str:
        """The first match in its output. Raises AssertionError with the output where there is none."""
        found = re.search(pattern, self.log.read_text())
        assert found, f"no {pattern!r} in {self.log}:\n{self.log.read_text()[-3000:]}"
        return found[0]

    def wait_said(self, pattern: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.log.read_text()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.05)
        return self.said(pattern)

    def workers(self) -> list[dict]:
        """The monitor's rows of its workers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/state", timeout=20) as answer:
            return json.load(answer)["workers"]

    def ends(self, code: int) -> None:
        """Wait for its end, with this exit code."""
        got = self.process.wait(PATIENCE_S)
        assert got == code, f"exit code {got} instead of {code}:\n{self.log.read_text()[-3000:]}"

    def processes(self) -> list[psutil.Process]:
        """Those of it that live, also when the first one of them does not."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            is_ours = process.environ().get(TAG) == str(self.log)
            return is_ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def kill(self) -> None:
        """kill -9 of all of them at once, as when the machine is lost."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(PATIENCE_S)

    def wait_gone(self) -> None:
        """Until none of them is left."""
        deadline = time.monotonic() + PATIENCE_S
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)

    def close(self) -> None:
        """For the end of a test: nothing of it is left."""
        if self.processes():
            self.kill()


# ---------------------------------------------------------------- in the host's own processes


def disturb(options: dict) -> None:
    """What its options change in this process; workers come here, too."""
    regenerate.ensure_answers = lambda run: None
    provenance.code_version = lambda: "test"
    capture, done, machine = worker.capture_shard, Claims.done, options.get("machine")
    left = options.get("die_at")

    def slower(*arguments):
        time.sleep(options["pace_s"])
        capture(*arguments)

    def die(self, shard_id):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        done(self, shard_id)

    if "pace_s" in options:
        worker.capture_shard = slower
    if left is not None:
        Claims.done = die
    if machine is not None:
        hosts._machine = lambda: machine


def main(folder: str, options: dict) -> int | None:
    try:
        return extract.main(build_run(Path(folder), options))
    except UserError as error:
        print(error, flush=True)
        return error.exit_code


if __name__ in ("__main__", "__mp_main__"):
    given = json.loads(sys.argv[2])
    disturb(given)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1], given))
