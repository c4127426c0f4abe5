"""Metrics: JSON lines always; wandb offline without a key and never in the way."""

import json
import os
import signal
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from dflash_train.config import WandbConfig
from dflash_train.engine import monitoring
from dflash_train.engine.monitoring import Metrics, stop_signals, wandb_mode
from dflash_train.util.errors import UserError


def fake_wandb(monkeypatch, **behaviour) -> list:
    """A wandb module that notes its calls; behaviour: exceptions (or functions) by call name."""
    calls = []

    def act(name):
        def call(*args, **kwargs):
            calls.append((name, args, kwargs))
            if name in behaviour:
                behaviour[name]()
            return run

        return call

    run = SimpleNamespace(define_metric=act("define_metric"), log=act("log"), finish=act("finish"))
    module = ModuleType("wandb")
    module.init, module.Settings = act("init"), lambda **k: k
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def fail():
    raise ConnectionError("no network")


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder, steps, resumed_step=None, mode="disabled"):
    metrics = Metrics(folder, WandbConfig(mode=mode), {"a": 1}, resumed_step, "run")
    for step in steps:
        metrics.log(step, {"loss": 1.0 / step})
    metrics.close()


def test_wandb_is_offline_without_a_key(monkeypatch):
    """Trap 43."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode("auto") == "online" and wandb_mode("disabled") == "disabled"


def test_wandb_gets_its_own_step_axis(tmp_path, monkeypatch):
    """Trap 43."""
    calls = fake_wandb(monkeypatch)
    write(tmp_path, [1, 2], mode="offline")
    assert ("define_metric", ("*",), {"step_metric": "step"}) in calls
    assert [call[1][0]["step"] for call in calls if call[0] == "log"] == [1, 2]
    assert [call[2] for call in calls if call[0] == "log"] == [{}, {}]  # no step= of wandb's own
    assert calls[0][2]["mode"] == "offline" and calls[-1][0] == "finish"


@pytest.mark.parametrize("where", ["init", "define_metric", "log", "finish"])
def test_a_failing_wandb_never_stops_training(tmp_path, monkeypatch, capsys, where):
    """Trap 43."""
    fake_wandb(monkeypatch, **{where: fail})
    write(tmp_path, [1, 2, 3], mode="online")
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    assert capsys.readouterr().out.count("wandb is off from here (ConnectionError: no network)") == 1


def test_a_wandb_that_uploads_for_ever_is_left_behind(tmp_path, monkeypatch, capsys):
    """Trap 43."""
    fake_wandb(monkeypatch, finish=lambda: time.sleep(3600))
    monkeypatch.setattr(monitoring, "_TIMEOUT_S", 0.2)
    write(tmp_path, [1], mode="online")
    assert "left behind" in capsys.readouterr().out


def test_only_rank_0_writes(tmp_path, monkeypatch):
    """Trap 43."""
    calls = fake_wandb(monkeypatch)
    monkeypatch.setattr(monitoring, "is_main", lambda: False)
    write(tmp_path, [1], mode="online")
    assert calls == [] and not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_one_message_that_names_rank_and_file(tmp_path):
    metrics = Metrics(tmp_path, WandbConfig(mode="disabled"), {}, None, "run")
    metrics._file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115 (closed below)
    for act in (lambda: metrics.log(1, {"loss": 1.0}), metrics.close):
        with pytest.raises(UserError, match=r"metrics\.jsonl(.|\n)*rank 0 could not write it(.|\n)*No space left"):
            act()


def test_a_new_run_starts_a_new_file_and_a_resumed_one_continues_at_its_checkpoint(tmp_path):
    """Trap 40."""
    write(tmp_path, [1, 2, 3, 4, 5])
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step":6,"lo')  # a kill in the middle of a line
    write(tmp_path, [4, 5, 6], resumed_step=3)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    write(tmp_path, [1])
    assert [row["step"] for row in rows(tmp_path)] == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_the_handlers_come_back(number):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stop_signals() as received:
        assert received == []
        os.kill(os.getpid(), number)
        assert received == [number]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_second_ctrl_c_acts_at_once(request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt), stop_signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
