"""The mix stage as a user meets it: Hydra spellings, reuse, manifest, refusals, nothing half written."""

import errno
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_data import make_run, prompts, write_rows
from helpers_hub import Hub, jsonl
from helpers_hub_client import at_hub

from dflash_train import cli, mix
from dflash_train.data.recipe import read_source
from dflash_train.util import log
from dflash_train.util.errors import UserError
from dflash_train.util.io import read_json, read_jsonl, sha256_file

ROOT = Path(__file__).parents[1]


def mine(tmp_path: Path, *overrides: str, count: int = 60):
    path = tmp_path / "mine.jsonl"
    if not path.exists():
        write_rows(path, [*prompts(count, "apple"), {"prompt": ""}, {"prompt": "apple number 1,  PLEASE?"}])
    return make_run(
        tmp_path,
        "data=mine",
        f"data.sources.mine.path={path}",
        "data.decontaminate=[]",
        "data.heldout_fraction=0.1",
        *overrides,
    )


# ---------------------------------------------------------------- recipes and their spelling


def test_the_recipes_ask_for_the_documented_numbers(tmp_path):
    demo, big = make_run(tmp_path, "data=demo"), make_run(tmp_path, "+data=mix914k")
    assert sum(source.take for source in demo.data.sources.values()) == 4096
    assert sum(source.take for source in big.data.sources.values()) == 913_786
    assert len(big.data.sources) == 15 and list(big.data.sources)[:2] == ["nemo_math", "nemo_stem"]
    for run in (demo, big):
        assert all(source.license != "unknown" for source in run.data.sources.values())


def test_mix914k_is_what_its_table_says(tmp_path):
    data = make_run(tmp_path, "+data=mix914k").data
    by_bucket = {}
    for source in data.sources.values():
        by_bucket[source.bucket] = by_bucket.get(source.bucket, 0) + source.take
    assert by_bucket == {"math": 150_000, "stem": 90_000, "code": 328_000, "chat": 270_000, "tools": 65_000,
                         "agentic": 10_786}  # fmt: skip
    assert data.total == sum(by_bucket.values()) and set(data.thinking_share) == set(by_bucket)
    assert data.near_duplicates.buckets == ["code", "math"] and data.sources["openorca"].caps == {"t0": 0.5, "niv": 0.5}
    order = list(data.sources)
    assert order.index("hermes_fc") < order.index("glaive_fc"), "of rows that both have, Hermes' are the better ones"
    assert {name for name, source in data.sources.items() if source.options.get("gated")} == {
        "nemo_math", "nemo_stem", "nemo_code", "nemo_chat", "xlam"
    }  # fmt: skip
    assert "heldout" in data.decontaminate and data.reserve_fraction == 0.05


def test_sources_are_added_and_removed_by_name(tmp_path):
    run = make_run(tmp_path, "data=demo", "+data.sources.mine.path=x.jsonl", "~data.sources.evals")
    assert list(run.data.sources) == ["stdlib", "pydoc", "bfcl", "chatterbot", "mine"]
    assert (run.data.sources["mine"].kind, run.data.sources["mine"].form, run.data.sources["mine"].take) == (
        "files",
        "auto",
        None,
    )
    assert "openorca" not in make_run(tmp_path, "+data=mix914k", "~data.sources.openorca").data.sources


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("+data.sources.evals.options.per_foldr=3", "data.sources.evals.options"),
        ("data.sources.evals.kind=eval", "data.sources.evals.kind"),
        ("+data.sources.evals.tke=3", "data.sources.evals.tke"),
    ],
)
def test_a_wrong_key_or_kind_is_named_in_full(tmp_path, override, named):
    with pytest.raises(UserError) as error:
        make_run(tmp_path, "data=demo", override)
    assert named in str(error.value)


def test_a_recipe_without_its_path_names_the_key(tmp_path):
    with pytest.raises(UserError, match=r"data\.sources\.mine\.path"):
        make_run(tmp_path, "data=mine")


def test_mix914k_loads_everywhere_and_is_refused_by_source_before_any_download(tmp_path, monkeypatch):
    for stage in cli.STAGES:
        assert (
            make_run(tmp_path, *(["--method", "ddtree"] if stage == "eval" else []), stage=stage).data.name == "mix914k"
        )
    with Hub() as hub, at_hub(hub.url, tmp_path, monkeypatch):
        messages = {"messages": [{"role": "user", "content": "Hello?"}]}
        hub.add("nvidia/Nemotron-Post-Training-Dataset-v2", {"math.jsonl": jsonl([messages])}, gated=True)
        configs = [{"config_name": "default", "data_files": [{"split": "train_sft", "path": "*.jsonl"}]}]
        hub.add("HuggingFaceH4/ultrachat_200k", {"train_sft.jsonl": jsonl([messages])}, {"configs": configs})
        needs = {need.name.rpartition(".")[2]: need for need in mix.needs(make_run(tmp_path))}
        assert not needs["openorca"].ok and "there is none of that name" in needs["openorca"].detail
        assert not needs["nemo_math"].ok and "huggingface.co/datasets/nvidia/Nemotron" in needs["nemo_math"].fix
        assert needs["ultrachat"].ok
        with pytest.raises(UserError, match=r"data\.sources\.nemo_math"):
            mix.ensure_mix(make_run(tmp_path))
    assert not (tmp_path / "runs" / "data").exists()


