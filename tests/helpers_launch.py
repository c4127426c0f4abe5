"""A host for launch/: a copy of its scripts, with a fake nvidia-smi, Python, uv and ssh before the real tools on PATH.

Every fake writes the words it was called with into `calls`; the files named below say what it answers.
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

NVIDIA_SMI = r"""#!/usr/bin/env bash
[ -f "$HOST/smi_error" ] && { cat "$HOST/smi_error"; exit 9; }
case "$1" in
  -L) echo "GPU 0: NVIDIA H200" ;;
  --query-gpu=*) cat "$HOST/gpus" ;;
  *) echo "| NVIDIA-SMI x    Driver Version: x    CUDA Version: $(cat "$HOST/cuda")  |" ;;
esac
"""

# python3, .venv/bin/python and what uv makes. .venv/torch holds the CUDA version of the torch that is "installed".
PYTHON = r"""#!/usr/bin/env bash
echo "$(basename "$(dirname "$(dirname "$0")")")/$(basename "$0") $*" >>"$HOST/calls"
case "$1 $2" in
  "-c "*version_info*) exit "$(cat "$HOST/python_is_wrong" 2>/dev/null || echo 0)" ;;
  "-c "*torch.version*) [ -f .venv/torch ] && cat .venv/torch ;;
  "-m venv") [ -f "$HOST/no_venv" ] && exit 1; mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  "-m pip")
    case "$*" in
      *"uninstall -y torch"*) rm -f .venv/torch ;;
      *" install torch"*) [ -f "$HOST/no_network" ] && { echo "no route to the index" >&2; exit 1; }
        [ -f .venv/torch ] || cat "$HOST/index" >.venv/torch ;;
    esac ;;
  "- ")
    cat >"$HOST/asked"
    [ "$(cat .venv/torch)" = None ] && { echo "this torch is a CPU build" >&2; exit 1; }
    [ -f "$HOST/problem" ] && { cat "$HOST/problem" >&2; exit 1; }
    exit 0 ;;
  "-m dflash_train.extract")
    echo "TRITON_CACHE_DIR=$TRITON_CACHE_DIR HF_HOME=$HF_HOME" >>"$HOST/calls"
    code=$(head -n 1 "$HOST/codes" 2>/dev/null)
    sed -i 1d "$HOST/codes" 2>/dev/null
    [ "$code" = hang ] || exit "${code:-0}"
    trap 'echo TERM >>"$HOST/signals"; sleep 0.2; echo finished >>"$HOST/signals"; exit 143' TERM
    trap 'echo INT >>"$HOST/signals"' INT
    echo running >"$HOST/running"
    for _ in $(seq 600); do sleep 0.05; done ;;
esac
"""

UV = r"""#!/usr/bin/env bash
echo "uv $*" >>"$HOST/calls"
mkdir -p .venv/bin && cp "$HOST/spare_python" .venv/bin/python && rm -f "$HOST/python_is_wrong"
"""

SSH = r"""#!/usr/bin/env bash
while [ "$1" = -o ]; do shift 2; done
echo "ssh $1" >>"$HOST/calls"
[ "$1" = gone ] && exit 255
exec bash -c "$2"
"""


class Host:
    """A GPU host whose driver, Python and index are as told. .venv does not exist yet."""

    def __init__(self, folder: Path, gpus: int = 1, driver: str = "580.65.06", cuda: str = "13.0"):
        self.checkout, self.state, self.bin = folder / "checkout", folder / "state", folder / "bin"
        for path in (self.checkout, self.state, self.bin):
            path.mkdir(parents=True)
        shutil.copytree(ROOT / "launch", self.checkout / "launch", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "cpu-constraints.txt", "Makefile"):
            shutil.copy(ROOT / name, self.checkout)
        for name, text in (("python3", PYTHON), ("nvidia-smi", NVIDIA_SMI)):
            self.command(name, text)
        self.say(gpus=f"{driver}, NVIDIA H200\n" * gpus, cuda=cuda, index="13.0")

    def command(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def say(self, **files: str) -> None:
        """What the fakes answer from now on."""
        for name, text in files.items():
            (self.state / name).write_text(text)

    def environment(self, **more: str) -> dict[str, str]:
        return {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.state), "HOST": str(self.state),
                "NODE_PAUSE_S": "0", **more}  # fmt: skip

    def start(self, *words: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*words], cwd=self.checkout.parent, env=self.environment(**environment), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=hear_signals,
        )  # fmt: skip

    def run(self, *words: str, **environment: str) -> tuple[int, str]:
        """(exit code, what was said) of a script of launch/, started from elsewhere as a user might."""
        process = self.start(str(self.checkout / words[0]), *words[1:], **environment)
        text, _ = process.communicate(timeout=60)
        return process.returncode, text

    def calls(self, *having: str) -> list[str]:
        """Calls of fakes whose words hold all of `having`."""
        lines = (self.state / "calls").read_text().splitlines() if (self.state / "calls").exists() else []
        return [line for line in lines if all(word in line for word in having)]

    def remove(self, name: str) -> None:
        os.unlink(self.bin / name)


def hear_signals() -> None:
    """A bash cannot trap what was ignored when it started, as under nohup or in a background job."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
