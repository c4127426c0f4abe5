"""Worker processes on a CPU: what they make, and what becomes of it when they, or the supervisor, are killed."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from helpers_store import make_run

from dflash_train import extract, regenerate
from dflash_train.capture import serve
from dflash_train.capture.supervisor import Supervisor, visible_gpus
from dflash_train.capture.worker import Job
from dflash_train.config import ExtractConfig, ExtractRun, HardwareConfig
from dflash_train.store import local
from dflash_train.store.base import StoreUnavailable
from dflash_train.store.shard import list_markers
from dflash_train.util import provenance
from dflash_train.util.errors import UserError

ROOT = Path(__file__).parents[1]
DIES = """
import os, signal, sys
sys.path.insert(0, "tests")
from pathlib import Path
from helpers_store import make_run
from dflash_train import extract, regenerate
from dflash_train.store.claims import Claims
from dflash_train.util import provenance
regenerate.ensure_answers = lambda run: None
provenance.code_version = lambda: "test"
number, done = int(sys.argv[2]), Claims.done

def die_at(self, shard_id):
    global number
    number -= 1
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    done(self, shard_id)

Claims.done = die_at
if __name__ == "__main__":
    sys.exit(extract.main(make_run(Path(sys.argv[1]), extract__num_workers=int(sys.argv[3]))))
"""


@pytest.fixture(autouse=True)
def answered(monkeypatch):
    """Answers are there, and a commit made while the tests run changes no bytes."""
    monkeypatch.setattr(provenance, "code_version", lambda: "test")
    monkeypatch.setattr(regenerate, "ensure_answers", lambda run: run.answers_dir)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, bytes]:
    """What one process makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "code_version", lambda: "test")
        patch.setattr(regenerate, "ensure_answers", lambda run: run.answers_dir)
        run = make_run(tmp_path_factory.mktemp("alone"))
        extract.main(run)
        return contents(run)


def contents(run: ExtractRun) -> dict[str, bytes]:
    """Key -> bytes of everything that training reads."""
    store = local.open_store(run.store, run.store_name)
    return {key: store.get_bytes(key) for key, _ in store.list() if key.startswith(("shards/", "markers/", "target/"))}


def left_over(run: ExtractRun) -> list[str]:
    store = local.open_store(run.store, run.store_name)
    return [key for key, _ in store.list() if key.startswith(("claims/", "hosts/"))]


def start_together(monkeypatch) -> None:
    """No job is handed out before every worker is ready: the first one would do all of so few."""
    has_room = Supervisor.has_room
    ready = lambda self: all(slot.ready for slot in self.slots if slot.process is not None)
    monkeypatch.setattr(Supervisor, "has_room", lambda self, slot: ready(self) and has_room(self, slot))


def on_job(monkeypatch, action) -> None:
    """action(supervisor, slot, job) after a job was sent to a worker."""
    send = Supervisor.send

    def sent(self, slot, message):
        send(self, slot, message)
        if isinstance(message, Job):
            action(self, slot, message)

    monkeypatch.setattr(Supervisor, "send", sent)


def no_process_is_left() -> bool:
    """None of ours below this one but the fork server and its helper."""
    names = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    return sum("forkserver" in name for name in names) <= 1


# ---------------------------------------------------------------- what they make


def test_two_worker_processes_make_the_very_bytes_that_one_process_makes(tmp_path, monkeypatch, capfd, alone):
    run = make_run(tmp_path, extract__num_workers=2)
    start_together(monkeypatch)
    assert extract.main(run) is None
    assert contents(run) == alone and not left_over(run)
    shares = [int(count) for count in re.findall(r"worker \d: (\d+) shards", capfd.readouterr().out)]
    assert len(shares) == 2 and sum(shares) == 10 and min(shares) >= 1
    assert list((tmp_path / "staging").iterdir()) == [] and no_process_is_left()


