"""One function over many jobs in several processes; results come in the order of the jobs, whatever their number.

The first failure of any job ends them all at once, and so does the end of this process: each worker holds a pipe whose
other end is here, and exits when that closes.
"""

import copy
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from dflash_train.util.errors import UserError

_POLL_S = 1.0
_count: Callable[[int], None] = lambda number: None


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count(number: int) -> None:
    """Called inside a job: `number` more units are done; the `on_count` of its Workers hears of it."""
    _count(number)


class Workers:
    """A context manager with up to num_processes worker processes, started when there is work for more than one.
    on_count: called in this process with what jobs `count`."""

    def __init__(self, num_processes: int, on_count: Callable[[int], None] = lambda number: None):
        self.num_processes, self.on_count = num_processes, on_count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind, *_) -> None:
        self._end(at_once=kind is not None)

    def map(
        self, function: Callable, jobs: Sequence, ahead: int | None = None, said: Callable[[object], str] = str
    ) -> Iterator:
        """function(job) for each job, in the order of jobs. function: a module's own; jobs and results go between
        processes. ahead: at most so many results a process exist that have not been asked for (None = no bound); said:
        a job in words.

        An exception of a job is raised here as soon as it happens, with its own type and message (where it cannot be
        sent, RuntimeError with both); UserError where a process was killed, saying what it may have been doing.
        """
        if self.num_processes == 1 or len(jobs) <= 1:
            yield from self._here(function, jobs)
            return
        if self._pool is None:
            self._start(function.__module__)
        waiting: deque[tuple[Future, object]] = deque()
        todo = deque(jobs)
        try:
            while todo or waiting:
                while todo and (ahead is None or len(waiting) < ahead * self.num_processes):
                    job = todo.popleft()
                    waiting.append((self._pool.submit(_run, function, job), job))
                self._wait_for_first([future for future, _ in waiting])
                yield waiting.popleft()[0].result()
        except BrokenProcessPool:
            raise self._killed(waiting, said) from None
        finally:
            if todo or waiting:
                self._end(at_once=True)

    def _wait_for_first(self, futures: list[Future]) -> None:
        """Until the first is done, or any has failed, whose exception is raised."""
        while True:
            self._tell()
            for future in futures:
                if future.done():
                    future.result()
            if futures[0].done():
                return
            wait([future for future in futures if not future.done()], _POLL_S, FIRST_COMPLETED)

    def _killed(self, waiting: deque[tuple[Future, object]], said: Callable[[object], str]) -> UserError:
        """What to say where a process is gone. Jobs start in their order, so those under way were the first undone."""
        lost = [job for future, job in waiting if future.done() and isinstance(future.exception(), BrokenProcessPool)]
        under_way = " or ".join(dict.fromkeys(map(said, lost[: self.num_processes])))
        return UserError(
            "a worker process was killed",
            got=f"its end while {under_way or 'starting'}; most likely the machine's memory ran out",
            want=f"enough memory for {self.num_processes} processes",
            fix="data.num_processes=1",
        )

    def _here(self, function: Callable, jobs: Sequence) -> Iterator:
        global _count
        for job in jobs:
            before, _count = _count, self.on_count
            try:
                result = function(job)
            finally:
                _count = before
            yield result

    def _start(self, module: str) -> None:
        context = fork_server(module)
        lifeline, self._life = context.Pipe(duplex=False)
        self._total, self._told = context.Value("Q", 0), 0
        self._pool = ProcessPoolExecutor(self.num_processes, context, _begin, (self._total, lifeline))

    def _end(self, at_once: bool) -> None:
        """at_once: whatever they are doing."""
        if self._pool is None:
            return
        if at_once:
            self._life.close()
        self._pool.shutdown(cancel_futures=True)
        self._life.close()
        self._pool = None

    def _tell(self) -> None:
        total = self._total.get_obj().value  # without its lock, which a killed process may hold for ever
        if total > self._told:
            self.on_count(total - self._told)
        self._told = total


def fork_server(module: str):
    """The multiprocessing context whose processes are forked from a server that has imported `module` and all that this
    process has of the package.

    A fork of this process would copy torch's threads in whatever state they are; fresh ones would each import it. The
    main module is run again in each (runpy, which minds finding it imported), so all but it is imported once. No CUDA:
    what an import has begun to use of it does not survive a fork.
    """
    context = multiprocessing.get_context("forkserver")
    main_spec = getattr(sys.modules["__main__"], "__spec__", None)
    package, main_name = __name__.partition(".")[0], main_spec.name if main_spec else None
    ours = [name for name in sys.modules if name.startswith(f"{package}.") and name != main_name]
    context.set_forkserver_preload([module, *ours])
    return context


# ---------------------------------------------------------------- in a worker process


def _begin(total, lifeline) -> None:
    """Counts add up in memory that all of them share; who interrupts the run interrupts the parent, which ends us."""
    global _count

    def add(number: int) -> None:
        with total.get_lock():
            total.value += number

    _count = add
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline) -> None:
    """Nothing is ever sent: the pipe closes when the parent wants the end, or is gone itself."""
    try:
        lifeline.recv()
    except (EOFError, OSError):
        os._exit(1)


def _run(function: Callable, job: object) -> object:
    try:
        return function(job)
    except Exception as error:
        try:
            copy.deepcopy(error)  # what cannot be copied cannot be sent either: its arrival would break the pool
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise
