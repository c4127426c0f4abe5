"""Hosts that share a store share its work: a shard is claimed before it is made, and a lost host's claims pass on.

    claims/<shard id>-<n>.json   who makes the shard; n counts takeovers, the highest one holds (conditional put)

A claim is stale once its host's counter (hosts.py) has not changed for lease_s. Claims only save work: that no shard is
there twice is the doing of markers, which the first one writes. A slow host that comes back after its claim was taken
over finds the marker, or puts it first; either way the set is the same.
"""

import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from dflash_train.store.base import ObjectStore, StoreUnavailable
from dflash_train.store.hosts import ALIVE, Hosts, host_key, read_record, this_process
from dflash_train.store.markers import marker_key
from dflash_train.store.slices import ShardPlan
from dflash_train.util.errors import UserError
from dflash_train.util.log import say
from dflash_train.util.provenance import canonical_json, stable_hash

BEATS_PER_LEASE = 6
MAX_BEAT_S = 60.0
"""Whoever judges by a record's age (verify, clean) must see it change, however long the lease is."""
PATIENCE_S = 600.0
"""How long a store that does not answer keeps a host from claiming before the host gives up."""
FEW = 100
"""So many markers are asked for one by one; of more, all of them are listed, a thousand a request."""
_CLAIM = re.compile(r"claims/(.+)-(\d+)\.json")
_TICK_S = 0.5


@dataclass(frozen=True)
class Claim:
    """A claim as it lies in the store."""

    shard_id: str
    generation: int
    host: str

    @property
    def key(self) -> str:
        return f"claims/{self.shard_id}-{self.generation}.json"


class _Closed(Exception):
    """The run is over while somebody still waits for a claim."""


