"""Faults that an extraction must survive, each as a drill with real processes and a real S3 server; a Markdown table.

    python benchmarks/drills.py                                  # all of them, about five minutes on two cores
    python benchmarks/drills.py --faults worker_killed,machine_lost   # some of them; --list names them

Starts SeaweedFS on a throwaway folder. A drill is an extraction of the tiny target on two worker processes, one sample
a shard, slowed down so that a fault meets it in the middle. After the fault, and a restart of the same command where
the host ended, the set must be whole: no shard lost, none twice, every byte that training reads as an undisturbed run
made it, and `verify=true` without a problem. Seconds are counted from when the fault began, its cause went, or the
command was typed again, as the last column says; the first and the last new marker are seen within POLL_S.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers_host import PATIENCE_S, Host, build_run, contents
from helpers_weed import BUCKET, CREDENTIALS, Weed, free_ports

from dflash_train import extract
from dflash_train.config import StoreConfig
from dflash_train.store import s3
from dflash_train.store.markers import SHARD_KEY
from dflash_train.store.shard import list_markers
from dflash_train.util.errors import UserError
from dflash_train.util.provenance import code_version

POLL_S, AWAY_S = 0.1, 8.0
HELD_OUT = 2
S3 = {"addressing": "path", "connect_timeout_s": 1, "read_timeout_s": 2, "max_attempts": 2}
HOST = {"extract__num_workers": 2, "extract__max_tokens": 256, "extract__batch_tokens": 256, "store__shard_bytes": 1,
        "store__kind": "s3", "extract__hang_s": 5.0, "extract__lease_s": 5.0, "extract__stop_s": 20.0}  # fmt: skip
"""One sample a shard; limits that are minutes in a real run are seconds here."""


@dataclass
class Row:
    """What became of one fault. first_s, all_s: seconds to the first new shard, and to all of them, after `since`."""

    fault: str
    happened: str
    shards: str
    lost: int
    duplicated: int
    orphans: str
    equal: bool
    first_s: float
    all_s: float
    since: str

    @property
    def good(self) -> bool:
        return not self.lost and not self.duplicated and self.equal

    def line(self) -> str:
        equal = "yes" if self.equal else "NO"
        return (f"| {self.fault} | {self.happened} | {self.shards} | {self.lost} | {self.duplicated} | {self.orphans} "
                f"| {equal} | {self.first_s:.1f} | {self.all_s:.1f} | {self.since} |")  # fmt: skip


HEAD = """| fault | what happened | shards complete | lost | twice | orphans before, after verify | rows equal \
| s to the first new shard | s to the whole set | counted from |
|---|---|---|---|---|---|---|---|---|---|"""


class Watch:
    """Looks at a store every POLL_S: when each marker was seen first."""

    def __init__(self, store: s3.S3Store):
        self.store, self.seen = store, {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(POLL_S):
            with suppress(UserError):  # the server is away, or refuses
                keys = [key for key, _ in self.store.list("markers/")]
                now = time.monotonic()
                for key in keys:
                    self.seen.setdefault(key, now)

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.seen) < count:
            assert time.monotonic() < deadline, f"{len(self.seen)} of {count} markers"
            time.sleep(POLL_S / 2)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


class Drill:
    """One fault in a place of its own: hosts, the store as seen from outside, and the moment that counts."""

    def __init__(self, weed: Weed, folder: Path, shards: int, pace_s: float):
        self.weed, self.folder, self.num_shards = weed, folder, shards
        self.options = HOST | {
            "samples": [shards - HELD_OUT, HELD_OUT], "pace_s": pace_s, "store__root": f"s3://{BUCKET}/{folder.name}",
            "store__options": S3 | {"endpoint_url": weed.endpoint},
        }  # fmt: skip
        self.store = self.open_store()
        self.watch, self.hosts, self.ending = Watch(self.open_store()), [], ExitStack()

    def open_store(self) -> s3.S3Store:
        run = self.options
        config = StoreConfig(kind="s3", root=run["store__root"], options=run["store__options"])
        return s3.open_store(config, "toy-tiny")

    def start(self, name: str = "host", **changes) -> Host:
        """The command, typed on a host of this name."""
        options = self.options | {"port": free_ports(1)[0]} | changes
        log = self.folder / f"{len(self.hosts)}.log"
        self.hosts.append(Host(self.folder / name, log, options))
        return self.hosts[-1]

    def started(self, share: float = 0.3, **changes) -> Host:
        """A host that has made this share of the shards."""
        host = self.start(**changes)
        self.watch.wait(int(share * self.num_shards))
        return host

    def now(self, since: str) -> None:
        """From here on it is counted how long the recovery takes."""
        self.since, self.moment, self.before = since, time.monotonic(), set(self.watch.seen)

    def again(self, **changes) -> Host:
        """The same command, typed again."""
        self.now("the restart")
        return self.start(**changes)

    def finish(self, host: Host) -> None:
        host.ends(0)
        self.watch.wait(self.num_shards)

    def row(self, fault: str, happened: str, reference: dict[str, bytes]) -> Row:
        """Judge the store, and verify it."""
        new = [seen for key, seen in self.watch.seen.items() if key not in self.before]
        markers = list_markers(self.store)
        orphans = len(self.orphans(markers))
        self.verify()
        markers = list_markers(self.store)
        samples = Counter(sample_id for marker in markers for sample_id in marker.sample_ids)
        objects = Counter(SHARD_KEY.fullmatch(key)[1] for key, _ in self.store.list("shards/"))
        twice = sum(n > 1 for n in samples.values()) + sum(n > 1 for n in objects.values())
        return Row(fault, happened, f"{len(markers)} of {self.num_shards}", self.num_shards - len(markers), twice,
                   f"{orphans}, {len(self.orphans(markers))}", contents(self.store) == reference,
                   min(new) - self.moment, max(new) - self.moment, self.since)  # fmt: skip

    def orphans(self, markers: list) -> set[str]:
        return {key for key, _ in self.store.list("shards/")} - {marker.key for marker in markers}

    def verify(self) -> None:
        run = build_run(self.folder / "host", self.options)
        run.extract.verify = True
        with open(self.folder / "verify.log", "w") as log, redirect_stdout(log):
            assert extract.main(run) == 0, f"verify=true: see {log.name}"

    def close(self) -> None:
        self.watch.close()
        for host in self.hosts:
            host.close()
        self.ending.close()


# ---------------------------------------------------------------- faults: each returns what happened


def worker_killed(drill: Drill) -> str:
    """kill -9 of a worker"""
    host = drill.started()
    name = signal_worker(host, signal.SIGKILL)
    drill.now("the fault")
    drill.finish(host)
    host.said(f"{name} died: killed by signal 9; to be done again: train-")
    return "another worker took its shards; a new one was started; exit code 0"


def worker_stopped(drill: Drill) -> str:
    """SIGSTOP of a worker"""
    host = drill.started()
    name = signal_worker(host, signal.SIGSTOP)
    drill.now("the fault")
    drill.finish(host)
    host.said(rf"{name} died: it said nothing for \d+ s \(extract.hang_s\); to be done again: ")
    return (
        f"killed after extract.hang_s={drill.options['extract__hang_s']:.0f} s of silence, its shards taken by another"
    )


def parent_killed(drill: Drill) -> str:
    """kill -9 of the parent, which uploads"""
    host = drill.started()
    killed_at = time.monotonic()
    host.process.kill()
    host.wait_gone()
    gone_s = time.monotonic() - killed_at
    again = drill.again()
    drill.finish(again)
    again.said("staging: removed .* that a killed run had left")
    return f"both workers were gone {gone_s:.1f} s later; the next run removed its staging folder and did the rest"


def machine_lost(drill: Drill) -> str:
    """a machine lost with its staging folder, beside another host"""
    lost = drill.start("lost", machine="lost", extract__num_workers=1)
    host = drill.started(machine="here", extract__num_workers=1)
    deadline = time.monotonic() + PATIENCE_S
    while not lost.workers() or lost.workers()[0]["status"] != "capturing":
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
    lost.kill()
    shutil.rmtree(drill.folder / "lost" / "staging")
    drill.now("the fault")
    drill.finish(host)
    taken = host.log.read_text().count(": taken over from ")
    host.said(r": taken over from .* \(no sign of life for \d+ s\)")
    lease = drill.options["extract__lease_s"]
    return f"the other host took {taken} claims over after the lease of {lease:.0f} s; exit code 0"


def network_frozen(drill: Drill) -> str:
    """a server that does not answer (SIGSTOP)"""
    host = drill.started()
    drill.weed.process.send_signal(signal.SIGSTOP)
    time.sleep(AWAY_S)
    drill.now("its return")
    drill.weed.process.send_signal(signal.SIGCONT)
    drill.finish(host)
    return f"{retries(host)} tries failed in {AWAY_S:.0f} s and were made again; exit code 0"


def network_lost(drill: Drill) -> str:
    """a server that is gone (kill -9, started again)"""
    host = drill.started()
    drill.weed.kill()
    time.sleep(AWAY_S)
    drill.weed.start()
    drill.now("its return")
    drill.finish(host)
    return f"{retries(host)} tries failed in {AWAY_S:.0f} s and more, and were made again; exit code 0"


def bucket_refused(drill: Drill) -> str:
    """a bucket that begins to refuse writes (403)"""
    host = drill.started()
    rights = drill.weed.folder / "identities.json"
    good = rights.read_text()
    bad = json.loads(good)
    bad["identities"][0]["actions"] = ["Read", "List"]
    drill.weed.allow(json.dumps(bad))
    drill.ending.callback(drill.weed.allow, good)
    host.ends(2)
    host.said(r"refused by the store: AccessDenied in PutObject")
    named = host.said(r"not uploaded: .*").count("-0")
    drill.weed.allow(good)
    drill.finish(drill.again())
    return f"exit code 2 naming AccessDenied and {named} shards that were not uploaded; restarted with rights"


FAULTS = [worker_killed, worker_stopped, parent_killed, machine_lost, network_frozen, network_lost, bucket_refused]


# ---------------------------------------------------------------- their parts


def signal_worker(host: Host, number: int) -> str:
    """Send it to a worker that captures; returns the worker's name."""
    deadline = time.monotonic() + PATIENCE_S
    while not (busy := [row for row in host.workers() if row["status"] == "capturing"]):
        assert time.monotonic() < deadline, "no worker captures"
        time.sleep(POLL_S)
    os.kill(busy[-1]["pid"], number)
    return busy[-1]["name"]