# ---------------------------------------------------------------- what it writes


def test_files_and_manifest_agree(tmp_path):
    run = mine(tmp_path)
    folder = mix.ensure_mix(run)
    train, heldout = (list(read_jsonl(folder / name)) for name in ("prompts.jsonl", "heldout.jsonl"))
    manifest = read_json(folder / "manifest.json")
    assert folder == run.mix_dir and sorted(p.name for p in folder.iterdir()) == [
        "card.html",
        "card.md",
        "heldout.jsonl",
        "manifest.json",
        "prompts.jsonl",
    ]
    assert manifest["rows"] == {"train": len(train), "heldout": len(heldout)} and len(train) > 40 and heldout
    entry = manifest["sources"]["mine"]
    assert (entry["read"], entry["dropped"], entry["filtered"]) == (62, {"empty_user": 1}, {"duplicate": 1})
    assert manifest["dropped"] == {"duplicate": 1, "empty_user": 1} and manifest["duplicates"] == {"mine": {"mine": 1}}
    assert entry["written"] == manifest["rows"] and manifest["thinking"]["train"] == {"chat/off": len(train)}
    assert manifest["files"]["prompts.jsonl"]["sha256"] == sha256_file(folder / "prompts.jsonl")
    assert manifest["seed"] == 0 and manifest["code_version"] and manifest["recipe_hash"]
    assert manifest["heldout_ids"] == sorted(row["id"] for row in heldout)


def test_a_reserve_is_written_where_asked_for_and_goes_where_not(tmp_path):
    with_reserve = mine(tmp_path, "data.reserve_fraction=0.1", "data.sources.mine.take=30")
    folder = mix.ensure_mix(with_reserve)
    rows = list(read_jsonl(folder / "reserve.jsonl"))
    manifest = read_json(folder / "manifest.json")
    assert len(rows) == manifest["rows"]["reserve"] == manifest["sources"]["mine"]["reserve"] == 3
    assert manifest["files"]["reserve.jsonl"]["sha256"] == sha256_file(folder / "reserve.jsonl")
    mix.ensure_mix(mine(tmp_path, "data.sources.mine.take=30"))
    assert not (folder / "reserve.jsonl").exists()


def test_the_number_of_processes_is_no_part_of_a_recipe(tmp_path, monkeypatch):
    mix.ensure_mix(mine(tmp_path))
    monkeypatch.setattr(mix, "build_mix", None)
    mix.ensure_mix(mine(tmp_path, "data.num_processes=1"))


def test_a_complete_mix_is_reused_until_recipe_limit_or_input_change(tmp_path, monkeypatch):
    reads = []
    monkeypatch.setattr(
        "dflash_train.data.mixing.sift.read_source", lambda *args: reads.append(1) or read_source(*args)
    )
    mix.ensure_mix(mine(tmp_path))
    mix.ensure_mix(mine(tmp_path, "data.answers.batch_size=3"))  # regenerate's business
    assert len(reads) == 1
    mix.ensure_mix(mine(tmp_path, "data.seed=1"))
    mix.ensure_mix(mine(tmp_path, "data.seed=1", "limit=5"))  # a folder of its own
    mix.ensure_mix(mine(tmp_path, "data.seed=1"))
    assert len(reads) == 3
    (tmp_path / "mine.jsonl").write_text((tmp_path / "mine.jsonl").read_text() + '{"prompt": "one more?"}\n')
    folder = mix.ensure_mix(mine(tmp_path, "data.seed=1"))
    assert len(reads) == 4 and read_json(folder / "manifest.json")["sources"]["mine"]["read"] == 63
    with open(folder / "prompts.jsonl", "r+b") as f:
        f.truncate(100)
    mix.ensure_mix(mine(tmp_path, "data.seed=1"))
    assert len(reads) == 5 and (folder / "prompts.jsonl").stat().st_size > 100


def test_limit_takes_the_head_of_both_files(tmp_path):
    full, some = mix.ensure_mix(mine(tmp_path)), mix.ensure_mix(mine(tmp_path, "limit=2"))
    assert some != full
    for name in ("prompts.jsonl", "heldout.jsonl"):
        assert list(read_jsonl(some / name)) == list(read_jsonl(full / name))[:2]


