"""launch/node.sh and launch/setup.sh on hosts that lack things: what is said, what is done, what is not done twice."""

import os
import signal
import time

import pytest
from helpers_launch import PYTHON, UV, Host

from dflash_train import cli
from dflash_train.store.base import StoreUnavailable
from dflash_train.util.errors import UserError

OVERRIDES = ("+data=demo", "store=s3")


@pytest.fixture
def host(tmp_path) -> Host:
    return Host(tmp_path)


def refused(host: Host, *said: str, words: tuple[str, ...] = OVERRIDES, **environment: str) -> str:
    """node.sh ends with 2, one message with its fix, and without an extraction."""
    code, text = host.run("launch/node.sh", *words, **environment)
    assert code == 2, text
    assert text.count("  fix:  ") == 1 and not host.calls("dflash_train.extract"), text
    for part in said:
        assert part in text, text
    return text


# ---------------------------------------------------------------- the driver


def test_a_bare_host_is_set_up_and_extracts(host):
    code, text = host.run("launch/node.sh", *OVERRIDES, HF_HOME="/models")
    assert code == 0, text
    assert "1 x NVIDIA H200, driver 580.65.06, CUDA 13" in text
    assert host.calls("pip", "install torch>=2.11,<2.15") and host.calls("pip", "install -e .")
    assert not host.calls("cpu-constraints")
    (run,) = host.calls("-m dflash_train.extract")
    assert run.endswith("-m dflash_train.extract +data=demo store=s3")
    assert host.calls(f"TRITON_CACHE_DIR={host.state}/.triton/cache HF_HOME=/models")
    asked = (host.state / "asked").read_text()
    assert "cuda_problem" in asked and "triton" in asked
    compile(asked, "node.sh", "exec")


def test_a_second_run_installs_nothing(host):
    host.run("launch/node.sh", *OVERRIDES)
    before = len(host.calls("pip"))
    code, _ = host.run("launch/node.sh", *OVERRIDES)
    assert code == 0 and before and not host.calls("pip")[before:]
    assert len(host.calls("-m dflash_train.extract")) == 2


def test_two_hosts_that_share_a_folder_install_once(host):
    one, two = (host.start(str(host.checkout / "launch/node.sh"), *OVERRIDES) for _ in range(2))
    for process in (one, two):
        text, _ = process.communicate(timeout=60)
        assert process.returncode == 0, text
    assert len(host.calls("pip", "install torch")) == 1 and len(host.calls("-m dflash_train.extract")) == 2


def test_new_versions_are_installed(host):
    host.run("launch/node.sh", *OVERRIDES)
    before = len(host.calls("pip"))
    with open(host.checkout / "pyproject.toml", "a") as file:
        file.write("# a newer dependency\n")
    host.run("launch/node.sh", *OVERRIDES)
    assert host.calls("pip")[before:]


def test_no_driver(host):
    host.remove("nvidia-smi")
    refused(host, "no NVIDIA driver", "install driver 580", "--gpus all")


def test_a_driver_that_does_not_answer(host):
    host.say(smi_error="Failed to initialize NVML: Driver/library version mismatch\n")
    refused(host, "Driver/library version mismatch", "restart")


def test_a_driver_without_a_gpu(host):
    host.say(gpus="No devices were found\n")
    refused(host, "shows no GPU: No devices were found")


@pytest.mark.parametrize("driver, cuda", [("570.86.10", "12.8"), ("535.129.03", "")])
def test_an_old_driver_is_refused_before_anything_is_installed(tmp_path, driver, cuda):
    host = Host(tmp_path, driver=driver, cuda=cuda)
    refused(host, f"driver {driver}", "too old", "CUDA 13", "install driver 580", "DFLASH_TORCH=")
    assert not host.calls("pip") and not (host.checkout / ".venv").exists()


def test_an_old_driver_lifted_by_cuda_compat_is_good_enough(tmp_path):
    assert Host(tmp_path, driver="550.54.15", cuda="13.0").run("launch/node.sh", *OVERRIDES)[0] == 0


def test_an_old_driver_takes_the_torch_that_is_named(tmp_path):
    host = Host(tmp_path, driver="550.54.15", cuda="12.4")
    wish = "torch==2.11.0 --index-url https://index.example/cu126"
    code, text = host.run("launch/node.sh", *OVERRIDES, DFLASH_TORCH=wish)
    assert code == 0, text
    assert host.calls("pip", f"install {wish}") and not host.calls("torch>=2.11")


# ---------------------------------------------------------------- Python and torch


def test_a_cpu_torch_on_a_gpu_host_is_replaced(host):
    host.run("launch/node.sh", *OVERRIDES)
    (host.checkout / ".venv" / "torch").write_text("None")  # as made where no GPU was seen
    (host.checkout / ".venv" / ".ready-run").write_text("torch==2.13.0 / the CPU build")
    code, text = host.run("launch/node.sh", *OVERRIDES)
    assert code == 0 and "replacing it" in text, text
    assert host.calls("uninstall -y torch")


def test_a_cpu_torch_is_named_where_the_index_has_no_other(host):
    host.say(index="None")
    refused(host, "this torch is a CPU build, and here is a GPU", "pip config list", "DFLASH_TORCH")


@pytest.mark.parametrize(
    "problem, fix",
    [
        ("RuntimeError: Failed to find C compiler. Please specify via CC", "apt-get install gcc python3-dev"),
        ("subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/main.c']' returned 1", "gcc python3-dev"),
        ("torch 2.14 cannot use a GPU here: the driver is too old (found version 12080)", "install driver 580"),
        ("ModuleNotFoundError: No module named 'triton'", "rm -r .venv"),
    ],
)
def test_torch_or_triton_that_does_not_run(host, problem, fix):
    host.say(problem=f"Traceback\n{problem}\n")
    refused(host, problem, fix)