def test_a_worker_sees_its_own_gpu_alone_by_the_name_that_the_user_gave(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(3) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-8a2f")
    assert visible_gpus(2) == ["5", "GPU-8a2f"]


# ---------------------------------------------------------------- what dies


def test_the_shards_of_a_worker_killed_in_the_middle_are_made_by_others(tmp_path, monkeypatch, capfd, alone):
    """Trap 35: kill -9 of a worker with shards in hand; nothing is lost, nothing twice, the same bytes."""
    run, killed = make_run(tmp_path, extract__num_workers=2), []

    def kill(supervisor, slot, job):
        if slot.name == "worker 1" and not killed:
            os.kill(slot.process.pid, signal.SIGKILL)
            killed.extend(slot.jobs)

    start_together(monkeypatch)
    on_job(monkeypatch, kill)
    assert extract.main(run) is None
    assert contents(run) == alone and no_process_is_left()
    out = capfd.readouterr().out
    assert f"worker 1 died: killed by signal 9; to be done again: {', '.join(killed)}" in out
    assert "10/10 samples" in out, "what is captured twice counts once"


def test_a_shard_that_kills_every_worker_is_named_and_the_others_are_not_blamed(tmp_path, monkeypatch, alone):
    run, blamed = make_run(tmp_path, extract__num_workers=2, extract__max_restarts=1), set()

    def kill(supervisor, slot, job):
        if job.shard.shard_id == "train-00003":
            os.kill(slot.process.pid, signal.SIGKILL)
        blamed.update(supervisor.killed_by)

    with monkeypatch.context() as patch:
        start_together(patch)
        on_job(patch, kill)
        with pytest.raises(
            UserError, match=r"shard train-00003\n.*2 workers died with it: killed by signal 9\n.*train-"
        ):
            extract.main(run)
    assert blamed <= {f"train-{i:05d}" for i in range(8)} and no_process_is_left()
    done = {marker.shard_id for marker in list_markers(local.open_store(run.store, run.store_name))}
    assert "train-00003" not in done and not left_over(run)
    run.extract.num_workers = 0
    assert extract.main(run) is None
    assert contents(run) == alone, "another number of workers goes on where they stopped"


def test_workers_that_die_while_they_load_end_the_run(tmp_path, monkeypatch):
    run, start = make_run(tmp_path, extract__num_workers=2, extract__max_restarts=1), Supervisor.start

    def kill(self, slot):
        start(self, slot)
        os.kill(slot.process.pid, signal.SIGKILL)

    monkeypatch.setattr(Supervisor, "start", kill)
    with pytest.raises(UserError, match=r"extract.max_restarts\n.*every worker died 2 times.*killed by signal 9"):
        extract.main(run)
    assert no_process_is_left()


def test_a_worker_that_says_nothing_is_replaced(tmp_path, monkeypatch, capfd, alone):
    run, stopped = make_run(tmp_path, extract__num_workers=1, extract__hang_s=0.5), []

    def hang(supervisor, slot, job):
        if not stopped:
            os.kill(slot.process.pid, signal.SIGSTOP)
            stopped.append(slot.process.pid)

    on_job(monkeypatch, hang)
    assert extract.main(run) is None
    assert contents(run) == alone and not psutil.pid_exists(stopped[0])
    assert "(extract.hang_s)" in capfd.readouterr().out


def test_a_worker_that_hangs_while_it_loads_is_replaced(tmp_path, monkeypatch, capfd, alone):
    run, start, stopped = make_run(tmp_path, extract__num_workers=1, extract__load_s=30), Supervisor.start, []

    def hang(self, slot):
        start(self, slot)
        if not stopped:
            os.kill(slot.process.pid, signal.SIGSTOP)
            slot.heard -= 30
            stopped.append(slot.process.pid)

    monkeypatch.setattr(Supervisor, "start", hang)
    assert extract.main(run) is None
    assert contents(run) == alone and not psutil.pid_exists(stopped[0])
    assert "(extract.load_s)" in capfd.readouterr().out


def test_an_error_that_the_user_can_mend_ends_the_run_without_another_try(tmp_path, monkeypatch):
    """A missing weight is no better the second time; here, rendered rows that are cut."""
    run, start, starts = make_run(tmp_path, extract__num_workers=1), Supervisor.start, []

    def cut(self, slot):
        starts.append(slot.name)
        with open(self.order.rows_folder / "loss_mask.u8", "ab") as file:
            file.truncate(1)
        start(self, slot)

    monkeypatch.setattr(Supervisor, "start", cut)
    with pytest.raises(UserError, match=r"loss_mask.u8\n.*1 bytes"):
        extract.main(run)
    assert starts == ["worker 0"] and no_process_is_left()


# ---------------------------------------------------------------- the supervisor, piece by piece


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
        slot.process, slot.pipe = FakeProcess(True), SimpleNamespace(close=lambda: None, poll=lambda: False)
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


def test_a_message_that_is_cut_by_a_kill_is_a_death_and_no_error():
    supervisor = supervised(1)
    (slot,) = supervisor.slots
    slot.pipe, theirs = multiprocessing.Pipe()
    os.write(theirs.fileno(), (1000).to_bytes(4, "big") + b"half")
    theirs.close()
    supervisor.hear(slot)  # OSError: got end of file during message
    assert not slot.ready


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
        given.append(args[2])
        return SimpleNamespace(start=lambda: None, pid=1)

    supervisor = supervised(1, target_files)
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
    serve.serve(None, None, None)
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


# ---------------------------------------------------------------- the supervisor's own end


def test_sigterm_ends_the_workers_uploads_what_is_staged_and_exits_143(tmp_path, monkeypatch, alone):
    """Trap 32: SIGTERM at the third staged shard; another number of workers goes on."""
    run, take_in, staged = make_run(tmp_path, extract__num_workers=2), Supervisor.take_in, []

    def terminate(self, slot, message):
        take_in(self, slot, message)
        if isinstance(message, serve.Staged):
            staged.append(message.shard_id)
            if len(staged) == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "take_in", terminate)
        started = time.monotonic()
        with pytest.raises(SystemExit) as stop:
            extract.main(run)
    assert stop.value.code == 128 + signal.SIGTERM
    assert time.monotonic() - started < run.extract.stop_s and no_process_is_left()
    done = {marker.shard_id for marker in list_markers(local.open_store(run.store, run.store_name))}
    assert set(staged) == done and 3 <= len(done) < 10
    assert not left_over(run) and list((tmp_path / "staging").iterdir()) == []
    run.extract.num_workers = 1
    assert extract.main(run) is None and contents(run) == alone


