"""The monitor's other views: the Prometheus text, the readings of the GPUs, the terminal."""

import io
import re
import sys
import threading
import types
import urllib.error
import urllib.request
from contextlib import nullcontext

import pytest
from helpers_monitor import HOSTILE, SimulatedRun, hostile_state, parse_metrics, run_of
from rich.console import Console

from dflash_train.monitor import app, gpus
from dflash_train.monitor.prometheus import exposition
from dflash_train.monitor.state import RunState
from dflash_train.monitor.terminal import TerminalView, render
from dflash_train.monitor.watch import watch


@pytest.fixture(scope="module")
def run() -> SimulatedRun:
    return run_of(120)


# ---------------------------------------------------------------- Prometheus


def test_metrics_parse_and_say_what_the_snapshot_says(run):
    got = parse_metrics(exposition(run.state.snapshot()))
    snapshot = run.state.snapshot()
    single = {name: family["series"][()] for name, family in got.items() if () in family["series"]}
    assert single["dflash_tokens"] == snapshot["tokens"]["done"] > 0
    assert single["dflash_uploaded_bytes_total"] == snapshot["uploads"]["bytes"] > 0
    assert single["dflash_staging_paused"] == snapshot["staging"]["paused"]
    assert single["dflash_tokens_per_second"] == snapshot["tokens"]["per_s"]
    statuses = {dict(labels)["status"]: value for labels, value in got["dflash_shards"]["series"].items()}
    assert statuses == snapshot["shards"]["counts"]
    assert len(got["dflash_worker_tokens_total"]["series"]) == len(got["dflash_gpu_power_watts"]["series"]) == 4


def test_metrics_escape_labels_and_leave_out_what_is_not_known():
    got = parse_metrics(exposition(hostile_state().snapshot()))
    assert dict(next(iter(got["dflash_run_info"]["series"])))["run"] == HOSTILE
    assert dict(next(iter(got["dflash_worker_status"]["series"])))["worker"] == HOSTILE
    assert "dflash_staging_paused" not in got and "dflash_gpu_power_watts" not in got
    empty = parse_metrics(exposition(RunState("extract", "r", 1, 1, 1).snapshot()))
    assert "dflash_tokens_per_second" not in empty and empty["dflash_samples"]["series"] == {(): 0.0}


def test_the_small_parser_refuses_what_prometheus_refuses():
    good = '# HELP a_total x\n# TYPE a_total counter\na_total{b="c"} 1\n'
    assert parse_metrics(good)["a_total"]["series"] == {(("b", "c"),): 1.0}
    labels = [good.replace('"c"', bad) for bad in ('"c\n"', '"c"d"', '"c\\"', "c")]
    for bad in (*labels, good[:-1], good.replace("counter", "gauge"), good.replace(" 1", " NaN"), good + good,
                good + 'a_total{b="c"} 2\n', good.replace("# TYPE", "# TIPE")):  # fmt: skip
        with pytest.raises(AssertionError):
            parse_metrics(bad)


# ---------------------------------------------------------------- GPUs


class FakeNvmlError(Exception):
    pass


def fake_nvml(**broken) -> types.SimpleNamespace:
    """An NVML binding with two GPUs, the second of which reports no power; `broken` replaces functions."""

    def power(handle):
        if handle == 1:
            raise FakeNvmlError("Not Supported")
        return 612_345

    functions = {
        "NVMLError": FakeNvmlError, "NVML_TEMPERATURE_GPU": 0, "nvmlInit": lambda: None, "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2, "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H200" if handle else "NVIDIA A40",
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=97),
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=5, total=10),
        "nvmlDeviceGetPowerUsage": power, "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
    }  # fmt: skip
    return types.SimpleNamespace(**functions | broken)


class Noting(RunState):
    """Says when the first readings have come."""

    def __init__(self) -> None:
        super().__init__("extract", "r", 1, 1, 1)
        self.came = threading.Event()

    def gpus(self, devices, note="") -> None:
        super().gpus(devices, note)
        self.came.set()


def readings(nvml) -> dict:
    state = Noting()
    with gpus.GpuSampler(state, every_s=0.01, nvml=nvml):
        assert state.came.wait(20)
    return state.snapshot()["gpus"]


