"""A simulated extraction for the monitor's tests: 27B-sized shards, four GPUs, an upload that is slower.

python tests/helpers_monitor.py PORT      serves one that goes on until Ctrl-C
"""

import json
import math
import random
import re
import sys
import threading
import time

from dflash_train.monitor.app import Monitor
from dflash_train.monitor.state import RunState

SHARD_TOKENS, SHARD_BYTES, TOKENS_PER_S, MEAN_LENGTH = 20_480, 1 << 30, 12_400, 550
SOURCES = {
    "ultrachat": 0.27,
    "openorca": 0.22,
    "magicoder": 0.17,
    "metamath": 0.14,
    "code_feedback": 0.12,
    "tools": 0.08,
}
STAGING_BYTES, UPLOAD_BYTES_PER_S = 96 << 30, 1.9e9


HOSTILE = '</script><script>alert("x")</script> "quoted" \\ back\nsecond line'


class SimulatedRun:
    """Steps of simulated time drive a RunState as a supervisor would."""

    def __init__(self, num_workers: int = 4, total_shards: int = 24_500, done_shards: int = 9_600, seed: int = 0):
        self.now, self.random = 0.0, random.Random(seed)
        todo = total_shards - done_shards
        self.state = RunState(
            "extract", "qwen3_6_27b, mix914k", todo * SHARD_TOKENS // MEAN_LENGTH, todo * SHARD_TOKENS, total_shards,
            done_shards, flops_per_token=54e9, peak_flops=989e12, clock=lambda: self.now,
        )  # fmt: skip
        self.names = [f"worker-{i}" for i in range(num_workers)]
        self.shards: dict[str, str | None] = dict.fromkeys(self.names)
        self.left = dict.fromkeys(self.names, 0)
        self.queue: list[str] = []
        self.next_shard, self.uploading, self.paused = done_shards, 0.0, False
        self.state.host = "gpu-host-1"
        for i, name in enumerate(self.names):
            self.state.worker(name, f"cuda:{i}", 4100 + i, "loading")
        for reason, count in (
            ("no supervised token", 212),
            ("longer than extract.max_tokens", 1_304),
            ("held out", 57),
        ):
            self.state.dropped(reason, count)

    def step(self, seconds: float = 1.0) -> None:
        """`seconds` of capture on every worker, and of upload."""
        self.now += seconds
        for name in self.names:
            self._capture(name, seconds)
        self._upload(seconds)
        own = (len(self.queue) + len(self.names)) * SHARD_BYTES
        self.paused = own > (0.6 if self.paused else 0.8) * STAGING_BYTES
        self.state.staging(own, own + (7 << 30), STAGING_BYTES, 0.8, self.paused, low_water=0.6)
        self.state.gpus([self._gpu(i) for i in range(len(self.names))])

    def _capture(self, name: str, seconds: float) -> None:
        if self.shards[name] is None:
            if self.paused:
                self.state.worker(name, f"cuda:{name[-1]}", 4100 + int(name[-1]), "paused")
                return
            self.shards[name], self.left[name] = f"train-{self.next_shard:06d}", SHARD_TOKENS
            self.next_shard += 1
            self.state.shard(self.shards[name], "claimed", name, tokens=SHARD_TOKENS)
            self.state.worker(name, f"cuda:{name[-1]}", 4100 + int(name[-1]), "capturing", self.shards[name])
        tokens = min(self.left[name], int(TOKENS_PER_S * seconds * self.random.uniform(0.9, 1.05)))
        samples = max(1, tokens // MEAN_LENGTH)
        sources = {source: round(part * samples) for source, part in SOURCES.items()}
        self.state.captured(name, self.shards[name], samples, tokens, seconds, sources)
        self.left[name] -= tokens
        if self.left[name] == 0:
            self.state.shard(self.shards[name], "captured", name)
            self.state.shard(self.shards[name], "staged", name, SHARD_BYTES)
            self.queue.append(self.shards[name])
            self.shards[name] = None

    def _upload(self, seconds: float) -> None:
        self.uploading += seconds * UPLOAD_BYTES_PER_S * self.random.uniform(0.7, 1.2)
        while self.queue and self.uploading >= SHARD_BYTES:
            self.uploading -= SHARD_BYTES
            self.state.uploaded(SHARD_BYTES, 2.2)
            self.state.shard(self.queue.pop(0), "uploaded", bytes=SHARD_BYTES)
            if self.random.random() < 0.004:
                self.state.retry(
                    "upload of " + f"train-{self.next_shard - 3:06d}", "503 SlowDown: reduce your request rate"
                )
        self.uploading = min(self.uploading, SHARD_BYTES)

    def _gpu(self, index: int) -> dict:
        busy = 0.02 if self.paused else self.random.uniform(0.95, 1.0)
        return {
            "index": index, "name": "NVIDIA H200", "utilisation": busy, "memory_used_bytes": 71 << 30,
            "memory_total_bytes": 141 << 30, "power_w": 110 + 560 * busy, "power_limit_w": 700.0,
            "temperature_c": 61 + index,
        }  # fmt: skip

    def keep_running(self, stop: threading.Event) -> None:
        """In real time until `stop`."""
        while not stop.wait(0.25):
            self.step(0.25)


def hostile_state() -> RunState:
    state = RunState("extract", HOSTILE, 10, 100, 2)
    state.worker(HOSTILE, HOSTILE, 1, "capturing", HOSTILE)
    state.shard(HOSTILE, "claimed", HOSTILE)
    state.captured(HOSTILE, HOSTILE, 1, 10, 0.1, {HOSTILE: 1})
    state.retry(HOSTILE, HOSTILE)
    state.dropped(HOSTILE, 1)
    state.error(HOSTILE)
    state.gpus([], HOSTILE)
    return state


METRIC = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(?:,|$)')


def parse_metrics(text: str) -> dict[str, dict]:
    """{family: {type, series: {labels: value}}}; AssertionError for text that the Prometheus format does not allow."""
    assert text.endswith("\n") and "\n\n" not in text
    families, current = {}, None
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            current = line.split(" ", 3)[2]
            assert current not in families
            families[current] = {"type": None, "series": {}}
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name == current and kind == ("counter" if name.endswith("_total") else "gauge")
            families[name]["type"] = kind
        else:
            match = METRIC.fullmatch(line)
            assert match and match[1] == current and families[current]["type"], line
            pairs = LABEL.findall(match[2] or "")
            assert ",".join(f'{key}="{value}"' for key, value in pairs) == (match[2] or "")
            labels = tuple(
                (key, re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), value)) for key, value in pairs
            )
            assert labels not in families[current]["series"] and math.isfinite(float(match[3]))
            families[current]["series"][labels] = float(match[3])
    assert all(family["series"] for family in families.values())
    return families


