"""One function over many jobs in several processes; results come in the order of the jobs, whatever their number."""

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
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

    def __exit__(self, *_) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable, jobs: Sequence, ahead: int | None = None) -> Iterator:
        """function(job) for each job, in the order of jobs. function: a module's own; jobs and results go between
        processes. ahead: at most so many results a process exist that have not been asked for (None = no bound).
        An exception of a job is raised here; UserError where a process was killed."""
        if self.num_processes == 1 or len(jobs) <= 1:
            yield from self._here(function, jobs)
            return
        if self._pool is None:
            self._start(function.__module__)
        waiting, todo = deque(), deque(jobs)
        try:
            while todo or waiting:
                while todo and (ahead is None or len(waiting) < ahead * self.num_processes):
                    waiting.append(self._pool.submit(function, todo.popleft()))
                while not wait([waiting[0]], _POLL_S).done:
                    self._tell()
                self._tell()
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed",
                got=f"{self.num_processes} processes, most likely out of memory",
                want="enough memory for all of them",
                fix="data.num_processes=1",
            ) from None

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
        self._total, self._told = context.Value("Q", 0), 0
        self._pool = ProcessPoolExecutor(self.num_processes, context, _share_count, (self._total,))

    def _tell(self) -> None:
        total = self._total.value
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


def _share_count(total) -> None:
    """In a worker process: counts add up in memory that all of them share."""
    global _count

    def add(number: int) -> None:
        with total.get_lock():
            total.value += number

    _count = add