def test_gpu_readings_are_shares_bytes_and_watts_and_null_where_not_reported():
    first, second = readings(fake_nvml())["devices"]
    assert (first["name"], first["utilisation"], first["power_w"]) == ("NVIDIA A40", 0.97, pytest.approx(612.345))
    assert (second["name"], second["power_w"], second["memory_total_bytes"]) == ("NVIDIA H200", None, 10)
    assert get_metrics_of(first)["dflash_gpu_power_watts"]["series"][(("gpu", "0"), ("name", "NVIDIA A40"))] > 612


def get_metrics_of(device: dict) -> dict:
    state = RunState("extract", "r", 1, 1, 1)
    state.gpus([device])
    return parse_metrics(exposition(state.snapshot()))


def test_a_driver_that_fails_is_said_and_the_run_goes_on():
    def fail(*_):
        raise FakeNvmlError("GPU is lost")

    assert readings(fake_nvml(nvmlInit=fail)) == {"note": "NVML: GPU is lost", "devices": []}
    assert readings(fake_nvml(nvmlDeviceGetHandleByIndex=fail)) == {"note": "NVML: GPU is lost", "devices": []}


def test_without_a_driver_the_absence_is_said_and_the_binding_is_not_imported(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "_DRIVER", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it would raise
    state = RunState("extract", "r", 1, 1, 1)
    with gpus.GpuSampler(state):
        pass
    assert state.snapshot()["gpus"] == {"note": "no NVIDIA driver on this host", "devices": []}
    (tmp_path / "nvidiactl").touch()
    with gpus.GpuSampler(state):
        pass
    assert state.snapshot()["gpus"]["note"] == "not read: nvidia-ml-py is not installed"


# ---------------------------------------------------------------- terminal


def test_terminal_shows_the_figures_and_no_markup_of_the_run(run):
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    console.print(render(run.state.snapshot()))
    text = console.file.getvalue()
    assert any(re.match(r"[\d,.]+ tokens/s", line) for line in text.splitlines())
    for part in ("worker-3", "cuda:0", "tokens/s", "ETA", "staging", "NVIDIA H200", "% of the peak FLOP/s"):
        assert part in text
    state = RunState("extract", "[bold]r[/bold]", 10, 100, 2)
    state.error("[red]x[/nothing]")
    console.print(render(state.snapshot()))
    assert "[bold]r[/bold]" in console.file.getvalue() and "[red]x[/nothing]" in console.file.getvalue()


def test_terminal_draws_only_in_a_terminal(run):
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=120, force_terminal=terminal)
        with TerminalView(run.state, console) as view:
            assert view.active is terminal
            console.print("a line of the run")
        drawn = console.file.getvalue()
        assert "a line of the run" in drawn and ("worker-3" in drawn) is terminal


# ---------------------------------------------------------------- all of them


def test_watch_serves_the_page_until_the_block_ends_and_says_how_it_ended(monkeypatch):
    lines = []
    monkeypatch.setattr(app, "say", lines.append)
    for failure in (None, KeyError("the run died")):
        state = RunState("extract", "r", 1, 1, 1)
        with nullcontext() if failure is None else pytest.raises(KeyError), watch(state, True, "127.0.0.1", 0):
            url = lines[-1].split()[-1]
            with urllib.request.urlopen(url + "healthz", timeout=20) as answer:
                assert answer.read() == b"ok\n"
            assert not state.ended
            if failure is not None:
                raise failure
        assert state.snapshot()["status"] == ("done" if failure is None else "failed")
        assert [error["line"] for error in state.snapshot()["errors"]["recent"]] == (
            [] if failure is None else ["KeyError: 'the run died'"]
        )
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(url + "healthz", timeout=20)


def test_watch_without_a_page_serves_nothing(monkeypatch):
    lines = []
    monkeypatch.setattr(app, "say", lines.append)
    with watch(RunState("extract", "r", 1, 1, 1), False, "127.0.0.1", 0):
        assert not any(thread.name == "monitor" for thread in threading.enumerate())
    assert lines == []
