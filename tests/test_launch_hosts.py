"""launch/'s examples for many hosts: ssh, Slurm, DeepSpeed's hostfile; and shellcheck over all its scripts."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deepspeed.launcher.runner import _parse_hostfile
from helpers_launch import ROOT, SSH, Host
from hydra import compose, initialize_config_dir

from dflash_train import cli

SCRIPTS = sorted(
    path for folder in (".ci", "launch") for path in (ROOT / folder).iterdir()
    if path.suffix in (".sh", ".sbatch") or path.name == "run"
)  # fmt: skip
HOSTS = "# the hosts\n\nfirst slots=8\nsecond\n"


@pytest.fixture
def host(tmp_path) -> Host:
    host = Host(tmp_path)
    host.command("ssh", SSH)
    host.say(hosts=HOSTS, one="first\n")
    return host


def hosts(host: Host, action: str, *words: str, listed: str = "hosts", **environment: str) -> tuple[int, str]:
    return host.run("launch/hosts.sh", action, str(host.state / listed), *words, **environment)


def until(condition, what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


# ---------------------------------------------------------------- all scripts


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_clean(path):
    """As shellcheck sees them; they stop at the first error."""
    shellcheck = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    result = subprocess.run([shellcheck, "-s", "bash", path], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^set -euo pipefail$", path.read_text(), re.M)


def test_shellcheck_sees_faults(tmp_path):
    shellcheck = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    (tmp_path / "bad.sh").write_text("#!/usr/bin/env bash\nrm -r $1/lib\n")
    assert subprocess.run([shellcheck, tmp_path / "bad.sh"], capture_output=True).returncode
    assert {"node.sh", "setup.sh", "hosts.sh", "slurm_extract.sbatch", "pick_torch.sh"} <= {p.name for p in SCRIPTS}


# ---------------------------------------------------------------- ssh


def test_start_status_stop(host):
    """Two names of one machine: it runs once. What is sent reaches node.sh unharmed, and stop is a SIGTERM."""
    host.say(codes="hang\n")
    odd = "+data.sources.mine.path=it's here/*.jsonl"
    code, text = hosts(host, "start", "+data=demo", odd, DFLASH_STORE="s3://b/x y", AWS_SECRET_ACCESS_KEY="hidden")
    assert code == 0, text
    assert "first: started, pid" in text and "second: runs already" in text
    assert host.calls("ssh first") and host.calls("ssh second") and not host.calls("ssh #")
    until(lambda: (host.state / "running").exists(), "no extraction")
    assert host.calls("-m dflash_train.extract")[0].endswith(f"extract +data=demo {odd}")
    code, text = hosts(host, "status")
    assert code == 0 and "first: runs, pid" in text and "node: torch and Triton run" in text
    assert "first: told to stop" in hosts(host, "stop", listed="one")[1]
    until(lambda: "does not run" in hosts(host, "status")[1], "it did not end")
    assert (host.state / "signals").read_text().split() == ["TERM", "finished"]


def test_settings_are_sent_and_secrets_are_not(host):
    host.command("ssh", '#!/usr/bin/env bash\nprintf "%s\\n" "$@" >>"$HOST/sent"; cat >>"$HOST/sent"\n')
    secrets = {"AWS_ACCESS_KEY_ID": "key-id", "AWS_SECRET_ACCESS_KEY": "hidden", "HF_TOKEN": "hf_hidden"}
    plain = {"DFLASH_STORE": "s3://bucket/x", "AWS_ENDPOINT_URL": "http://10.0.0.1:9000", "HF_HOME": "/models"}
    hosts(host, "start", **plain, **secrets)
    sent = (host.state / "sent").read_text()
    assert all(f"{name}={value}" in sent for name, value in plain.items())
    assert "hidden" not in sent and "key-id" not in sent


def test_a_host_that_is_gone_is_named_and_the_others_start(host):
    host.say(hosts="gone\nsecond\n", codes="0\n")
    code, text = hosts(host, "start")
    assert code == 1 and "start failed on: gone" in text and "fix:" in text and "second: started" in text
    until(lambda: host.calls("-m dflash_train.extract"), "no extraction")


def test_a_host_without_the_checkout_is_named(host):
    code, text = hosts(host, "start", HOSTS_DIR="/not/here")
    assert code == 1 and "failed on: first second" in text and "/not/here" in text


def test_a_wrong_call_shows_how(host):
    for words in (("launch/hosts.sh",), ("launch/hosts.sh", "restart", str(host.state / "hosts"))):
        code, text = host.run(*words)
        assert code == 2 and "hosts.sh start" in text and "hosts.sh stop" in text
    code, text = host.run("launch/hosts.sh", "start", "/no/hosts.txt")
    assert code == 2 and "/no/hosts.txt cannot be read" in text


# ---------------------------------------------------------------- Slurm

SRUN = r"""#!/usr/bin/env bash
echo "srun $*" >>"$HOST/calls"
code=$(cat "$HOST/srun_code")
[ "$code" = hang ] || exit "$code"
echo $$ >"$HOST/srun_pid"
trap 'exit 143' TERM
for _ in $(seq 600); do sleep 0.05; done
"""
SCANCEL = '#!/usr/bin/env bash\necho "scancel $*" >>"$HOST/calls"\nkill -TERM "$(cat "$HOST/srun_pid")"\n'
SCONTROL = '#!/usr/bin/env bash\necho "scontrol $*" >>"$HOST/calls"\n'


def slurm(host: Host, srun_code: str) -> subprocess.Popen:
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        host.command(name, text)
    host.say(srun_code=srun_code)
    return host.start("bash", str(host.checkout / "launch/slurm_extract.sbatch"), "+data=demo", "store=s3",
                      SLURM_SUBMIT_DIR=str(host.checkout), SLURM_JOB_ID="17", USER="me")  # fmt: skip


def test_slurm_header():
    """One task a node with all its GPUs, queued again, and the script alone told two minutes before the limit."""
    lines = (ROOT / "launch/slurm_extract.sbatch").read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    header = dict(re.fullmatch(r"#SBATCH --([\w-]+)(?:=(\S+))?", line).groups()
                  for line in lines if line.startswith("#SBATCH"))  # fmt: skip
    assert all(
        i < first_command for i, line in enumerate(lines) if line.startswith("#SBATCH")
    )  # later ones are ignored
    assert header["ntasks-per-node"] == "1" and "requeue" in header and header["signal"] == "B:TERM@120"
    assert "gpus-per-node" in header and "time" in header and "nodes" in header


@pytest.mark.parametrize("code", [0, 2])
def test_slurm_starts_one_node_script_per_node_and_ends_with_its_code(host, code):
    process = slurm(host, str(code))
    process.communicate(timeout=30)
    assert process.returncode == code
    assert host.calls("srun --kill-on-bad-exit=0 launch/node.sh +data=demo store=s3")
    assert not host.calls("scontrol")


def test_slurm_before_the_limit_the_nodes_are_told_and_the_job_is_queued_again(host):
    process = slurm(host, "hang")
    until(lambda: (host.state / "srun_pid").exists(), "srun did not start")
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert host.calls("scancel --signal=TERM 17") and host.calls("scontrol requeue 17")


# ---------------------------------------------------------------- README

SHOWN = re.findall(r"^(?:sbatch .*)?(launch/\S+) ?(.*?)(?: +#.*)?$", (ROOT / "README.md").read_text("utf-8"), re.M)


def test_the_readme_shows_all_three():
    assert {script for script, _ in SHOWN} >= {"launch/node.sh", "launch/hosts.sh", "launch/slurm_extract.sbatch"}


@pytest.mark.parametrize("script, words", [shown for shown in SHOWN if "store=" in shown[1]])
def test_what_the_readme_types_is_an_extraction(script, words):
    assert os.access(ROOT / script, os.R_OK)
    overrides = [word for word in words.split() if re.match(r"[+~]*[\w.]+=", word)]
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        assert cli.build_run("extract", compose("extract", cli.rewrite_argv(overrides))).store.kind == "s3"


# ---------------------------------------------------------------- DeepSpeed


def test_deepspeed_reads_the_example_hostfile():
    lines = (ROOT / "launch/hostfile.example").read_text().splitlines()
    assert _parse_hostfile(lines) == {"gpu-host-1": 8, "gpu-host-2": 8}
    assert any("deepspeed --hostfile launch/hostfile.example launch/train.py" in line for line in lines)
