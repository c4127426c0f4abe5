"""Where the numbers of a run go: lines, output_dir/metrics.jsonl always, wandb where it works; and signals to stop."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_train.config import WandbConfig
from dflash_train.engine.agree import writing
from dflash_train.util.dist import is_main
from dflash_train.util.errors import UserError
from dflash_train.util.io import json_line, read_jsonl, write_jsonl
from dflash_train.util.log import duration, say

METRICS = "metrics.jsonl"
_TIMEOUT_S = 30


def wandb_mode(mode: str) -> str:
    """auto -> online with a key in the environment, else offline; WANDB_MODE of the environment wins over auto."""
    if mode != "auto":
        return mode
    return os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")


class Metrics:
    """log(step, {...}) appends one line and, when wandb runs, one entry with its own step axis.

    Nothing that wandb does can stop training: at its first error it is switched off and that is said.
    """

    def __init__(self, output_dir: str | Path, wandb: WandbConfig, config: dict, resumed_step: int | None, run_id: str):
        self.path = Path(output_dir, METRICS)
        self._file = self._wandb = None
        if not is_main():
            return
        self._open(resumed_step)
        mode = wandb_mode(wandb.mode)
        if mode != "disabled":
            self._guarded(lambda: self._start_wandb(wandb, mode, config, run_id))

    def _open(self, resumed_step: int | None) -> None:
        """A resumed run drops the lines after its checkpoint, so that the file reads as if it had never stopped."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is None:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            write_jsonl(self.path, _lines_until(self.path, resumed_step))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed in close)

    def _start_wandb(self, settings: WandbConfig, mode: str, config: dict, run_id: str) -> None:
        import wandb

        self._wandb = wandb.init(
            project=settings.project, name=settings.name, mode=mode, dir=str(self.path.parent), config=config,
            id=run_id, resume="allow" if mode == "online" else None,
            settings=wandb.Settings(init_timeout=_TIMEOUT_S, login_timeout=_TIMEOUT_S, silent=True, console="off"),
        )  # fmt: skip
        self._wandb.define_metric("step")
        self._wandb.define_metric("*", step_metric="step")
        say(f"wandb: {mode}" + (f", in {self.path.parent / 'wandb'}" if mode == "offline" else ""))

    def _guarded(self, action) -> None:
        try:
            action()
        except Exception as error:
            self._wandb = None
            say(f"wandb is off from here ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); "
                f"{self.path} has everything")  # fmt: skip

    def log(self, step: int, values: dict) -> None:
        if self._file is None:
            return
        row = {"step": step, **values}
        with writing(self.path):
            self._file.write(json_line(row))
            self._file.flush()
        if self._wandb is not None:
            self._guarded(lambda: self._wandb.log(row))

    def close(self) -> None:
        if self._file is not None:
            with writing(self.path):
                self._file.close()
            self._file = None
        if self._wandb is not None:
            # finish() waits for the upload for as long as the network takes; training is over and does not.
            last = threading.Thread(target=self._guarded, args=(self._wandb.finish,), daemon=True)
            last.start()
            last.join(timeout=_TIMEOUT_S)
            if last.is_alive():
                say(f"wandb is still uploading after {_TIMEOUT_S} s and is left behind; {self.path} has everything")
            self._wandb = None


def _lines_until(path: Path, step: int):
    """Rows up to `step`; a last line that a kill cut short is dropped."""
    try:
        for row in read_jsonl(path):
            if row["step"] <= step:
                yield row
    except UserError:
        return


class StepLog:
    """Rates since the last line, and the line itself."""

    def __init__(self, metrics: Metrics, total_steps: int):
        self.metrics, self.total_steps = metrics, total_steps
        self.start_s, self.sums, self.last = time.monotonic(), [0.0] * 4, {}

    def count(self, *, tokens: float, samples: float, blocks: float) -> None:
        for i, value in enumerate((1, tokens, samples, blocks)):
            self.sums[i] += value

    def write(self, step: int, values: dict, elapsed_s: float) -> None:
        seconds = max(time.monotonic() - self.start_s, 1e-9)
        names = ("steps_per_s", "tokens_per_s", "samples_per_s", "blocks_per_s")
        rates = {name: total / seconds for name, total in zip(names, self.sums)}
        self.start_s, self.sums = time.monotonic(), [0.0] * 4
        self.last = {**values, **rates}
        self.metrics.log(step, {**self.last, "elapsed_s": elapsed_s})
        left = duration((self.total_steps - step) / rates["steps_per_s"])
        say(f"step {step:,}/{self.total_steps:,}  loss {values['loss']:.4f}  lr {values['lr']:.2e}  "
            f"grad {values['grad_norm']:.2f}  {rates['tokens_per_s']:,.0f} tokens/s  "
            f"{rates['blocks_per_s']:,.0f} blocks/s  ETA {left}")  # fmt: skip

    def summary(self) -> list[list[str]]:
        if not self.last:
            return []
        return [["training loss", f"{self.last['loss']:.4f}"], ["blocks/s", f"{self.last['blocks_per_s']:,.0f}"],
                ["tokens/s", f"{self.last['tokens_per_s']:,.0f}"]]  # fmt: skip


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C go into the list, for the loop to stop at the end of its window; a second one acts at once."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: object) -> None:
        received.append(number)
        say("stopping at the end of this step, with a checkpoint (once more: at once)")
        for known, handler in previous.items():
            signal.signal(known, handler)

    for number in previous:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
