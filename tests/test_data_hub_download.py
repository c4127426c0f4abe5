"""Downloads that break: cut, stalled, damaged, killed, without room. What is here is never fetched again."""

import errno
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers_data import recipe
from helpers_hub import Fault, jsonl, parquet
from helpers_hub_client import NAME, ROOT, added, environment, rows

from dflash_train.data.hub import files as hub_files
from dflash_train.data.hub import hub as client
from dflash_train.data.hub import pin
from dflash_train.util.errors import UserError


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(hub_files, "CHUNK_BYTES", 10_000)


def config(**values):
    return pin(recipe({"mine": {"kind": "hub", "path": NAME, **values}}))


def fetch_all(data) -> list[Path]:
    source = data.sources["mine"]
    (listing,) = client().listings("mine", source)
    return [hub_files.fetch("mine", source, listing, file) for file in listing.files]


def contents(server) -> list[bytes]:
    return [body for path, body in sorted(server.sets[NAME].commits[-1].items()) if path.startswith("train")]


# ---------------------------------------------------------------- one file


@pytest.mark.parametrize(
    "fault",
    [
        Fault(r"train.*\[10000-", cut=4000, times=2),
        Fault(r"train.*\[20000-", cut=0),
        Fault(r"train.*\[10000-", stall_s=3),
        Fault(r"train.*\[10000-", status=503, times=4),
    ],
    ids=["cut", "closed", "stalled", "busy"],
)
def test_a_broken_line_costs_the_piece_under_way_alone(server, monkeypatch, fault):
    added(server)
    if fault.stall_s:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", fault.stall_s / 3)
    server.faults = [fault]
    assert [path.read_bytes() for path in fetch_all(config())] == contents(server)
    assert fault.times == 0
    assert server.asked(r"train/0.*\[0-9999\]") == 1  # what had come before the break


def test_a_download_goes_on_where_another_run_stopped(server):
    added(server)
    data = config()
    server.faults = [Fault(r"train/1.*\[30000-", status=404, times=99)]
    with pytest.raises(UserError):
        fetch_all(data)
    sent = server.file_bytes()
    server.faults.clear()
    assert [path.read_bytes() for path in fetch_all(data)] == contents(server)
    assert server.file_bytes() == sum(map(len, contents(server))) > sent > 30_000
    assert not list(Path(os.environ["DFLASH_CACHE"]).rglob("*.part"))


def test_damaged_bytes_are_fetched_once_more_and_then_refused(server, capsys):
    added(server)
    server.faults = [Fault(r"train/0.*\[10000-", lie=True)]
    assert [path.read_bytes() for path in fetch_all(config())] == contents(server)
    assert "arrived damaged" in capsys.readouterr().out
    server.add("owner/other", {"train.parquet": parquet(rows(900, "other"))})  # a large file: sha256, not git's digest
    server.faults = [Fault(r"other.*\[0-", lie=True, times=99)]
    with pytest.raises(UserError, match="twice other bytes than the hub announced"):
        fetch_all(pin(recipe({"mine": {"kind": "hub", "path": "owner/other"}})))
    assert not list(Path(os.environ["DFLASH_CACHE"]).rglob("other*/*.jsonl"))


def test_a_truncated_copy_in_the_cache_is_fetched_again(server):
    added(server)
    data = config()
    first, _ = fetch_all(data)
    first.write_bytes(first.read_bytes()[:-1])
    assert [path.read_bytes() for path in fetch_all(data)] == contents(server)


def test_a_full_disk_names_the_cache_and_its_variable(server, monkeypatch):
    added(server)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub_files, "_append", full)
    with pytest.raises(UserError, match="the disk is full") as error:
        fetch_all(config())
    assert "DFLASH_CACHE" in str(error.value)


def test_files_that_the_library_has_already_are_taken_from_it(server):
    import huggingface_hub

    data = added(server)
    for path in data.commits[0]:
        huggingface_hub.hf_hub_download(NAME, path, repo_type="dataset", revision=data.shas()[0])
    sent = server.file_bytes()
    assert [path.read_bytes() for path in fetch_all(config())] == contents(server)
    assert server.file_bytes() == sent


def test_no_name_out_of_a_data_set_becomes_a_path(server, tmp_path):
    server.add(NAME, {"train-..%2f..%2fescape.jsonl": jsonl(rows(3)), "a b/train 'x'.jsonl": jsonl(rows(2, "b"))})
    paths = fetch_all(config())
    assert {path.parent.name for path in paths} == {"owner--set"}
    assert all(re.fullmatch(r"git-[0-9a-f]{40}\.jsonl", path.name) for path in paths)


def test_several_files_are_fetched_at_once_and_every_byte_once(server, capsys):
    names = {f"train-{i}.jsonl": jsonl(rows(1500, f"w{i}")) for i in range(6)}
    server.add(NAME, names)
    data = config()
    hub_files.download({"one": data.sources["mine"], "same": data.sources["mine"]})
    out = capsys.readouterr().out
    assert "in 6 file(s)" in out and server.file_bytes() == sum(map(len, names.values()))
    hub_files.download(data.sources)
    assert capsys.readouterr().out == "" and server.file_bytes() == sum(map(len, names.values()))


def test_processes_that_want_one_file_fetch_it_once(server):
    added(server)
    data = config()
    client().listings("mine", data.sources["mine"])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: fetch_all(data), range(4)))
    assert found[0] == found[3] and server.file_bytes() == sum(map(len, contents(server)))


def test_one_failed_file_stops_the_others_and_says_which_source(server):
    server.add(NAME, {f"train-{i}.jsonl": jsonl(rows(900, f"w{i}")) for i in range(12)})
    server.faults = [Fault(r"train-3", status=404, times=99)]
    with pytest.raises(UserError, match=r"data\.sources\.mine"):
        hub_files.download(config().sources)
    assert server.file_bytes() < 0.7 * sum(map(len, contents(server)))


# ---------------------------------------------------------------- killed

CHILD = f"""
from dflash_train.config import DataConfig, SourceConfig
from dflash_train.data import hub
from dflash_train.data.hub import files as hub_files
hub_files.CHUNK_BYTES, hub_files.DOWNLOADS_AT_ONCE = 10_000, 1
hub_files.download(hub.pin(DataConfig("mine", sources={{"mine": SourceConfig(kind="hub", path="{NAME}")}})).sources)
"""


def test_a_run_killed_in_the_middle_of_a_file_fetches_only_the_rest(server, tmp_path, capsys):
    added(server)
    server.faults = [Fault(r"train/1.*\[40000-", stall_s=120)]
    env = {**environment(server.url, tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
           "HF_HUB_DOWNLOAD_TIMEOUT": "120"}  # fmt: skip
    child = subprocess.Popen([sys.executable, "-c", CHILD], env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while server.faults[0].times and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    child.kill()
    child.wait()
    assert server.faults[0].times == 0, "it never came to the second file"
    assert server.file_bytes() > 40_000
    assert [path.read_bytes() for path in fetch_all(config())] == contents(server)
    assert "train/1.jsonl goes on at 40.0 KB" in capsys.readouterr().out
    assert server.file_bytes() == sum(map(len, contents(server)))