def unescape(match: re.Match) -> str:
    return "\n" if match[1] == "n" else match[1]


def strict_json(state: RunState) -> dict:
    """The snapshot through json, which refuses NaN."""
    return json.loads(json.dumps(state.snapshot(), allow_nan=False))


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


def small_state(clock: Clock | None = None, **changes) -> RunState:
    """A run of 36 shards, 1,000 samples and 100,000 tokens in a store of 40."""
    settings = {"total_samples": 1000, "total_tokens": 100_000, "total_shards": 40, "done_shards": 4} | changes
    return RunState("extract", "tiny", clock=clock or Clock(), **settings)


def main(port: int) -> None:
    run, stop = SimulatedRun(), threading.Event()
    for _ in range(1800):
        run.step()
    run.state.error("upload of train-009871: timed out after 60 s, 3 of 5 tries")
    with Monitor(run.state, port=port):
        thread = threading.Thread(target=run.keep_running, args=(stop,), daemon=True)
        thread.start()
        try:
            while True:
                time.sleep(1)
        except KeyboardInterrupt:
            stop.set()
            thread.join()


if __name__ == "__main__":
    main(int(sys.argv[1]))


def run_of(steps: int) -> SimulatedRun:
    """A run after so many steps."""
    run = SimulatedRun()
    for _ in range(steps):
        run.step()
    return run
