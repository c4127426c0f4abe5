"""Worker processes on a CPU: what they make, and what becomes of it when they, or the supervisor, are killed."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from helpers_host import Host, contents
from helpers_store import make_run

from dflash_train import extract, regenerate
from dflash_train.capture import serve
from dflash_train.capture.supervisor import Supervisor, visible_gpus
from dflash_train.capture.worker import Job
from dflash_train.config import ExtractRun
from dflash_train.store import local
from dflash_train.store.shard import list_markers
from dflash_train.util import provenance
from dflash_train.util.errors import UserError


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
        return contents(open_store(run))


def open_store(run: ExtractRun) -> local.LocalStore:
    return local.open_store(run.store, run.store_name)


def left_over(run: ExtractRun) -> list[str]:
    store = open_store(run)
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
    assert contents(open_store(run)) == alone and not left_over(run)
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
    assert contents(open_store(run)) == alone and no_process_is_left()
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
    done = {marker.shard_id for marker in list_markers(open_store(run))}
    assert "train-00003" not in done and not left_over(run)
    run.extract.num_workers = 0
    assert extract.main(run) is None
    assert contents(open_store(run)) == alone, "another number of workers goes on where they stopped"


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
    assert contents(open_store(run)) == alone and not psutil.pid_exists(stopped[0])
    assert "(extract.hang_s)" in capfd.readouterr().out


def test_a_stopped_worker_whose_pipe_is_full_is_killed_and_its_shards_are_made_by_another(tmp_path, monkeypatch, capfd):
    """SIGSTOP before a job that is larger than the kernel's buffer: whoever sent it would wait without end, whatever
    extract.hang_s says. Nothing is lost, nothing twice."""
    run, stopped = make_run(tmp_path, extract__num_workers=2, extract__hang_s=1.0), []
    for path in run.answers_dir.glob("*.jsonl"):  # every sample with an id of 300 KB
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {"id": row["id"].ljust(300_000, "x")}) + "\n" for row in rows))
    give = Supervisor.give

    def stop_first(self, slot, job):
        if slot.name == "worker 1" and not stopped:
            os.kill(slot.process.pid, signal.SIGSTOP)
            stopped.append(slot.process.pid)
        give(self, slot, job)

    start_together(monkeypatch)
    monkeypatch.setattr(Supervisor, "give", stop_first)
    started = time.monotonic()
    assert extract.main(run) is None
    assert time.monotonic() - started < 60 and not psutil.pid_exists(stopped[0]) and no_process_is_left()
    out = capfd.readouterr().out
    assert re.search(r"worker 1 died: it said nothing for \d s \(extract.hang_s\); to be done again: train-", out)
    samples = [i for marker in list_markers(open_store(run)) for i in marker.sample_ids]
    assert len(samples) == len(set(samples)) == 10 and {len(sample_id) for sample_id in samples} == {300_000}


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
    assert contents(open_store(run)) == alone and not psutil.pid_exists(stopped[0])
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
    done = {marker.shard_id for marker in list_markers(open_store(run))}
    assert set(staged) == done and 3 <= len(done) < 10
    assert not left_over(run) and list((tmp_path / "staging").iterdir()) == []
    run.extract.num_workers = 1
    assert extract.main(run) is None and contents(open_store(run)) == alone


@pytest.fixture
def host(tmp_path) -> Iterator[Callable[..., Host]]:
    """Starts a host on tmp_path that kills itself with its `at`th marker."""
    started = []

    def start(at: int, num_workers: int) -> Host:
        started.append(Host(tmp_path, tmp_path / "log", {"die_at": at, "extract__num_workers": num_workers}))
        return started[0]

    yield start
    for one in started:
        one.close()


def test_workers_end_with_a_supervisor_that_is_killed_and_the_next_run_completes_the_set(tmp_path, host, alone):
    """Traps 33, 35: kill -9 of the parent; no process keeps a GPU, and what was staged is done again."""
    killed = host(4, num_workers=2)
    killed.ends(-signal.SIGKILL)
    killed.wait_gone()
    run = make_run(tmp_path)
    assert 3 <= len(list_markers(open_store(run))) < 10
    assert left_over(run)
    assert extract.main(run) is None
    run.extract.verify = True
    assert extract.main(run) == 0  # sweeps objects whose markers the kill prevented
    assert contents(open_store(run)) == alone and not left_over(run)


def test_a_host_takes_over_what_another_one_leaves_when_it_is_killed(tmp_path, host, capfd, alone):
    """Trap 35: two hosts on one store, one killed: lost 0, duplicated 0."""
    run = make_run(tmp_path)
    killed = host(3, num_workers=0)
    store = open_store(run)
    while not store.list("claims/"):
        assert killed.process.poll() is None
        time.sleep(0.02)
    assert extract.main(run) is None
    killed.ends(-signal.SIGKILL)
    assert contents(open_store(run)).keys() >= alone.keys()
    samples = [sample_id for marker in list_markers(store) for sample_id in marker.sample_ids]
    assert len(samples) == len(set(samples)) == 10
    assert "(its process has ended)" in capfd.readouterr().out and not left_over(run)