class Claims:
    """This host's part in a run. A context manager: a heartbeat while it is open; closing gives up what was not done.

    lease_s: after so long without a sign of life a host's claims may be taken. `stop_check` is called while waiting.
    """

    def __init__(self, store: ObjectStore, lease_s: float, stop_check: Callable[[], None] = lambda: None):
        self.store, self.lease_s, self.stop_check = store, lease_s, stop_check
        self.host = f"{re.sub(r'[^A-Za-z0-9]+', '-', socket.gethostname())}-{uuid.uuid4().hex[:8]}"
        self.hosts, self.beat_s = Hosts(store, lease_s), min(lease_s / BEATS_PER_LEASE, MAX_BEAT_S)
        self._mine: dict[str, Claim] = {}
        self._others: dict[str, int] = {}  # shard id -> the highest generation that another host has claimed
        self._owners: dict[tuple[str, int], str] = {}
        self._done: set[str] = set()  # shards with a marker, as far as this host knows
        self._finished: set[str] = set()  # own shards with a marker, whose claims are still to be deleted
        self._counter, self._refreshed, self._said = 0, float("-inf"), ""
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._keep_beating, daemon=True, name="heartbeat")

    def __enter__(self) -> "Claims":
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._closing.set()
        self._thread.join(self.beat_s)
        try:
            self._drop(set(self._mine))
            self.store.delete(host_key(self.host))
        except (UserError, OSError) as error:  # must not replace the error that ended the run
            say(f"claims of {self.host} are left in the store ({error}); they lapse in {self.lease_s:.0f} s")

    def take(self, shards: list[ShardPlan], on_elsewhere: Callable[[ShardPlan], None]) -> Iterator[ShardPlan]:
        """Claim shards one after the other and yield those without a marker; a shard that others have finished goes to
        `on_elsewhere`. Waits while only other hosts' shards are left, takes stale ones over, and ends when none is.

        A host that is not alone begins at a place of its own, so that they meet late.
        """
        try:
            yield from self._take(shards, on_elsewhere)
        except _Closed:
            return

    def _take(self, shards: list[ShardPlan], on_elsewhere: Callable[[ShardPlan], None]) -> Iterator[ShardPlan]:
        start = stable_hash(self.host) % max(1, len(shards)) if self._is_joined() else 0
        left = {shard.shard_id: shard for shard in [*shards[start:], *shards[:start]]}
        while left:
            before = len(left)
            for shard in list(left.values()):
                self.stop_check()
                known = shard.shard_id in self._others or shard.shard_id in self._done
                if not known and self._claim(shard.shard_id, 1):
                    yield left.pop(shard.shard_id)
                if shard.shard_id in self._done:
                    on_elsewhere(left.pop(shard.shard_id))
            if len(left) == before:
                yield from self._wait(left)

    def done(self, shard_id: str) -> None:
        """Its marker is written. The claim goes with the next heartbeat: no upload waits for that."""
        with self._lock:
            self._finished.add(shard_id)

    # ------------------------------------------------------------ claiming

    def _claim(self, shard_id: str, generation: int) -> bool:
        """Put the claim; True when it is ours and the shard not done. Else what others have done is looked up."""
        claim = Claim(shard_id, generation, self.host)
        data = canonical_json(vars(claim)).encode()
        # A put that was tried again after its answer was lost finds our own claim.
        won = self._ask(self.store.put_bytes, claim.key, data, if_absent=True) or self._owner(claim) == self.host
        if won:
            with self._lock:
                self._mine[shard_id] = claim
            # After the claim: whoever had it before wrote the marker before giving the claim up.
            if self._ask(self.store.size, marker_key(shard_id)) is None:
                return True
            self._done.add(shard_id)
            self._drop({shard_id})
        self._refresh(self.lease_s / 2)
        return False

    def _owner(self, claim: Claim) -> str | None:
        name = (claim.shard_id, claim.generation)
        if name not in self._owners:
            host = self._ask(read_record, self.store, claim.key).get("host")
            if host is None:  # given up meanwhile
                return None
            self._owners[name] = host
        return self._owners[name]

    def _refresh(self, max_age_s: float, left: dict[str, ShardPlan] | None = None) -> None:
        """Look up claims and markers, at most once in `max_age_s`; with `left`, the markers of those shards alone."""
        if monotonic() - self._refreshed < max_age_s:
            return
        others: dict[str, int] = {}
        for key, _ in self._ask(self.store.list, "claims/"):
            match = _CLAIM.fullmatch(key)
            if match and match[1] not in self._mine:
                others[match[1]] = max(others.get(match[1], 0), int(match[2]))
        self._others = others
        self._owners.clear()  # a generation that was given up may be another's by now
        # The markers after the claims, as in _claim.
        if left is not None and len(left) <= FEW:
            self._done |= {
                shard_id for shard_id in left if self._ask(self.store.size, marker_key(shard_id)) is not None
            }
        else:
            self._done |= {Path(key).stem for key, _ in self._ask(self.store.list, "markers/")}
        self._refreshed = monotonic()

    def _is_joined(self) -> bool:
        return any(key != host_key(self.host) for key, _ in self._ask(self.store.list, "hosts/"))

    def _ask(self, call: Callable, *arguments, **options):
        """A request, made again while the store is away, but not for ever."""
        deadline = monotonic() + PATIENCE_S
        while True:
            try:
                return call(*arguments, **options)
            except StoreUnavailable:
                if monotonic() > deadline:
                    raise
                self._sleep(self.beat_s)

    # ------------------------------------------------------------ waiting and taking over

    def _wait(self, left: dict[str, ShardPlan]) -> Iterator[ShardPlan]:
        """Everything left is claimed by others: take over what is stale, then wait a moment."""
        claims = [Claim(shard_id, n, "") for shard_id, n in self._others.items() if shard_id in left]
        owners = {claim.shard_id: owner for claim in claims if (owner := self._owner(claim))}
        looks = {owner: self._ask(self.hosts.look, owner) for owner in set(owners.values())}
        waiting = sorted(owner for owner, look in looks.items() if look == ALIVE)
        self._say_once(f"nothing left to claim: waiting for {', '.join(waiting)}" if waiting else "")
        for shard_id, owner in owners.items():
            if looks[owner] != ALIVE and self._claim(shard_id, self._others[shard_id] + 1):
                say(f"{shard_id}: taken over from {owner} ({looks[owner]})")
                yield left.pop(shard_id)
        if waiting or not owners:
            self._sleep(self.beat_s)
        self._refresh(0, left)

    def _say_once(self, line: str) -> None:
        if line and line != self._said:
            say(line)
        self._said = line

    def _sleep(self, seconds: float) -> None:
        until = monotonic() + seconds
        while (now := monotonic()) < until:
            self.stop_check()
            if self._closing.wait(min(_TICK_S, until - now)):
                raise _Closed

    # ------------------------------------------------------------ our own sign of life

    def _keep_beating(self) -> None:
        said = False
        while not self._closing.wait(self.beat_s):
            try:
                self._beat()
                with self._lock:
                    finished, self._finished = self._finished, set()
                self._drop(finished)
                said = False
            except UserError as error:  # the uploads find out whether it stays away
                if not said:
                    say(f"heartbeat: {error.field}: {error.got}")
                said = True

    def _beat(self) -> None:
        self._counter += 1
        record = {"counter": self._counter, **this_process()}
        self.store.put_bytes(host_key(self.host), canonical_json(record).encode())

    def _drop(self, shard_ids: set[str]) -> None:
        """Delete own claims, and the older ones that they took over."""
        with self._lock:
            claims = [self._mine[shard_id] for shard_id in shard_ids & self._mine.keys()]
        for claim in claims:
            for generation in range(1, claim.generation + 1):
                self.store.delete(Claim(claim.shard_id, generation, self.host).key)
            with self._lock:
                self._mine.pop(claim.shard_id, None)


def sweep_claims(store: ObjectStore) -> int:
    """Remove every claim and host record; returns how many. For a set that is complete: a host that still lives writes
    its record anew, and removes it when it ends."""
    keys = [key for prefix in ("claims/", "hosts/") for key, _ in store.list(prefix)]
    store.delete_many(keys)
    return len(keys)