def test_a_mix_that_fails_leaves_no_manifest_and_no_spool(tmp_path):
    folder = mix.ensure_mix(mine(tmp_path))
    with pytest.raises(UserError, match=r"mine\.jsonl:61"):
        mix.ensure_mix(mine(tmp_path, "data.strict=true"))
    assert not (folder / "manifest.json").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_a_full_disk_is_one_message_and_leftovers_of_killed_runs_are_swept(tmp_path, monkeypatch):
    folder = mine(tmp_path).mix_dir
    here = socket.gethostname()
    (folder / f".mixing-x@{here}").mkdir(parents=True)
    elsewhere = [f".mixing-x@another-{here}", f".mixing-x@{here}-2"]  # their runs may go on: we see no lock of theirs
    for name in elsewhere:
        (folder / name).mkdir()

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(mix, "write_jsonl", full)
        with pytest.raises(UserError, match="the disk is full"):
            mix.ensure_mix(mine(tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == sorted(elsewhere)
    mix.ensure_mix(mine(tmp_path))
    assert (folder / "manifest.json").exists()


def overrides(fix: str) -> list[str]:
    """The first of the ways that a message names, as a shell would pass it on."""
    return shlex.split(fix.partition(", or ")[0].removesuffix(" leaves it out"))


def test_the_overrides_that_a_short_mix_suggests_run(tmp_path):
    write_rows(tmp_path / "more.jsonl", prompts(30, "pear"))
    write_rows(tmp_path / "none.jsonl", [{"prompt": ""}])
    asked = ["data.total=140", "data.sources.mine.take=70", "+data.sources.more.take=50", "+data.sources.none.take=20",
             f"+data.sources.more.path={tmp_path / 'more.jsonl'}",
             f"+data.sources.none.path={tmp_path / 'none.jsonl'}"]  # fmt: skip
    with pytest.raises(UserError, match=r"data\.sources") as error:
        mix.ensure_mix(mine(tmp_path, *asked))
    kept = [word for word in asked if ".none." not in word]  # what is removed is not asked for in the same breath
    suggested = [word for word in overrides(error.value.fix) if word != "~data.sources.none"]
    assert len(suggested) == len(overrides(error.value.fix)) - 1 == 3
    folder = mix.ensure_mix(mine(tmp_path, *kept, *(f"++{word}" for word in suggested)))
    rows = read_json(folder / "manifest.json")["rows"]["train"]
    assert 70 < rows < 90 and f"data.total={rows}" in suggested


def test_a_short_source_with_caps_is_not_told_a_take_that_would_be_short_again(tmp_path):
    rows = [{"id": f"t0.{i}", "system_prompt": "Hm.", "question": f"Question {i * 7919}?"} for i in range(40)]
    path = write_rows(tmp_path / "o.jsonl", rows)
    asked = [f"data.sources.mine.path={path}", "data.sources.mine.form=openorca", "data.sources.mine.take=30",
             "+data.sources.mine.caps={t0: 0.5}"]  # fmt: skip
    with pytest.raises(UserError, match="has 15 rows") as error:
        mix.ensure_mix(make_run(tmp_path, "data=mine", "data.decontaminate=[]", *asked))
    assert error.value.fix == "data.allow_short=true"


def test_the_override_without_an_evaluation_set_runs(tmp_path):
    items = write_rows(tmp_path / "my items.jsonl", [{"turns": ["How many apples are in a basket of nine apples?"]}])
    named = f"data.decontaminate=['file:{items}', 'file:{tmp_path}/nowhere.jsonl', heldout]"
    run = mine(tmp_path, named)
    (need,) = (need for need in mix.needs(run) if not need.ok)
    (override,) = overrides(need.fix)
    again = mine(tmp_path, override)
    assert again.data.decontaminate == [f"file:{items}", "heldout"]
    mix.ensure_mix(again)


# ---------------------------------------------------------------- as a command


def command(tmp_path: Path, *words: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "dflash_train.mix", *words, f"work_dir={tmp_path / 'runs'}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_command_mixes_and_says_what_comes_next(tmp_path):
    write_rows(tmp_path / "x.jsonl", prompts(30, "apple"))
    done = command(tmp_path, "+data=mine", "data.sources.mine.path=x.jsonl", "data.decontaminate=[]")
    assert done.returncode == 0, done.stderr
    assert "next: python -m dflash_train.regenerate data=mine data.sources.mine.path=x.jsonl" in done.stdout
    assert (tmp_path / "runs/data/mine/manifest.json").exists()


def test_what_is_missing_is_a_table_and_exit_code_2_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(log.console, "width", 300)
    run = make_run(tmp_path, "data=mine", "data.sources.mine.path=nowhere.jsonl", "data.decontaminate=[mbpp]")
    with pytest.raises(SystemExit) as stop:
        mix.main(run)
    assert stop.value.code == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "nowhere.jsonl" in said and "no such file" in said and "evaluation set mbpp" in said
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_writes_nothing(tmp_path):
    with pytest.raises(SystemExit) as stop:
        mix.main(mine(tmp_path, "dry_run=true"))
    assert not stop.value.code and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_demo_mix_is_4096_real_prompts(tmp_path):
    done = command(tmp_path, "data=demo")
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = json.loads((tmp_path / "runs/data/demo/manifest.json").read_text())
    assert manifest["rows"]["train"] == 4096 and manifest["rows"]["heldout"] > 100
    rows = list(read_jsonl(tmp_path / "runs/data/demo/prompts.jsonl"))
    assert len({row["id"] for row in rows}) == 4096
    assert all(row["messages"][-1]["role"] == "user" for row in rows)