def die(folder: Path, at: int, num_workers: int) -> subprocess.Popen:
    """A host that kills itself with its `at`th marker; its processes carry the folder's name."""
    environment = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "DFLASH_TEST": str(folder)}
    script = folder / "dies.py"
    folder.mkdir(exist_ok=True)
    script.write_text(DIES)
    command = [sys.executable, str(script), str(folder), str(at), str(num_workers)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


def processes_with(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DFLASH_TEST") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_workers_end_with_a_supervisor_that_is_killed_and_the_next_run_completes_the_set(tmp_path, alone):
    """Traps 33, 35: kill -9 of the parent; no process keeps a GPU, and what was staged is done again."""
    host = die(tmp_path, 4, num_workers=2)
    assert host.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while processes_with(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with(tmp_path) == []
    run = make_run(tmp_path)
    assert 3 <= len(list_markers(local.open_store(run.store, run.store_name))) < 10
    assert left_over(run)
    assert extract.main(run) is None
    run.extract.verify = True
    assert extract.main(run) == 0  # sweeps objects whose markers the kill prevented
    assert contents(run) == alone and not left_over(run)


def test_a_host_takes_over_what_another_one_leaves_when_it_is_killed(tmp_path, monkeypatch, capfd, alone):
    """Trap 35: two hosts on one store, one killed: lost 0, duplicated 0."""
    run = make_run(tmp_path)
    host = die(tmp_path, 3, num_workers=0)
    store = local.open_store(run.store, run.store_name)
    while not store.list("claims/"):
        assert host.poll() is None
        time.sleep(0.02)
    assert extract.main(run) is None
    assert host.wait() == -signal.SIGKILL
    assert contents(run).keys() >= alone.keys()
    samples = [sample_id for marker in list_markers(store) for sample_id in marker.sample_ids]
    assert len(samples) == len(set(samples)) == 10
    assert "(its process has ended)" in capfd.readouterr().out and not left_over(run)
