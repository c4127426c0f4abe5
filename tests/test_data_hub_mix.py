"""The mix stage on hub sources: its table and exit code, the one commit it records, a complete mix kept when the hub
moves on or is away; and a newcomer's own recipe."""

import json
import re
from pathlib import Path

import pytest
from helpers_data import make_run
from helpers_hub import jsonl, parquet
from helpers_hub_client import NAME, ROOT, added, rows

from dflash_train import cli, mix
from dflash_train.data import reachable
from dflash_train.data.hub import files as hub_files
from dflash_train.data.hub import hub as client
from dflash_train.util.errors import UserError
from dflash_train.util.io import read_json, read_jsonl


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(hub_files, "CHUNK_BYTES", 10_000)


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
    run = make_run(tmp_path, "data=ours", "data.decontaminate=[]", "data.num_processes=1")  # workers know no patch
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
