"""Claims: hosts that share a store share its shards, by the clock of whoever watches; nothing is made twice or lost."""

import threading

import pytest

from dflash_train.store import claims as claims_module
from dflash_train.store import hosts
from dflash_train.store.base import StoreUnavailable
from dflash_train.store.claims import Claim, Claims, sweep_claims
from dflash_train.store.local import LocalStore
from dflash_train.store.slices import ShardPlan

SHARDS = [ShardPlan(f"train-{i:05d}", (f"s{i}",), (10,)) for i in range(6)]


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture(autouse=True)
def other_machines(monkeypatch):
    """Hosts in one test process stand for several machines: no process is known to be gone."""
    monkeypatch.setattr(hosts, "process_is_gone", lambda record: False)


def mark(store, shard_id: str) -> None:
    store.put_bytes(f"markers/{shard_id}.json", b"{}", if_absent=True)


def finish(store, claims: Claims, shards=SHARDS) -> list[str]:
    """Take and finish all there is; the ids taken."""
    taken = []
    for shard in claims.take(shards, lambda shard: None):
        taken.append(shard.shard_id)
        mark(store, shard.shard_id)
        claims.done(shard.shard_id)
    return taken


def stand_still(claims: Claims) -> Claims:
    """A host whose heart does not beat."""
    claims._keep_beating = lambda: None
    claims._thread = threading.Thread(target=claims._keep_beating)
    return claims


def test_every_shard_is_taken_by_one_of_two_hosts_that_work_at_once(store):
    taken: dict[str, list[str]] = {}

    def work(name: str) -> None:
        with Claims(store, lease_s=0.3) as claims:
            both.wait()
            taken[name] = finish(store, claims)

    both = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken["a"] + taken["b"]) == [shard.shard_id for shard in SHARDS]


def test_a_host_gives_up_its_claims_and_its_record_when_it_ends(store):
    with Claims(store, lease_s=60) as claims:
        next(claims.take(SHARDS, lambda shard: None))
        assert store.list("claims/") and store.list("hosts/")
    assert not store.list("claims/") and not store.list("hosts/")
    with Claims(store, lease_s=60) as other:
        assert len(finish(store, other)) == 6


def test_shards_that_have_a_marker_go_to_elsewhere_and_are_not_claimed(store):
    mark(store, "train-00002")
    elsewhere = []
    with Claims(store, lease_s=60) as claims:
        taken = [shard.shard_id for shard in claims.take(SHARDS[:4], elsewhere.append)]
        held = [key for key, _ in store.list("claims/")]
    assert taken == ["train-00000", "train-00001", "train-00003"] and elsewhere == [SHARDS[2]]
    assert held == [f"claims/{shard_id}-1.json" for shard_id in taken]