def test_no_python_that_fits(host):
    host.say(python_is_wrong="1")
    for name in ("python3.11", "python3.12"):
        host.command(name, PYTHON)
    refused(host, "Python 3.11 or 3.12 is needed", "apt-get install python3.12-venv", "uv")
    refused(host, "PYTHON=python3.12 is not", PYTHON="python3.12")


def test_uv_brings_the_python_that_is_lacking(host):
    host.say(python_is_wrong="1", spare_python=PYTHON)
    (host.state / "spare_python").chmod(0o755)
    for name, text in (("python3.11", PYTHON), ("python3.12", PYTHON), ("uv", UV)):
        host.command(name, text)
    code, text = host.run("launch/node.sh", *OVERRIDES)
    assert code == 0, text
    assert host.calls("uv venv", "--python 3.12")


def test_a_python_without_venv(host):
    host.say(no_venv="")
    refused(host, "-m venv failed", "apt-get install python3-venv")


def test_a_failed_install_is_not_taken_for_done(host):
    host.say(no_network="")
    refused(host, "no route to the index", "pip install failed", "network, index or disk")
    (host.state / "no_network").unlink()
    assert host.run("launch/node.sh", *OVERRIDES)[0] == 0


def test_a_cache_folder_that_cannot_be_written(host):
    refused(host, "/proc/kernels cannot be written", "TRITON_CACHE_DIR=", TRITON_CACHE_DIR="/proc/kernels")


def test_make_installs_the_same_way_with_what_development_needs(host):
    code, text = host_make(host)
    assert code == 0, text
    assert host.calls("pip", "install -e .[dev]")
    before = len(host.calls("pip"))
    assert host_make(host)[0] == 0 and not host.calls("pip")[before:]


def host_make(host: Host) -> tuple[int, str]:
    process = host.start("make", "-C", str(host.checkout), "setup")
    text, _ = process.communicate(timeout=60)
    return process.returncode, text


def test_without_a_gpu_make_takes_the_cpu_build(host):
    host.remove("nvidia-smi")
    assert host_make(host)[0] == 0
    assert host.calls("pip", "install torch==") and host.calls("pip", "-c cpu-constraints.txt -e .[dev]")


# ---------------------------------------------------------------- --check


def test_check_installs_nothing(host):
    code, text = host.run("launch/node.sh", "--check", *OVERRIDES)
    assert code == 0 and "nothing is installed yet" in text, text
    assert not host.calls("pip") and not host.calls("dflash_train.extract")
    host.run("launch/node.sh", *OVERRIDES)
    before = len(host.calls("pip"))
    host.say(codes="2\n")
    code, _ = host.run("launch/node.sh", "--check", *OVERRIDES)
    assert code == 2 and not host.calls("pip")[before:]
    assert host.calls("-m dflash_train.extract")[-1].endswith("dry_run=true +data=demo store=s3")


def test_check_names_what_is_lacking(host):
    host.remove("nvidia-smi")
    refused(host, "no NVIDIA driver", words=("--check", *OVERRIDES))


# ---------------------------------------------------------------- exit codes and signals


@pytest.mark.parametrize(
    "codes, ends_with, starts",
    [
        ("0", 0, 1),
        ("2", 2, 1),  # refused: final
        ("143", 143, 1),  # told to end
        ("1 137 0", 0, 3),  # broke off, killed for memory, done
        ("1 2", 2, 2),
        ("1 1 1 1 1 0", 1, 5),  # a bounded number of times
    ],
)
def test_what_may_pass_is_tried_again_and_what_is_final_is_not(host, codes, ends_with, starts):
    host.say(codes="\n".join(codes.split()) + "\n")
    code, text = host.run("launch/node.sh", *OVERRIDES)
    assert code == ends_with, text
    assert len(host.calls("-m dflash_train.extract")) == starts
    assert ("given up" in text) == (starts == 5)


@pytest.mark.parametrize("word", ["verify=true", "clean=true", "dry_run=true"])
def test_what_only_looks_or_deletes_is_done_once(host, word):
    host.say(codes="1\n0\n")
    assert host.run("launch/node.sh", *OVERRIDES, word)[0] == 1
    assert len(host.calls("-m dflash_train.extract")) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_reaches_the_extraction_once_and_its_end_is_awaited(host, number):
    """SIGINT as a terminal sends it: to the whole process group."""
    host.say(codes="hang\n0\n")
    process = host.start(str(host.checkout / "launch/node.sh"), *OVERRIDES)
    deadline = time.monotonic() + 30
    while not (host.state / "running").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    send = os.killpg if number == signal.SIGINT else os.kill
    send(process.pid, number)
    text, _ = process.communicate(timeout=30)
    assert process.returncode == 143, text
    assert (host.state / "signals").read_text().split() == ["TERM", "finished"]
    assert len(host.calls("-m dflash_train.extract")) == 1  # not started again


@pytest.mark.parametrize("kind, code", [(UserError, 2), (StoreUnavailable, 1)])
def test_the_stages_say_by_their_exit_code_whether_to_try_again(kind, code, monkeypatch, capsys):
    def body(run):
        raise kind("store", got="this", want="that")

    monkeypatch.setattr("sys.argv", ["plan", "data=demo"])
    monkeypatch.setattr(cli, "build_run", lambda stage, cfg: None)
    with pytest.raises(SystemExit) as stop:
        cli.main("plan", body)
    assert stop.value.code == code
    assert "got:  this" in capsys.readouterr().err
