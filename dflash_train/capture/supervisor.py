"""Worker processes: started, fed shard by shard, watched, replaced when they die, stopped within a bounded time.

A dead worker's staged files are whole and are still uploaded; its unfinished shards go to others. The first worker
starts alone, so that weights come from a warm page cache, and compiled kernels from theirs, when the others load.
"""

import multiprocessing
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import monotonic

from dflash_train.capture import serve
from dflash_train.capture.desk import Desk
from dflash_train.capture.line import Line
from dflash_train.capture.worker import Job, Order
from dflash_train.config import ExtractConfig
from dflash_train.util.ahead import Ahead
from dflash_train.util.errors import UserError
from dflash_train.util.log import say
from dflash_train.util.parallel import fork_server, num_cores

POLL_S = 0.1
IN_HAND = 2
"""Jobs a worker has at a time: one it captures, one to go on with. A third may still be on its way to a file."""


def visible_gpus(count: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls each of this process's `count` GPUs."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[:count] or [str(i) for i in range(count)]


@dataclass(eq=False)
class Slot:
    """A place for a worker: who is in it, and what it has in hand. gpus: of CUDA_VISIBLE_DEVICES; empty = CPU."""

    name: str
    gpus: str
    device: str = ""
    process: multiprocessing.Process | None = None
    line: Line | None = None
    ready: bool = False
    jobs: dict[str, Job] = field(default_factory=dict)  # not on file yet
    waiting: int = 0  # of them: not through the target yet
    heard: float = 0.0
    deaths: int = 0
    error: str = ""
    shown: tuple[str, str | None] = ("", None)

    @property
    def limit(self) -> str:
        """The key of ExtractConfig that bounds how long its silence may last; empty = it has nothing to say."""
        return ("hang_s" if self.jobs else "") if self.ready else "load_s"


class Supervisor:
    """Runs an order's jobs on `num_workers` worker processes. A context manager: leaving it ends them all."""

    def __init__(self, order: Order, desk: Desk, config: ExtractConfig, gpus: list[str], num_workers: int,
                 target_files: Callable[[], dict[str, bytes] | None]):  # fmt: skip
        self.order, self.desk, self.config = order, desk, config
        self.files = target_files()  # asked for once: a worker that is replaced while the store is away needs no store
        if not gpus and order.run.hardware.num_threads is None:
            share = replace(order.run.hardware, num_threads=max(1, num_cores() // num_workers))
            self.order = replace(order, run=replace(order.run, hardware=share))
        self.slots = [Slot(f"worker {i}", gpus[i] if gpus else "") for i in range(num_workers)]
        # CUDA does not survive a fork, and even importing a kernel library touches it.
        self.context = multiprocessing.get_context("spawn") if gpus else fork_server(serve.__name__)
        self.news = threading.Event()  # a worker has said something, or ended
        self.again: deque[Job] = deque()  # of dead workers
        self.killed_by: Counter = Counter()  # shard id -> workers that died with it in hand
        self.draining: Slot | None = None  # gets nothing new until it is empty, for the first of `again`
        self.warm = self.ending = False

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.end(serve.STOP if kind else serve.FINISH)

    def run(self) -> None:
        """Until every job is on file. Raises UserError for a shard that cannot be made or keeps killing workers, and
        whatever stops the desk."""
        with Ahead(self.desk.jobs(), depth=len(self.slots)) as self.source:
            self.start(self.slots[0])
            while not (self.source.finished and self.warm and not self.again and not any(s.jobs for s in self.slots)):
                self.desk.check()
                for slot in self.slots:
                    self.watch(slot)
                self.hand_out()
                self.listen(POLL_S)
                for slot in self.slots:
                    if slot.ready and not slot.waiting:
                        self.show(slot, "paused" if self.desk.paused else "idle")

    # ------------------------------------------------------------ handing out

    def hand_out(self) -> None:
        """Give jobs to those who have the fewest."""
        self.hand_out_again()
        while free := [s for s in self.slots if s.ready and s is not self.draining and self.has_room(s)]:
            job = None if self.source.finished else self.source.poll()
            if job is None:
                return
            self.give(min(free, key=num_jobs), job)

    def hand_out_again(self) -> None:
        """A job that a worker has died with is given alone, so that a second death is its own doing: one worker runs
        dry for it, while the others go on."""
        while self.again:
            ready = [slot for slot in self.slots if slot.ready]
            if self.draining not in ready:
                self.draining = min(ready, key=num_jobs, default=None)
            if self.draining is None or self.draining.jobs:
                return
            self.give(self.draining, self.again.popleft())
            self.draining = None

    def give(self, slot: Slot, job: Job) -> None:
        slot.jobs[job.shard.shard_id] = job
        slot.waiting += 1
        slot.heard = monotonic()
        self.send(slot, job)

    def has_room(self, slot: Slot) -> bool:
        suspects = any(self.killed_by[shard_id] for shard_id in slot.jobs)
        return slot.waiting < IN_HAND and not suspects

    def send(self, slot: Slot, message: object) -> None:
        slot.line.send(message)

    # ------------------------------------------------------------ listening

    def listen(self, timeout_s: float) -> None:
        """Take in what the workers say, after at most `timeout_s` when they say nothing."""
        self.news.wait(timeout_s)
        self.news.clear()
        for slot in self.slots:
            if slot.process is not None:
                self.hear(slot)

    def hear(self, slot: Slot) -> None:
        """Everything that a worker has said, dead or alive."""
        for message in slot.line.heard() if slot.process.is_alive() else slot.line.last_words():
            slot.heard = monotonic()
            self.take_in(slot, message)

    def take_in(self, slot: Slot, message: object) -> None:
        match message:
            case serve.Ready(device):
                slot.ready, slot.device = True, device
                if not self.warm and not self.ending:
                    self.warm = True
                    for other in self.slots[1:]:
                        self.start(other)
            case serve.Captured(shard_id, start, stop, seconds):
                job = slot.jobs[shard_id]
                slot.waiting -= stop == len(job.rows)
                self.show(slot, "capturing", shard_id)
                self.desk.captured(slot.name, job, slice(start, stop), seconds)
            case serve.Staged(shard_id, path, facts):
                self.desk.staged(slot.name, slot.jobs.pop(shard_id), path, facts)
            case serve.Failed(text, final):
                slot.error = text
                self.desk.state.error(f"{slot.name}: {text}")
                if final and not self.ending:
                    raise UserError(text)

    def show(self, slot: Slot, status: str, shard_id: str | None = None) -> None:
        """Tell the monitor, where it is new."""
        if slot.shown != (status, shard_id):
            slot.shown = (status, shard_id)
            pid = slot.process.pid if slot.process else None
            self.desk.state.worker(slot.name, slot.device or slot.gpus or "CPU", pid, status, shard_id)

    # ------------------------------------------------------------ life and death

    def start(self, slot: Slot) -> None:
        ours, theirs = self.context.Pipe()
        slot.process = self.context.Process(target=serve.serve, args=(theirs,), name=slot.name, daemon=True)
        with gpus_of(slot):
            slot.process.start()
        theirs.close()
        slot.line = Line(ours, self.news)
        # Megabytes, which as an argument would be waited for; and the first worker that was ready wrote the files.
        slot.line.send((self.order, None if self.warm else self.files))
        slot.ready, slot.waiting, slot.heard = False, 0, monotonic()
        self.show(slot, "loading")

    def watch(self, slot: Slot) -> None:
        """Notice a worker that has ended, or that has work or loads and says nothing; another takes its place."""
        if slot.process is None:
            return
        silent, limit = monotonic() - slot.heard, slot.limit
        hangs = bool(limit) and silent > vars(self.config)[limit]
        if hangs:
            slot.error = f"it said nothing for {silent:.0f} s (extract.{limit})"
            slot.process.kill()
            slot.process.join(self.config.stop_s)
        if hangs or not slot.process.is_alive():
            self.hear(slot)
            self.bury(slot)

    def bury(self, slot: Slot) -> None:
        """Give its unfinished shards to others, remove what it was writing, and start a new one if it may have one."""
        why = slot.error or exit_reason(slot.process.exitcode)
        self.show(slot, "dead")
        self.desk.state.error(f"{slot.name} died: {why}")
        say(f"{slot.name} died: {why}" + (f"; to be done again: {', '.join(slot.jobs)}" if slot.jobs else ""))
        for path in self.order.staging_folder.glob(f".*.{slot.process.pid}.tmp"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        for job in slot.jobs.values():
            self.take_back(job, why)
        self.forget(slot)
        slot.deaths += 1
        if slot.deaths <= self.config.max_restarts:
            self.start(slot)
        elif all(other.process is None for other in self.slots):
            raise UserError(
                "extract.max_restarts", got=f"every worker died {slot.deaths} times, at last of: {why}",
                want="workers that live", fix="see the messages above; the same command goes on",
            )  # fmt: skip
        else:
            say(f"{slot.name} is given up: it died {slot.deaths} times (extract.max_restarts)")

    def take_back(self, job: Job, why: str) -> None:
        """Do a job again, unless it has killed too many."""
        shard_id, samples = job.shard.shard_id, job.shard.sample_ids
        self.killed_by[shard_id] += 1
        if self.killed_by[shard_id] > self.config.max_restarts:
            self.desk.state.shard(shard_id, "failed")
            raise UserError(f"shard {shard_id}", got=f"{self.killed_by[shard_id]} workers died with it: {why}",
                            want="samples that can be captured; these are " + ", ".join(samples[:5])
                            + (", ..." if len(samples) > 5 else ""),
                            fix="a smaller extract.batch_tokens where memory ran out")  # fmt: skip
        self.desk.again(job)
        self.again.append(job)

    def forget(self, slot: Slot) -> None:
        slot.process.join(self.config.stop_s)
        if slot.process.is_alive():
            say(f"{slot.name} (process {slot.process.pid}) does not die: the kernel holds it, and perhaps its GPU")
            # Else the interpreter waits for it at its exit, without end.
            multiprocessing.process._children.discard(slot.process)
        slot.line.close()
        slot.process, slot.line, slot.ready, slot.error = None, None, False, ""
        slot.jobs, slot.waiting = {}, 0

    def end(self, message: str) -> None:
        """Tell all workers to end, take in what they still finish, and kill those who take too long."""
        self.ending, deadline = True, monotonic() + self.config.stop_s
        for slot in self.slots:
            if slot.ready:
                self.send(slot, message)
            elif slot.process is not None:  # it has nothing in hand
                slot.process.kill()
        try:
            while self.living() and monotonic() < deadline:
                self.listen(POLL_S)
        finally:
            for slot in self.living():
                say(f"{slot.name} did not end within {self.config.stop_s:.0f} s (extract.stop_s): killed")
                slot.process.kill()
            for slot in self.slots:
                if slot.process is not None:
                    self.show(slot, "stopped")
                    self.forget(slot)

    def living(self) -> list[Slot]:
        """Those still running, after a last look at what was said."""
        for slot in self.slots:
            if slot.process is not None:
                self.hear(slot)
        return [slot for slot in self.slots if slot.process is not None and slot.process.is_alive()]


def num_jobs(slot: Slot) -> int:
    return len(slot.jobs)


def exit_reason(code: int | None) -> str:
    return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"


@contextmanager
def gpus_of(slot: Slot) -> Iterator[None]:
    """The environment in which a worker's process starts: its torch must see its own GPUs alone from the first line."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if slot.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = slot.gpus
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        elif slot.gpus:
            del os.environ["CUDA_VISIBLE_DEVICES"]
