"""A worker process: loads the target, takes jobs from the supervisor's pipe, says what it has done, ends when told.

It never outlives the supervisor, whose end of the pipe closes with it, and leaves signals to it: a terminal sends
Ctrl-C to every process, and the supervisor decides what becomes of the shard in hand.
"""

import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from dflash_train import store as stores
from dflash_train import target as targets
from dflash_train.capture.worker import Job, Order, capture_jobs
from dflash_train.store.base import StoreUnavailable
from dflash_train.store.shard import ShardFacts
from dflash_train.store.target_files import ensure_target_files
from dflash_train.target import tensor_parallel
from dflash_train.target.base import TargetModel
from dflash_train.target.canary import check_target
from dflash_train.util.device import device_name
from dflash_train.util.errors import UserError
from dflash_train.util.plugins import plugin

STOP = "stop"
FINISH = "finish"


@dataclass(frozen=True)
class Ready:
    """The target is loaded and checked."""

    device: str


@dataclass(frozen=True)
class Captured:
    shard_id: str
    start: int
    stop: int
    seconds: float


@dataclass(frozen=True)
class Staged:
    shard_id: str
    path: Path
    facts: ShardFacts


@dataclass(frozen=True)
class Failed:
    """The worker ends. final: trying again cannot help (a UserError, as text, but for a store that is away)."""

    text: str
    final: bool


class Stopped(Exception):
    """The supervisor said STOP."""


class Pipe:
    """The worker's end. Reading is a thread's, so that STOP and the supervisor's death are noticed at once."""

    def __init__(self, connection: Connection):
        self.connection, self.stopping = connection, threading.Event()
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True, name="pipe").start()

    def _read(self) -> None:
        while True:
            try:
                message = self.connection.recv()
            except (EOFError, OSError):
                os._exit(1)  # the supervisor is dead: nobody will upload what we do
            if message == STOP:
                self.stopping.set()
            self._jobs.put(message)

    def jobs(self) -> Iterator[Job]:
        while not isinstance(message := self._jobs.get(), str):
            yield message

    def stop_check(self) -> None:
        if self.stopping.is_set():
            raise Stopped

    def send(self, message: object) -> None:
        with self._lock:
            self.connection.send(message)

    def captured(self, job: Job, samples: slice, seconds: float) -> None:
        self.send(Captured(job.shard.shard_id, samples.start, samples.stop, seconds))

    def staged(self, job: Job, path: Path, facts: ShardFacts) -> None:
        self.send(Staged(job.shard.shard_id, path, facts))


def serve(connection: Connection) -> None:
    """The whole life of a worker process. Its first message is (Order, target_files): the small files of the store's
    target/ folder for the worker that is to write them, None for the others."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        order, target_files = connection.recv()
    except (EOFError, OSError):
        os._exit(1)  # as in `Pipe`
    pipe = Pipe(connection)
    try:
        with loaded_target(order, target_files) as target:
            pipe.send(Ready(device_name(target.device)))
            capture_jobs(target, order, pipe.jobs(), pipe, pipe.stop_check)
    except Stopped:
        pass
    except UserError as error:
        pipe.send(Failed(str(error), final=not isinstance(error, StoreUnavailable)))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(Failed(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", final=False))
        sys.stderr.flush()
        os._exit(1)  # a broken CUDA context can hang an orderly exit


@contextmanager
def loaded_target(order: Order, target_files: dict[str, bytes] | None) -> Iterator[TargetModel]:
    """The target, loaded and checked, over all GPUs of this worker; its files written to the store where asked for.
    Leaving it ends the processes that hold its other shares."""
    run, module = order.run, plugin(targets.TARGETS, order.run.target.kind, "target.kind")
    if run.extract.gpus_per_worker > 1:
        opened = tensor_parallel.load(run.target, run.hardware, module.prepare(run.target), run.extract.gpus_per_worker)
    else:
        opened = nullcontext(module.load(run.target, run.hardware))
    with opened as target:
        check_target(target, run.target, ["capture"], order.layer_ids)
        if target_files is not None:
            store = plugin(stores.STORES, run.store.kind, "store.kind").open_store(run.store, run.store_name)
            ensure_target_files(store, target.head(), target_files, order.staging_folder)
        yield target