def retries(host: Host) -> int:
    return host.log.read_text().count(" failed (")


# ---------------------------------------------------------------- all of them


def undisturbed(weed: Weed, folder: Path, shards: int, pace_s: float) -> tuple[dict[str, bytes], float]:
    """(what training reads of a run that nothing happens to, its seconds)."""
    drill, start = Drill(weed, folder, shards, pace_s), time.monotonic()
    try:
        drill.finish(drill.start())
        return contents(drill.store), time.monotonic() - start
    finally:
        drill.close()


def run_drill(fault: Callable[[Drill], str], weed: Weed, folder: Path, shards: int, pace_s: float,
              reference: dict[str, bytes]) -> Row:  # fmt: skip
    drill = Drill(weed, folder, shards, pace_s)
    try:
        return drill.row(fault.__doc__, fault(drill), reference)
    finally:
        drill.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", default=",".join(fault.__name__ for fault in FAULTS))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--pace", type=float, default=0.25, help="seconds a shard takes a worker beside its capture")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(f"{fault.__name__:16} {fault.__doc__}" for fault in FAULTS))
        return 0
    named = {fault.__name__: fault for fault in FAULTS}
    faults = [named[name] for name in options.faults.split(",")]
    os.environ.update(CREDENTIALS)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "weed").mkdir()
        weed = Weed(folder / "weed")
        try:
            places = {"shards": options.shards, "pace_s": options.pace}
            reference, seconds = undisturbed(weed, folder / "undisturbed", **places)
            print(f"commit {code_version()}: {options.shards} shards, 2 worker processes, {options.pace} s a shard and "
                  f"more; undisturbed {seconds:.1f} s from the command to its end\n{HEAD}", flush=True)  # fmt: skip
            for fault in faults:
                rows.append(run_drill(fault, weed, folder / fault.__name__, reference=reference, **places))
                print(rows[-1].line(), flush=True)
        finally:
            weed.kill()
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
