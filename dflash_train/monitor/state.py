"""RunState: what a run says of itself, read by the page, the metrics endpoint and the terminal.

One object per host, made by the process that supervises the workers; any thread may call any method. Plain Python, no
I/O; memory grows by the id of each shard (ShardBar), all else has a fixed size.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

from dflash_train.monitor.parts import SHARD_STATUSES, WORKER_STATUSES, OpenShard, ShardBar, Worker
from dflash_train.monitor.rates import History, Rate, Reasons, clean, strict

_RECENT = 50


class RunState:
    """Everything a run has to show.

    total_shards counts the whole store, done_shards those that were there before; total_samples and total_tokens count
    what this run has still to do. flops_per_token: of one forward; peak_flops: FLOP/s of one worker's device(s).
    """

    def __init__(
        self, stage: str, run: str, total_samples: int, total_tokens: int, total_shards: int, done_shards: int = 0,
        flops_per_token: float | None = None, peak_flops: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.stage, self.run, self.host, self.pid = (
            clean(stage, 200),
            clean(run, 200),
            socket.gethostname(),
            os.getpid(),
        )
        self.total_samples, self.total_tokens = total_samples, total_tokens
        self.total_shards, self.done_shards = total_shards, done_shards
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._clock, self._lock = clock, threading.Lock()
        self._start, self._started_at = clock(), _utc()
        self._ended: float | None = None
        self._ok: bool | None = None
        self._workers: dict[str, Worker] = {}
        self._shards = ShardBar(total_shards, done_shards)
        self._open: dict[str, OpenShard] = {}
        self._samples, self._tokens, self._uploads = Rate(), Rate(), Rate()
        self._progress = [0, 0]  # samples, tokens: less than captured where a dead worker's shard is done again
        self._num_uploads = 0
        self._staging: dict | None = None
        self._paused_s, self._paused_since = 0.0, None
        self._backlog: tuple[int, int] | None = None
        self._retries, self._dropped, self._sources = Reasons(), Reasons(), Reasons()
        self._recent_retries, self._errors = deque(maxlen=_RECENT), deque(maxlen=_RECENT)
        self._num_errors = 0
        self._gpus: dict = {"note": "not sampled", "devices": []}
        self._history = History()

    # ------------------------------------------------------------ what the run reports

    def worker(self, name: str, device: str, pid: int | None, status: str, shard_id: str | None = None) -> None:
        """A worker is (now) in `status`, one of WORKER_STATUSES, at `shard_id`."""
        if status not in WORKER_STATUSES:
            raise ValueError(f"worker status {status!r}: one of {', '.join(WORKER_STATUSES)}")
        with self._lock:
            now = self._tick()
            known = self._workers.setdefault(name, Worker(clean(device, 80), pid, status, now))
            known.enter(status, now)
            known.device, known.pid, known.shard_id, known.seen = clean(device, 80), pid, shard_id, now

    def captured(self, name: str, shard_id: str, samples: int, tokens: int, seconds: float,
                 sources: dict[str, int] | None = None) -> None:  # fmt: skip
        """Worker `name` captured one more batch of a shard in `seconds`; sources: samples by data source."""
        with self._lock:
            now = self._tick()
            for rate, amount in ((self._samples, samples), (self._tokens, tokens)):
                rate.add(now, amount, seconds)
            known = self._workers.setdefault(name, Worker("", None, "capturing", now))
            known.tokens.add(now, tokens, seconds)
            known.samples += samples
            known.shard_id, known.seen = shard_id, now
            self._open.setdefault(shard_id, OpenShard()).add(samples, tokens, sources or {})
            self._advance(samples, tokens)
            for source, count in (sources or {}).items():
                self._sources.add(source, count)

    def shard(self, shard_id: str, status: str, worker: str | None = None, bytes: int = 0, samples: int = 0,
              tokens: int = 0) -> None:  # fmt: skip
        """A shard is (now) in `status`, one of SHARD_STATUSES.

        samples, tokens: what it holds, told with 'claimed' (a worker's progress is then exact) and 'elsewhere' (else
        the mean is taken). bytes: of its file, told with 'staged'; they are backlog until it is uploaded. What was
        captured of a shard that is claimed anew or failed no longer counts as done.
        """
        if status not in SHARD_STATUSES:
            raise ValueError(f"shard status {status!r}: one of {', '.join(SHARD_STATUSES)}")
        with self._lock:
            now = self._tick()
            was_done = self._shards.set(shard_id, status)
            if status in ("waiting", "claimed", "failed", "elsewhere") and not was_done:
                self._take_back(shard_id)
            if status == "claimed":
                self._open[shard_id] = OpenShard(samples, tokens)
            elif status == "staged":
                self._open.setdefault(shard_id, OpenShard()).staged_bytes = bytes
            elif status == "uploaded":
                self._open.pop(shard_id, None)
            elif status == "elsewhere" and not was_done:
                todo = max(1, self.total_shards - self.done_shards)
                self._advance(samples or self.total_samples // todo, tokens or self.total_tokens // todo)
            if worker in self._workers:
                self._workers[worker].seen = now

    def uploaded(self, num_bytes: int, seconds: float) -> None:
        """One shard, or one part, is in the store."""
        with self._lock:
            self._uploads.add(self._tick(), num_bytes, seconds)
            self._num_uploads += 1

    def staging(self, own_bytes: int, used_bytes: int, total_bytes: int, high_water: float, paused: bool,
                low_water: float | None = None) -> None:  # fmt: skip
        """The staging folder: our bytes, everybody's, its size, the water marks as fractions, and whether we wait."""
        with self._lock:
            now = self._tick()
            if paused and self._paused_since is None:
                self._paused_since = now
            elif not paused and self._paused_since is not None:
                self._paused_s += now - self._paused_since
                self._paused_since = None
            self._staging = {
                "own_bytes": own_bytes, "used_bytes": used_bytes, "total_bytes": total_bytes,
                "fill": used_bytes / total_bytes if total_bytes else None,
                "high_water": high_water, "low_water": low_water, "paused": paused,
            }  # fmt: skip

    def backlog(self, num_shards: int, num_bytes: int) -> None:
        """Staged and not yet uploaded, from a sink that knows better than the shards' statuses."""
        with self._lock:
            self._tick()
            self._backlog = (num_shards, num_bytes)

    def retry(self, what: str, why: str) -> None:
        """Something (an upload, a claim) is tried again."""
        with self._lock:
            self._tick()
            self._retries.add(_first_line(why))
            self._recent_retries.append({"at": _utc(), "line": clean(f"{what}: {why}", 500)})

    def dropped(self, reason: str, count: int = 1) -> None:
        """Rows that will not be in the store."""
        with self._lock:
            self._dropped.add(reason, count)

    def error(self, line: str) -> None:
        """One more line for the last errors."""
        with self._lock:
            self._tick()
            self._num_errors += 1
            self._errors.append({"at": _utc(), "line": clean(line, 2000)})

    def gpus(self, devices: list[dict], note: str = "") -> None:
        """The latest readings of the GPUs, or why there are none."""
        with self._lock:
            self._gpus = {"note": note, "devices": devices}

    def finished(self, ok: bool) -> None:
        """The run is over; clocks and rates stand still from here on."""
        with self._lock:
            self._ended, self._ok = self._tick(), ok

    @property
    def ended(self) -> bool:
        return self._ended is not None

    # ------------------------------------------------------------ what is shown

    def snapshot(self) -> dict:
        """Everything, as strict JSON: what is not known yet is null."""
        with self._lock:
            now = self._tick()
            uploads, backlog = self._uploads, self._waiting()
            value = {
                "stage": self.stage, "run": self.run, "host": self.host, "pid": self.pid,
                "status": {None: "running", True: "done", False: "failed"}[self._ok],
                "started_at": self._started_at, "elapsed_s": now - self._start, "eta_s": self._eta(now),
                "samples": _counted(self._progress[0], self.total_samples, self._samples, now),
                "tokens": _counted(self._progress[1], self.total_tokens, self._tokens, now),
                "flops": self._flops(now), "shards": self._shards.as_dict(),
                "workers": [self._worker_row(name, worker, now) for name, worker in self._workers.items()],
                "staging": self._staging_row(now),
                "uploads": {"count": self._num_uploads, "bytes": int(uploads.total), "per_s": uploads.recent(now),
                            "per_s_overall": uploads.overall(now), "backlog_shards": backlog[0],
                            "backlog_bytes": backlog[1]},
                "retries": {"total": self._retries.counts.total(), "by_reason": self._retries.as_dict(),
                            "recent": list(self._recent_retries)},
                "dropped": {"total": self._dropped.counts.total(), "by_reason": self._dropped.as_dict()},
                "sources": self._sources.as_dict(),
                "errors": {"total": self._num_errors, "recent": list(self._errors)}, "gpus": self._gpus,
                "history": self._history.columns("tokens_per_s", "upload_bytes_per_s", "staging_fill"),
            }  # fmt: skip
        return strict(value)

    def _eta(self, now: float) -> float | None:
        """Seconds left: the tokens at the present rate, then what is staged at the present upload rate."""
        if self._ok is not None:
            return 0.0
        left, rate = self.total_tokens - self._progress[1], self._tokens.recent(now) or self._tokens.overall(now)
        if left > 0 and not rate:
            return None
        upload = self._uploads.recent(now) or self._uploads.overall(now)
        return (left / rate if left > 0 else 0.0) + (self._waiting()[1] / upload if upload else 0.0)

    def _waiting(self) -> tuple[int, int]:
        """The backlog, shards and bytes: as reported, else what is staged and not yet uploaded."""
        staged = [shard.staged_bytes for shard in self._open.values() if shard.staged_bytes is not None]
        return self._backlog or (len(staged), sum(staged))

    def _flops(self, now: float) -> dict:
        """Model FLOPs a second over the peak of the workers that are alive."""
        alive = sum(worker.status not in ("stopped", "dead") for worker in self._workers.values())
        known = self.flops_per_token is not None and self.peak_flops and alive
        scale = self.flops_per_token / (self.peak_flops * alive) if known else None
        rates = {"utilisation": self._tokens.recent(now), "utilisation_overall": self._tokens.overall(now)}
        shares = {name: None if scale is None or rate is None else rate * scale for name, rate in rates.items()}
        return {"flops_per_token": self.flops_per_token, "peak_flops": self.peak_flops, **shares}

    def _worker_row(self, name: str, worker: Worker, now: float) -> dict:
        opened = self._open.get(worker.shard_id)
        share = opened.tokens / opened.size_tokens if opened and opened.size_tokens else None
        if worker.shard_id is not None and opened is None:
            share = 1.0  # uploaded, and nothing heard of the next
        return {
            "name": name, "device": worker.device, "pid": worker.pid, "status": worker.status,
            "status_s": now - worker.since, "seen_s": now - worker.seen, "shard_id": worker.shard_id,
            "shard_share": share, "samples": worker.samples, "tokens": int(worker.tokens.total),
            "tokens_per_s": worker.tokens.recent(now), "capturing_share": worker.share("capturing", now),
            "paused_share": worker.share("paused", now),
        }  # fmt: skip

    def _staging_row(self, now: float) -> dict | None:
        if self._staging is None:
            return None
        paused_s = self._paused_s + (0.0 if self._paused_since is None else now - self._paused_since)
        elapsed = now - self._start
        return self._staging | {"paused_s": paused_s, "paused_share": paused_s / elapsed if elapsed > 0 else 0.0}

    # ------------------------------------------------------------ with the lock held

    def _tick(self) -> float:
        """The time, which stands still once the run is over; now and then it becomes a point of history."""
        now = self._clock() if self._ended is None else self._ended
        if self._history.due(now - self._start):
            fill = self._staging and self._staging["fill"]
            self._history.add(now - self._start, self._tokens.recent(now), self._uploads.recent(now), fill)
        return now

    def _advance(self, samples: int, tokens: int) -> None:
        self._progress[0] += samples
        self._progress[1] += tokens

    def _take_back(self, shard_id: str) -> None:
        """A shard that will be captured again: what was captured of it is no progress."""
        opened = self._open.pop(shard_id, None)
        if opened is not None:
            self._advance(-opened.samples, -opened.tokens)
            for source, count in opened.sources.items():
                self._sources.add(source, -count)


def _counted(done: int, total: int, rate: Rate, now: float) -> dict:
    return {"done": done, "total": total, "captured": int(rate.total), "per_s": rate.recent(now),
            "per_s_overall": rate.overall(now)}  # fmt: skip


def _first_line(text: object) -> str:
    lines = str(text).splitlines()
    return lines[0] if lines else ""


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
