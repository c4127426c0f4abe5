"""The supervisor piece by piece, without worker processes: hand-out, messages, deaths."""

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_train.capture import serve
from dflash_train.capture import supervisor as supervisor_module
from dflash_train.capture.line import Line
from dflash_train.capture.supervisor import Supervisor
from dflash_train.capture.worker import Job
from dflash_train.config import ExtractConfig, HardwareConfig
from dflash_train.store.base import StoreUnavailable
from dflash_train.util.errors import UserError


class FakeProcess:
    """A process that is stuck in the kernel, or has ended; remembers what was asked of it."""

    pid, exitcode, sentinel = 2**22 + 7, None, None

    def __init__(self, alive: bool):
        self.alive, self.joined = alive, []

    def is_alive(self) -> bool:
        return self.alive

    def kill(self) -> None:
        self.killed = True

    def join(self, timeout=None) -> None:
        assert timeout is not None, "a process that cannot be killed would be waited for without end"
        self.joined.append(timeout)


def fake_desk(**changes) -> SimpleNamespace:
    nothing = lambda *args, **options: None
    state = SimpleNamespace(worker=nothing, error=nothing, shard=nothing)
    return SimpleNamespace(**{"state": state, "check": nothing, "again": nothing, "captured": nothing} | changes)


def supervised(num_workers: int, target_files=lambda: None, **config) -> Supervisor:
    """One without processes, whose messages to workers are kept by name; its source has 100 jobs."""
    run = SimpleNamespace(hardware=HardwareConfig(device="cpu", num_threads=1))
    order = SimpleNamespace(run=run, staging_folder=Path("nowhere"))
    supervisor = Supervisor(order, fake_desk(), ExtractConfig(**config), ["0"] * num_workers, num_workers, target_files)
    jobs = iter([job(f"train-{i:05d}") for i in range(100)])
    supervisor.source = SimpleNamespace(finished=False, poll=lambda: next(jobs))
    supervisor.sent = {slot.name: [] for slot in supervisor.slots}
    supervisor.send = lambda slot, message: supervisor.sent[slot.name].append(message.shard.shard_id)
    for slot in supervisor.slots:
        slot.process, slot.line = FakeProcess(True), SimpleNamespace(close=lambda: None, heard=list, last_words=list)
    return supervisor


def job(shard_id: str) -> Job:
    return Job(SimpleNamespace(shard_id=shard_id, sample_ids=["a"], lengths=[1]), (0,))


def test_a_worker_that_even_a_kill_does_not_end_is_named_and_left(tmp_path, capfd):
    supervisor = supervised(1, stop_s=0.1, hang_s=1)
    (slot,) = supervisor.slots
    process, slot.ready = slot.process, True
    head = tmp_path / f".target-x.{process.pid}.tmp"  # of store/target_files.py
    head.mkdir()
    (head / "target_head.safetensors").write_bytes(b"x")
    supervisor.order.staging_folder = tmp_path
    supervisor.give(slot, job("train-00000"))
    slot.heard -= 2
    supervisor.start = lambda slot: None
    supervisor.watch(slot)
    assert process.killed and process.joined and slot.process is None and not head.exists()
    assert [again.shard.shard_id for again in supervisor.again] == ["train-00000"]
    out = capfd.readouterr().out
    assert "does not die" in out and "(extract.hang_s)" in out


@pytest.fixture
def line() -> Iterator[tuple[Line, Connection]]:
    """A line, and the worker's end of its pipe."""
    ours, theirs = multiprocessing.Pipe()
    line = Line(ours, threading.Event())
    yield line, theirs
    theirs.close()
    line.close()
    assert ours.closed, "its threads have ended"


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_message_that_is_cut_by_a_kill_is_a_death_and_no_error(line):
    line, theirs = line
    theirs.send("whole")
    os.write(theirs.fileno(), (1000).to_bytes(4, "big") + b"half")
    theirs.close()
    assert list(line.last_words()) == ["whole"]


def test_a_worker_that_stops_in_the_middle_of_a_message_is_not_waited_for(line):
    """What it said before is heard at once, and the message when the rest of it has come."""
    line, theirs = line
    message = pickle.dumps("late")
    theirs.send("early")
    os.write(theirs.fileno(), len(message).to_bytes(4, "big") + message[:3])
    heard = []
    wait_for(lambda: heard.extend(line.heard()) or heard)
    started = time.monotonic()
    assert heard == ["early"] and list(line.heard()) == [] and time.monotonic() - started < 1
    os.write(theirs.fileno(), message[3:])
    wait_for(lambda: heard.extend(line.heard()) or len(heard) == 2)
    assert heard == ["early", "late"]


