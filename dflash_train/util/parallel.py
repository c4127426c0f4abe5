"""One function over many jobs in several processes; results come in the order of the jobs, whatever their number."""

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from dflash_train.util.errors import UserError

_POLL_S = 1.0
_count: Callable[[int], None] = lambda number: None


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count(number: int) -> None:
    """Called inside a job: `number` more units are done; `ordered_map`'s on_count hears of it."""
    _count(number)


def ordered_map(
    function: Callable,
    jobs: Iterable,
    num_processes: int,
    *,
    ahead: int | None = None,
    on_count: Callable[[int], None] = lambda number: None,
) -> Iterator:
    """function(job) for each job, in the order of jobs. function: a module's own; jobs and results go between
    processes. ahead: at most so many results exist that have not been asked for (None = no bound). With one process
    all runs here. An exception of a job is raised here; UserError when a process is killed."""
    if num_processes == 1:
        yield from _here(function, jobs, on_count)
        return
    context = multiprocessing.get_context("forkserver")  # fork would copy torch's threads, spawn would import it anew
    main_spec = getattr(sys.modules["__main__"], "__spec__", None)
    context.set_forkserver_preload([function.__module__, *([main_spec.name] if main_spec else [])])
    total = context.Value("Q", 0)
    seen = 0
    pool = ProcessPoolExecutor(num_processes, context, _share_count, (total,))
    waiting: deque = deque()
    jobs = iter(jobs)
    try:
        while True:
            while (ahead is None or len(waiting) < ahead) and (job := next(jobs, None)) is not None:
                waiting.append(pool.submit(function, job))
            if not waiting:
                return
            while not wait([waiting[0]], _POLL_S, FIRST_COMPLETED).done:
                seen = _tell(total.value, seen, on_count)
            seen = _tell(total.value, seen, on_count)
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed",
            got=f"{num_processes} processes, most likely out of memory",
            want="enough memory for all of them",
            fix="data.num_processes=1",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _here(function: Callable, jobs: Iterable, on_count: Callable[[int], None]) -> Iterator:
    global _count
    for job in jobs:
        before, _count = _count, on_count
        try:
            result = function(job)
        finally:
            _count = before
        yield result


def _share_count(total) -> None:
    global _count

    def add(number: int) -> None:
        with total.get_lock():
            total.value += number

    _count = add


def _tell(value: int, seen: int, on_count: Callable[[int], None]) -> int:
    if value > seen:
        on_count(value - seen)
    return value
