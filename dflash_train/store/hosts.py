"""Signs of life of the hosts that fill one store: a counter each, watched by the clock of whoever watches.

hosts/<id>.json   {"counter": 17, ...}, rewritten by its host every few seconds
"""

import json
import os
import socket
import uuid
from functools import cache
from pathlib import Path
from time import monotonic

import psutil

from dflash_train.store.base import ObjectStore

ALIVE = "alive"
CLOCK_S = 3.0
"""A process's start is told by the wall clock, which is set now and then."""


class Hosts:
    """The other hosts' signs of life, as this one sees them: no two clocks are ever compared."""

    def __init__(self, store: ObjectStore, lease_s: float):
        self.store, self.lease_s = store, lease_s
        self._seen: dict[str, tuple[object, float]] = {}  # host -> (its last counter, when that was first seen)

    def look(self, host: str) -> str:
        """ALIVE, or why it is not (any more). A record that is absent counts as one that does not change."""
        record = read_record(self.store, host_key(host))
        counter, now = record.get("counter"), monotonic()
        if host not in self._seen or self._seen[host][0] != counter:
            self._seen[host] = (counter, now)
        if process_is_gone(record):
            return "its process has ended"
        silent = now - self._seen[host][1]
        return ALIVE if silent < self.lease_s else f"no sign of life for {silent:.0f} s"


def host_key(host: str) -> str:
    return f"hosts/{host}.json"


def read_record(store: ObjectStore, key: str) -> dict:
    """A small JSON object of the store; empty when it is gone or is none."""
    try:
        record = json.loads(store.get_bytes(key))
    except (KeyError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def this_process() -> dict:
    """Names this process on this boot of this machine, and the space its number is from (containers have their own)."""
    return {"machine": _machine(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def process_is_gone(record: dict) -> bool:
    """The record's process ran on this very machine and has ended: no lease need run out for it."""
    if record.get("machine") != _machine() or not {"pid", "started"} <= record.keys():
        return False
    try:
        process = psutil.Process(record["pid"])
        return abs(process.create_time() - record["started"]) > CLOCK_S or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@cache
def _machine() -> str:
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists() and space.exists():
        return f"{boot.read_text().strip()}/{space.stat().st_ino}"
    return f"{socket.gethostname()}/{uuid.getnode():x}"