def test_a_message_larger_than_the_pipe_is_sent_without_waiting_for_its_reader(line):
    line, theirs = line
    started, large = time.monotonic(), [b"x" * 10**7, "next"]
    for message in large:
        line.send(message)
    assert time.monotonic() - started < 1
    assert [theirs.recv(), theirs.recv()] == large


def test_news_is_told_of_messages_and_of_the_end():
    ours, theirs = multiprocessing.Pipe()
    line = Line(ours, news := threading.Event())
    assert not news.is_set()
    theirs.send(1)
    assert news.wait(20) and list(line.heard()) == [1]
    news.clear()
    theirs.close()
    assert news.wait(20) and list(line.last_words()) == []
    line.send("to nobody")
    line.close()


def test_a_condemned_shard_is_shown_as_failed():
    supervisor, shown = supervised(1, max_restarts=0), []
    supervisor.desk.state.shard = lambda *args: shown.append(args)
    with pytest.raises(UserError, match="shard train-00000"):
        supervisor.take_back(job("train-00000"), "killed by signal 9")
    assert shown == [("train-00000", "failed")]


def test_while_one_worker_runs_dry_for_a_dead_ones_job_the_others_go_on():
    supervisor = supervised(3)
    for slot in supervisor.slots:
        slot.ready = True
    supervisor.hand_out()
    assert [len(sent) for sent in supervisor.sent.values()] == [2, 2, 2]
    supervisor.killed_by["suspect"] = 1
    supervisor.again.append(job("suspect"))
    dry = None
    for _ in range(4):
        for slot in supervisor.slots:  # each finishes one
            if slot.jobs:
                slot.jobs.pop(next(iter(slot.jobs)))
                slot.waiting -= 1
        supervisor.hand_out()
        dry = dry or supervisor.draining
        if not supervisor.again:
            break
    assert list(dry.jobs) == ["suspect"], "it is given alone"
    others = [slot for slot in supervisor.slots if slot is not dry]
    assert all(len(supervisor.sent[slot.name]) == 4 and len(slot.jobs) == 2 for slot in others)
    dry.jobs.clear()
    dry.waiting = 0
    supervisor.hand_out()
    assert len(dry.jobs) == 2


def test_the_store_is_not_asked_again_for_a_worker_that_is_replaced(monkeypatch):
    asked, given = [], []

    def target_files():
        assert not asked, "the store may be away by now"
        asked.append(1)
        return {"config.json": b"{}"}

    def process(target, args, **options):
        assert len(args) == 1, "what is large goes over the line"
        return SimpleNamespace(start=lambda: None, pid=1)

    class Told(Line):
        def send(self, message):
            given.append(message[1])

    supervisor = supervised(1, target_files)
    monkeypatch.setattr(supervisor_module, "Line", Told)
    monkeypatch.setattr(supervisor, "context", SimpleNamespace(Pipe=multiprocessing.Pipe, Process=process))
    (slot,) = supervisor.slots
    supervisor.start(slot)
    supervisor.start(slot)
    supervisor.take_in(slot, serve.Ready("cpu"))
    supervisor.start(slot)
    assert given == [{"config.json": b"{}"}, {"config.json": b"{}"}, None], "once ready, a worker has written them"


@pytest.mark.parametrize("error,final", [(StoreUnavailable("store", got="HTTP 503"), False), (UserError("x"), True)])
def test_a_store_that_is_away_while_the_target_loads_is_no_final_error(monkeypatch, error, final):
    sent = []

    @contextmanager
    def refuse(order, target_files):
        raise error
        yield

    monkeypatch.setattr(serve.signal, "signal", lambda *args: None)
    monkeypatch.setattr(serve, "Pipe", lambda connection: SimpleNamespace(send=sent.append))
    monkeypatch.setattr(serve, "loaded_target", refuse)
    serve.serve(SimpleNamespace(recv=lambda: (None, None)))
    assert [message.final for message in sent] == [final]


def test_a_worker_that_gets_ready_while_the_run_ends_starts_no_others():
    supervisor, started = supervised(2), []
    supervisor.start = lambda slot: started.append(slot.name)
    supervisor.ending = True
    supervisor.take_in(supervisor.slots[0], serve.Ready("cpu"))
    assert started == []
    supervisor.ending = False
    supervisor.take_in(supervisor.slots[0], serve.Ready("cpu"))
    assert started == ["worker 1"]
