"""Extraction on many GPUs by the real supervisor, and then on ever fewer of them: its workers are killed, half by half.

One start serves every number of GPUs, and every kill is a drill: the shards that the dead had in hand are done again by
the living, and in the end the store must hold each shard that was handed out, once.
"""

import os
import signal
import threading
from collections import defaultdict
from time import monotonic

from extract_path import Watched, accounts, folders, open_path

from dflash_train.capture.rows import RenderedRows
from dflash_train.capture.setup import Setup, plan_all
from dflash_train.capture.supervisor import Slot, Supervisor

LOOK_S = 0.05


def extraction(setup: Setup, rows: RenderedRows, gpus: list[str], counts: list[int], seconds: float, warm_shards: int,
               parent: str | None = None) -> dict:  # fmt: skip
    """Rates with the largest of `counts` workers, then with the smaller ones -> figures by count, and what became of
    the shards. gpus: as CUDA_VISIBLE_DEVICES calls them; none = processes on the CPU. warm_shards: each worker has made
    so many before anything is measured, and has compiled its kernels in them."""
    counts, started = sorted(counts, reverse=True), monotonic()
    with folders(parent) as (store, staging):
        with open_path(setup, store, rows, plan_all(setup, rows), staging) as (order, desk):
            with Supervisor(order, desk, setup.run.extract, gpus, counts[0], lambda: None) as supervisor:
                drill = Drill(supervisor, desk, counts, seconds, warm_shards)
                drill.start()
                try:
                    supervisor.run()
                finally:
                    drill.over.set()
            drill.join()
        if drill.problem:
            raise drill.problem
        return {
            "gpus": {str(count): figures for count, figures in drill.figures.items()},
            "ready_s": drill.ready_at - started, "kills": drill.kills, "paused_share": desk.uploader.paused_share,
            "shards": len(desk.handed_out), "samples": sum(len(shard.sample_ids) for shard in desk.handed_out),
            **accounts(store, desk.handed_out),
        }  # fmt: skip


class Drill(threading.Thread):
    """Waits for all workers, measures, kills down to the next number, and so on; then lets the run end."""

    def __init__(self, supervisor: Supervisor, desk: Watched, counts: list[int], seconds: float, warm_shards: int):
        super().__init__(name="drill", daemon=True)
        self.supervisor, self.desk, self.counts, self.seconds = supervisor, desk, counts, seconds
        self.warm_shards = warm_shards
        self.figures: dict[int, dict] = {}
        self.kills: list[dict] = []
        self.ready_at = 0.0
        self.over = threading.Event()  # the run has ended
        self.problem: Exception | None = None

    def run(self) -> None:
        try:
            self.wait(lambda: all(self.desk.shards[s.name] >= self.warm_shards for s in self.supervisor.slots))
            self.ready_at = monotonic()
            for count in self.counts:
                self.kill_down_to(count)
                start = monotonic()
                self.wait(lambda start=start: monotonic() - start > self.seconds)
                self.figures[count] = self.rates(start, monotonic())
        except Exception as problem:
            self.problem = problem
        self.desk.enough = True

    def wait(self, until) -> None:
        """Raises RuntimeError when the run ends before."""
        while not until():
            if self.over.wait(LOOK_S):
                raise RuntimeError("the run ended before it was measured: more samples are needed")

    def living(self) -> list[Slot]:
        return [slot for slot in self.supervisor.slots if slot.process is not None and slot.ready]

    def kill_down_to(self, count: int) -> None:
        """Kill the others as the kernel would when memory is out; wait until what they had in hand is on file again."""
        doomed = self.living()[count:]
        if not doomed:
            return
        start, in_hand = monotonic(), sum(len(slot.jobs) for slot in doomed)
        for slot in doomed:
            slot.deaths = self.supervisor.config.max_restarts  # so that nobody takes its place
            os.kill(slot.process.pid, signal.SIGKILL)
        self.wait(lambda: len(self.living()) == count and not self.unfinished())
        self.kills.append({"left": count, "killed": len(doomed), "shards_in_hand": in_hand,
                           "recovered_s": monotonic() - start})  # fmt: skip

    def unfinished(self) -> bool:
        """Some shard of a dead worker is not on file yet."""
        again, killed_by = self.supervisor.again, self.supervisor.killed_by
        return bool(again) or any(killed_by[shard_id] for slot in self.living() for shard_id in list(slot.jobs))

    def rates(self, start: float, stop: float) -> dict:
        """Of each worker from its first report in start..stop to its last one, added up."""
        reports: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for at, worker, tokens in list(self.desk.seen):
            if start <= at <= stop:
                reports[worker].append((at, tokens))
        alone = {worker: sum(tokens for _, tokens in found[1:]) / (found[-1][0] - found[0][0])
                 for worker, found in sorted(reports.items()) if len(found) > 2}  # fmt: skip
        if len(alone) != len(self.living()):
            raise RuntimeError(f"{len(alone)} of {len(self.living())} workers reported often enough for a rate")
        num_bytes = sum(marker.bytes for at, marker in list(self.desk.marks) if start <= at <= stop)
        return {
            "tokens_per_s": sum(alone.values()), "slowest": min(alone.values()), "fastest": max(alone.values()),
            "upload_mb_per_s": num_bytes / (stop - start) / 1e6, "staged_bytes": self.desk.uploader.staged_bytes,
        }  # fmt: skip
