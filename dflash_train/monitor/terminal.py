"""The same figures in a terminal, kept at its foot by rich while the run's own lines scroll above them.

Only where the output is a terminal: in a pipe or a log file nothing is drawn, and the plain progress lines stay.
"""

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dflash_train.monitor.state import RunState
from dflash_train.util.io import human_bytes
from dflash_train.util.log import console, duration

_WORKERS_SHOWN, _ERRORS_SHOWN = 16, 3
_STYLES = {"capturing": "green", "paused": "yellow", "loading": "yellow", "starting": "yellow", "dead": "bold red"}


class TerminalView:
    """Draws `state` twice a second from `with` to its end; `active` says whether it draws at all."""

    def __init__(self, state: RunState, on: Console = console):
        self.active = on.is_terminal and not on.is_dumb_terminal
        self._live = Live(console=on, get_renderable=lambda: render(state.snapshot()), refresh_per_second=2)

    def __enter__(self) -> "TerminalView":
        if self.active:
            self._live.start()
        return self

    def __exit__(self, *error) -> None:
        if self.active:
            self._live.stop()


def render(snapshot: dict) -> Group:
    """A snapshot as a few lines: progress, figures, staging, workers, GPUs, last errors."""
    tokens = snapshot["tokens"]
    bar = Padding(ProgressBar(total=max(1, tokens["total"]), completed=tokens["done"], width=60), 0)  # ends its line
    parts = [Text(_headline(snapshot)), bar, Text(_figures(snapshot)), Text(_transfer(snapshot))]
    if snapshot["workers"]:
        parts.append(_workers(snapshot["workers"]))
    parts += [Text(_gpu(gpu)) for gpu in snapshot["gpus"]["devices"]]
    parts += [Text(error["line"], style="red") for error in snapshot["errors"]["recent"][-_ERRORS_SHOWN:]]
    return Group(*parts)


def _headline(snapshot: dict) -> str:
    shards, samples = snapshot["shards"], snapshot["samples"]
    left = "" if snapshot["eta_s"] is None else f"  ETA {duration(snapshot['eta_s'])}"
    return (f"{snapshot['stage']} {snapshot['run']}: {shards['done']:,}/{shards['total']:,} shards  "
            f"{samples['done']:,}/{samples['total']:,} samples  {duration(snapshot['elapsed_s'])}{left}")  # fmt: skip


def _figures(snapshot: dict) -> str:
    share = snapshot["flops"]["utilisation"]
    parts = [f"{_number(snapshot['tokens']['per_s'])} tokens/s", f"{_number(snapshot['samples']['per_s'])} samples/s"]
    parts += [] if share is None else [f"{share:.1%} of the peak FLOP/s"]
    for name in ("retries", "dropped", "errors"):
        if snapshot[name]["total"]:
            parts.append(f"{snapshot[name]['total']:,} {name}")
    return "  ".join(parts)


def _transfer(snapshot: dict) -> str:
    staging, uploads = snapshot["staging"], snapshot["uploads"]
    parts = []
    if staging is not None:
        waits = ", capture waits" if staging["paused"] else ""
        parts.append(f"staging {human_bytes(staging['own_bytes'])} of ours, {staging['fill'] or 0:.0%} full{waits} "
                     f"(waited {staging['paused_share']:.1%})")  # fmt: skip
    rate = "" if uploads["per_s"] is None else f" at {human_bytes(uploads['per_s'])}/s"
    parts.append(f"uploaded {human_bytes(uploads['bytes'])}{rate}, {uploads['backlog_shards']:,} shards wait")
    return "  ".join(parts)


def _workers(workers: list[dict]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "device", "status", "shard", "", "tokens/s", "tokens", "waits"):
        table.add_column(column, justify="right" if column in ("", "tokens/s", "tokens", "waits") else "left")
    for row in workers[:_WORKERS_SHOWN]:
        table.add_row(
            Text(row["name"]), Text(row["device"]), Text(row["status"], style=_STYLES.get(row["status"], "")),
            Text(row["shard_id"] or ""), _percent(row["shard_share"]), _number(row["tokens_per_s"]),
            f"{row['tokens']:,}", _percent(row["paused_share"]),
        )  # fmt: skip
    if len(workers) > _WORKERS_SHOWN:
        table.add_row(f"and {len(workers) - _WORKERS_SHOWN} more")
    return table


def _gpu(gpu: dict) -> str:
    power = "" if gpu["power_w"] is None else f"  {gpu['power_w']:.0f} W"
    memory = "" if gpu["memory_used_bytes"] is None else f"  {human_bytes(gpu['memory_used_bytes'])}"
    return f"GPU {gpu['index']} {gpu['name']}: {_percent(gpu['utilisation'])} busy{memory}{power}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{min(value, 1.0):.0%}"
