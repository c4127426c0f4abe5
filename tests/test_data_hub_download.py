"""Downloads that break: cut, stalled, damaged, killed, without room. What is here is never fetched again.

And the mix on top of them: one commit recorded, a complete mix kept when the hub moves on or is away, exit codes.
"""

import errno
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers_data import recipe
from helpers_hub import Fault, Hub, at_hub, environment, jsonl, parquet
from hydra import compose, initialize_config_dir

from dflash_train import cli, mix
from dflash_train.data import hub_errors, hub_files, reachable
from dflash_train.data.hub import hub as client
from dflash_train.data.hub import pin
from dflash_train.util.errors import UserError
from dflash_train.util.io import read_json, read_jsonl

NAME, ROOT = "owner/set", Path(__file__).parents[1]


def rows(count: int, word: str = "question") -> list[dict]:
    return [{"id": f"{word}{i}", "prompt": f"{word} number {i * 7919}, please?"} for i in range(count)]


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_errors, "pause", lambda seconds: None)
    monkeypatch.setattr(hub_files, "CHUNK_BYTES", 10_000)
    with Hub() as hub, at_hub(hub.url, tmp_path, monkeypatch):
        yield hub


def added(server, count: int = 3000):
    """A set of two JSONL files."""
    some = rows(count)
    return server.add(NAME, {"train/0.jsonl": jsonl(some[: count // 2]), "train/1.jsonl": jsonl(some[count // 2 :])})


def config(**values):
    return pin(recipe({"mine": {"kind": "hub", "path": NAME, **values}}))


def fetch_all(data) -> list[Path]:
    source = data.sources["mine"]
    (listing,) = client().listings("mine", source)
    return [hub_files.fetch("mine", source, listing, file) for file in listing.files]


def contents(server) -> list[bytes]:
    return [body for path, body in sorted(server.sets[NAME].commits[-1].items()) if path.startswith("train")]


def make_run(tmp_path: Path, *overrides: str):
    """A typed mix run the way the command line builds it."""
    cli.register_recipes()
    with initialize_config_dir(str(cli.CONF_DIR), version_base="1.3"):
        cfg = compose("mix", cli.rewrite_argv([*overrides, f"work_dir={tmp_path / 'runs'}"]))
    return cli.build_run("mix", cfg)


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
from dflash_train.data import hub, hub_files
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


# ---------------------------------------------------------------- the stage's table and exit code


def dry_run(tmp_path: Path, capsys, *overrides: str) -> tuple[int, str]:
    """(exit code, output without the lines of its tables)."""
    client.cache_clear()
    with pytest.raises(SystemExit) as stop:
        mix.main(mine(tmp_path, "dry_run=true", *overrides))
    return stop.value.code, " ".join(re.sub("[\u2500-\u257f]", " ", capsys.readouterr().out).split())


def test_a_dry_run_shows_the_sources_and_exits_0_or_2(server, tmp_path, capsys):
    added(server, 40)
    code, text = dry_run(tmp_path, capsys, "data.sources.mine.license=MIT")
    assert code == 0 and "rows there counted by take licence gated revision to download" in text
    assert f"mine ? unknown until read all MIT no {server.sets[NAME].shas()[0][:12]} (newest) 2.6 KB" in text
    assert "nothing was done" in text
    server.sets[NAME].gated = True
    code, text = dry_run(tmp_path, capsys)
    assert code == 2 and "it is gated, and there is no token" in text
    assert f"https://huggingface.co/datasets/{NAME}" in text
    assert not (tmp_path / "runs" / "data").exists()


# ---------------------------------------------------------------- a mix of hub sources


def mine(tmp_path: Path, *overrides: str):
    return make_run(tmp_path, "data=mine", "data.sources.mine.kind=hub", f"data.sources.mine.path={NAME}",
                    "data.decontaminate=[]", *overrides)  # fmt: skip


def test_a_complete_mix_is_kept_when_the_hub_moves_on_or_is_away(server, tmp_path, monkeypatch, capsys):
    data = added(server, 60)
    folder = mix.ensure_mix(mine(tmp_path))
    written = (folder / "prompts.jsonl").read_bytes()
    manifest = read_json(folder / "manifest.json")
    assert manifest["sources"]["mine"]["revision"] == data.shas()[0]
    assert manifest["config"]["data"]["sources"]["mine"]["revision"] is None  # the recipe, as it was asked for

    data.commits.append({"train/0.jsonl": jsonl(rows(5, "newer"))})
    client.cache_clear()
    server.seen.clear()
    mix.main(mine(tmp_path))
    assert "complete and up to date" in capsys.readouterr().out and server.seen == []
    assert (folder / "prompts.jsonl").read_bytes() == written

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    client.cache_clear()
    mix.main(mine(tmp_path))
    assert "complete and up to date" in capsys.readouterr().out
    mix.main(mine(tmp_path, f"data.sources.mine.revision={data.shas()[0]}"))  # the same commit, by name
    assert "complete and up to date" in capsys.readouterr().out
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    client.cache_clear()
    mix.main(mine(tmp_path, f"data.sources.mine.revision={data.shas()[1]}"))
    assert "making" in capsys.readouterr().out
    assert len(list(read_jsonl(folder / "prompts.jsonl"))) <= 5


def test_a_mix_that_is_not_complete_is_made_of_the_newest_commit(server, tmp_path):
    data = added(server, 60)
    folder = mix.ensure_mix(mine(tmp_path))
    (folder / "prompts.jsonl").unlink()
    data.commits.append({"train/0.jsonl": jsonl(rows(9, "newer"))})
    client.cache_clear()
    mix.ensure_mix(mine(tmp_path))
    assert read_json(folder / "manifest.json")["sources"]["mine"]["revision"] == data.shas()[1]


def test_another_recipe_is_not_taken_for_the_one_that_was_made(server, tmp_path):
    added(server, 60)
    folder = mix.ensure_mix(mine(tmp_path))
    first = read_json(folder / "manifest.json")["recipe_hash"]
    mix.ensure_mix(mine(tmp_path, "data.seed=3"))
    assert read_json(folder / "manifest.json")["recipe_hash"] != first


# ---------------------------------------------------------------- a newcomer's recipe


def example() -> str:
    """The second example of data_recipes/mine.yaml, uncommented as a reader would."""
    text = (ROOT / "data_recipes" / "mine.yaml").read_text("utf-8")
    lines = text[text.index("#   name: ours") :].splitlines()
    return "".join(line.removeprefix("#   ") + "\n" for line in lines)


def test_the_example_in_mine_yaml_runs_as_written(server, tmp_path, monkeypatch):
    chat = [{"prompt_id": f"c{i}", "messages": [{"role": "user", "content": f"Tell me of thing {i * 7919}."}]}
            for i in range(2100)]  # fmt: skip
    code = [{"index": i, "lang": "python", "problem": f"Write function number {i * 7919}."} for i in range(1050)]
    card = {"configs": [{"config_name": "default", "data_files": [{"split": "train_sft", "path": "data/train_sft*"}]}]}
    server.add("HuggingFaceH4/ultrachat_200k", {"data/train_sft-0.parquet": parquet(chat)}, card)
    server.add("ise-uiuc/Magicoder-OSS-Instruct-75K", {"data-oss.jsonl": jsonl(code)})
    folder = tmp_path / "checkout"
    (folder / "my").mkdir(parents=True)
    (folder / "my" / "prompts.jsonl").write_bytes(jsonl(rows(40, "own")))
    recipes = folder / "data_recipes"
    recipes.mkdir()
    (recipes / "ours.yaml").write_text(example(), "utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cli, "RECIPES_DIR", recipes)
    run = make_run(tmp_path, "data=ours", "data.decontaminate=[]")
    manifest = read_json(mix.ensure_mix(run) / "manifest.json")
    assert manifest["recipe"] == "ours"
    taken = {name: entry["taken"] for name, entry in manifest["sources"].items()}
    assert taken["chat"] == 2000 and taken["code"] == 1000 and 30 < taken["mine"] <= 40


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("nowhere.jsonl", "files", "no such file"),
        ("owner/set", "files", "data.sources.mine.kind=hub"),
        ("empty.jsonl", "files", "empty"),
        ("nothing", "files", "no data files in it"),
        ("table.csv", "files", ".jsonl"),
        ("full.jsonl", "hub", "data.sources.mine.kind=files"),
        ("owner/none", "hub", "there is none of that name"),
        ("owner", "hub", "owner/name"),
    ],
)
def test_a_wrong_path_of_ones_own_data_is_one_clear_message(server, tmp_path, monkeypatch, path, kind, said):
    added(server, 20)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "table.csv").write_text("prompt\nWhy?\n")
    (tmp_path / "full.jsonl").write_bytes(jsonl(rows(9)))
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "data=mine", f"data.sources.mine.path={path}", f"data.sources.mine.kind={kind}",
                   "data.decontaminate=[]")  # fmt: skip
    need = reachable.source_need("mine", run.data.sources["mine"])
    assert not need.ok and said in f"{need.detail} | {need.fix}"
    with pytest.raises(UserError, match=r"data\.sources\.mine") as error:
        mix.ensure_mix(run)
    assert path in str(error.value)


def test_a_file_in_which_no_row_can_be_read_says_so(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("prompt,answer\nWhy?,Because.\n")
    run = make_run(tmp_path, "data=mine", f"data.sources.mine.path={tmp_path / 'prompts.jsonl'}",
                   "data.decontaminate=[]")  # fmt: skip
    with pytest.raises(UserError, match="none of which could be read") as error:
        mix.ensure_mix(run)
    assert "bad_json" in str(error.value) and "prompts.jsonl:1" in str(error.value)


def test_rows_of_json_that_are_no_objects_are_still_counted(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why is that?"}\n[1]\nnot json\n')
    run = make_run(tmp_path, "data=mine", f"data.sources.mine.path={tmp_path / 'prompts.jsonl'}",
                   "data.decontaminate=[]", "data.heldout_fraction=0")  # fmt: skip
    manifest = read_json(mix.ensure_mix(run) / "manifest.json")
    assert manifest["dropped"] == {"bad_json": 1, "row_not_an_object": 1}
    assert json.loads((run.mix_dir / "prompts.jsonl").read_text())["messages"][0]["content"] == "Why is that?"