def test_a_claim_is_stale_when_its_hosts_counter_stands_still_for_the_lease_by_the_observers_clock(store, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(hosts, "monotonic", lambda: now[0])
    watched, watcher = stand_still(Claims(store, lease_s=60)), hosts.Hosts(store, lease_s=60)
    with watched:
        assert watcher.look(watched.host) == hosts.ALIVE  # however old the record is, the watching begins now
        now[0] += 59
        assert watcher.look(watched.host) == hosts.ALIVE
        watched._beat()
        now[0] += 59
        assert watcher.look(watched.host) == hosts.ALIVE
        now[0] += 61
        assert watcher.look(watched.host) == "no sign of life for 61 s"
        watched._beat()
        assert watcher.look(watched.host) == hosts.ALIVE


def test_a_host_without_a_record_is_given_the_lease_too(store, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(hosts, "monotonic", lambda: now[0])
    watcher = hosts.Hosts(store, lease_s=60)
    assert watcher.look("gone") == hosts.ALIVE
    now[0] += 61
    assert watcher.look("gone") != hosts.ALIVE


def test_a_stale_claim_is_taken_over_once_by_the_next_generation_and_the_slow_owner_harms_nothing(store, capsys):
    """Trap 35: the slow owner comes back, writes no second marker, and removes no claim but its own."""
    slow = stand_still(Claims(store, lease_s=0.2))
    with slow, Claims(store, lease_s=0.2) as quick:
        shard = next(slow.take(SHARDS, lambda shard: None))
        taken = []
        for other in quick.take(SHARDS, lambda shard: None):
            taken.append(other.shard_id)
            if other != shard:
                mark(store, other.shard_id)
                continue
            assert {key for key, _ in store.list(f"claims/{shard.shard_id}")} == {
                f"claims/{shard.shard_id}-1.json", f"claims/{shard.shard_id}-2.json"}  # fmt: skip
            slow._drop({shard.shard_id})  # it comes back and gives up
            assert store.list(f"claims/{shard.shard_id}")[0][0].endswith("-2.json")
            mark(store, other.shard_id)
        assert sorted(taken) == [shard.shard_id for shard in SHARDS]
    out = capsys.readouterr().out
    assert f"waiting for {slow.host}" in out and f"{shard.shard_id}: taken over from {slow.host}" in out


def test_of_two_hosts_that_see_the_same_stale_claim_one_takes_it(store):
    lost = Claim("train-00000", 1, "lost")
    store.put_bytes(lost.key, b'{"host":"lost"}')
    with Claims(store, lease_s=60) as one, Claims(store, lease_s=60) as two:
        assert [one._claim("train-00000", 2), two._claim("train-00000", 2)] == [True, False]


def test_a_host_waits_for_the_others_and_ends_when_their_markers_are_there(store, capsys):
    with Claims(store, lease_s=0.6) as busy, Claims(store, lease_s=0.6) as idle:
        theirs = next(busy.take(SHARDS[:1], lambda shard: None))
        elsewhere = []
        threading.Timer(1.5, mark, (store, theirs.shard_id)).start()  # longer than the lease: it is alive
        assert list(idle.take(SHARDS[:1], elsewhere.append)) == [] and elsewhere == [theirs]
    assert capsys.readouterr().out.count(f"waiting for {busy.host}") == 1


def test_a_put_whose_answer_was_lost_finds_its_own_claim(store, monkeypatch):
    """The client tries again by itself and is told that somebody was first: it was us."""
    put = store.put_bytes
    monkeypatch.setattr(store, "put_bytes", lambda key, data, if_absent=False: put(key, data) and not if_absent)
    with Claims(store, lease_s=60) as claims:
        assert claims._claim("train-00000", 1)


def test_a_store_that_is_away_for_a_while_costs_time_and_nothing_else(store, monkeypatch):
    put, away = store.put_bytes, [4]

    def flaky(key, data, if_absent=False):
        if key.startswith("claims/") and away[0]:
            away[0] -= 1
            raise StoreUnavailable("store", got="HTTP 503", want="success")
        return put(key, data, if_absent=if_absent)

    monkeypatch.setattr(store, "put_bytes", flaky)
    with Claims(store, lease_s=0.06) as claims:
        assert len(finish(store, claims)) == 6
    monkeypatch.setattr(claims_module, "PATIENCE_S", 0.0)
    away[0] = 100
    with Claims(store, lease_s=0.06) as claims, pytest.raises(StoreUnavailable):
        finish(store, claims, [ShardPlan("train-00009", ("s9",), (1,))])


def test_requests_a_shard_are_few(store, monkeypatch):
    """A claim, a look for the marker, the claim's removal; nothing is listed while nobody is met."""
    calls = []
    for name in ("put_bytes", "size", "get_bytes", "list", "delete"):
        call = getattr(store, name)
        monkeypatch.setattr(
            store, name, lambda *a, _call=call, _name=name, **k: (calls.append(_name), _call(*a, **k))[1]
        )
    with Claims(store, lease_s=60) as claims:
        calls.clear()
        for shard in claims.take(SHARDS, lambda shard: None):
            claims.done(shard.shard_id)
    assert calls.count("put_bytes") == calls.count("size") == 6 and calls.count("list") == 1
    assert calls.count("delete") == 7 and calls.count("get_bytes") == 0


def test_a_stop_that_is_asked_for_ends_the_waiting(store):
    class Stop(Exception):
        pass

    def stop():
        raise Stop

    with Claims(store, lease_s=60) as busy, Claims(store, lease_s=60) as idle:
        next(busy.take(SHARDS[:1], lambda shard: None))
        idle.stop_check = stop
        with pytest.raises(Stop):
            list(idle.take(SHARDS[:1], lambda shard: None))


def test_a_process_of_this_machine_that_has_ended_needs_no_lease(monkeypatch):
    monkeypatch.undo()
    me = hosts.this_process()
    assert not hosts.process_is_gone(me)
    assert hosts.process_is_gone(me | {"started": me["started"] - 5})  # its number was given to us since
    assert hosts.process_is_gone(me | {"pid": 2**22 + 1})
    assert not hosts.process_is_gone(me | {"machine": "another", "pid": 2**22 + 1})
    assert not hosts.process_is_gone({})


def test_sweeping_removes_claims_and_records_and_nothing_else(store):
    for key in ("claims/train-00000-1.json", "hosts/x.json", "markers/train-00000.json", "manifest.json"):
        store.put_bytes(key, b"{}")
    assert sweep_claims(store) == 2
    assert [key for key, _ in store.list()] == ["manifest.json", "markers/train-00000.json"]


def test_a_record_without_a_process_and_a_clock_that_was_set_end_no_host(monkeypatch):
    monkeypatch.undo()
    me = hosts.this_process()
    assert not hosts.process_is_gone({"machine": me["machine"]})
    assert not hosts.process_is_gone(me | {"started": me["started"] + 1})


def test_a_store_that_refuses_at_the_end_does_not_hide_the_runs_own_error(store, monkeypatch):
    def refuse(key):
        raise PermissionError(key)

    with pytest.raises(ZeroDivisionError), Claims(store, lease_s=60):
        monkeypatch.setattr(store, "delete", refuse)
        raise ZeroDivisionError


def test_a_long_lease_beats_often_enough_for_whoever_judges_by_age(store):
    assert Claims(store, lease_s=7200).beat_s == 60
