"""Data sets on a hub: counted, checked and priced before a download; one commit a run; rows as they stand in the files.

The hub is a real HTTP server on loopback and the clients are the real libraries; only the pauses between tries are cut.
"""

import gzip
import io
import json
from dataclasses import replace

import pyarrow.parquet
import pytest
import yaml
from helpers_data import FIXTURES, outcome, recipe
from helpers_hub import TOKEN, Fault, jsonl, parquet
from helpers_hub_client import CARD, NAME, ROOT, columns, conversations, files, rows_of, source, with_counts

from dflash_train.bench import contamination
from dflash_train.config import SourceConfig
from dflash_train.data import reachable
from dflash_train.data.forms import FORMS
from dflash_train.data.hub import Hub as Client
from dflash_train.data.hub import hub as client
from dflash_train.data.hub import pin
from dflash_train.data.hub import survey as hub_survey
from dflash_train.data.recipe import read_source
from dflash_train.util.errors import UserError

# ---------------------------------------------------------------- before a download


def test_rows_are_told_with_what_counted_them_for_next_to_no_download(server, monkeypatch):
    big = {**files(), "data/code-00000-of-00002.parquet": parquet(conversations(60_000))}
    total = sum(len(content) for path, content in big.items() if "code" in path)
    data = server.add(NAME, big, CARD)
    found = columns(source(take=150, license="CC-BY-4.0"))
    assert (found["rows there"], found["counted by"]) == ("60,100", "footers")
    assert (found["take"], found["licence"], found["gated"]) == ("150", "CC-BY-4.0", "no")
    assert found["revision"] == f"{data.shas()[0][:12]} (newest)"
    assert found["to download"] == f"{total / 1000:.1f} KB"
    assert server.file_bytes() < 0.25 * total and total > 600_000

    server.add("owner/viewed", {**files()}, CARD, viewer={("main", "code"): 77})
    monkeypatch.setattr(hub_survey, "viewer_url", lambda: server.url)
    found = columns(source(path="owner/viewed"))
    assert (found["rows there"], found["counted by"]) == ("77", "viewer")
    server.add("owner/card", {**files()}, with_counts(CARD, 200))
    found = columns(source(path="owner/card", license="MIT"))
    assert (found["rows there"], found["counted by"]) == ("200", "card")
    assert found["licence"] == "MIT (its card: cc-by-4.0)"
    found = columns(source(path="owner/card", subset="extra", split="train"))
    assert (found["rows there"], found["counted by"]) == ("?", "unknown until read")


def test_a_viewer_that_looked_at_another_commit_or_is_not_ready_is_not_believed(server, monkeypatch):
    data = server.add(NAME, {"train.jsonl": jsonl(conversations(5))}, viewer={("default", "train"): 5})
    monkeypatch.setattr(hub_survey, "viewer_url", lambda: server.url)
    config = source(subset=None, split="train")
    assert columns(config)["rows there"] == "5"
    data.commits.append({"train.jsonl": jsonl(conversations(9))})
    old = replace(config, revision=data.shas()[0])
    assert (columns(old)["rows there"], columns(old)["counted by"]) == ("?", "unknown until read")
    server.faults = [Fault("GET /size", status=500)]
    client.cache_clear()
    assert columns(config)["rows there"] == "?" and server.pauses == []


def test_subsets_are_counted_and_read_together(server):
    configs = [{"config_name": name, "data_files": f"{name}.parquet"} for name in ("a", "b", "c")]
    each = {f"{name}.parquet": parquet(conversations(5, name)) for name in ("a", "b", "c")}
    server.add(NAME, each, {"configs": configs})
    config = source(subset=None, split="train", options={"subsets": ["a", "c"]})
    assert columns(config)["rows there"] == "10"
    assert [raw.id for raw in rows_of(config)][4:6] == ["a4", "c0"]
    with pytest.raises(UserError, match=r"options\.subsets") as error:
        rows_of(replace(config, options={"subsets": ["a", "d"]}))
    assert "one of a, b, c" in str(error.value)


def test_a_short_source_is_noted_and_local_parquet_files_are_counted(server, tmp_path):
    server.add(NAME, files(), CARD)
    need = reachable.source_need("mine", source(take=500))
    assert need.ok and "200 rows, fewer than the 500 wanted" in need.detail
    (tmp_path / "a.parquet").write_bytes(parquet(conversations(12)))
    local = SourceConfig(kind="files", path=str(tmp_path / "a.parquet"))
    assert (columns(local)["rows there"], columns(local)["counted by"]) == ("12", "footers")
    (tmp_path / "a.jsonl").write_bytes(jsonl(conversations(12)))
    assert columns(SourceConfig(kind="files", path=str(tmp_path / "a.jsonl")))["rows there"] == "?"


def test_only_files_of_the_split_are_fetched_in_their_order(server):
    server.add(NAME, files(), CARD)
    raws = rows_of(source())
    assert [raw.id for raw in raws] == [f"question{i}" for i in range(200)]
    assert raws[150].upstream == {"dataset": NAME, "config": "main", "split": "code", "row": 150}
    assert raws[150].location == f"{NAME}/main/code:150"
    assert server.file_bytes("code-0") and not server.file_bytes("chat|extra")


def test_what_is_still_to_download_counts_what_is_here(server, tmp_path):
    server.add(NAME, files(), CARD)
    data = recipe({"mine": {"kind": "hub", "path": NAME, "subset": "main", "split": "code"}})
    (need,) = reachable.download_need(data, tmp_path / "runs", 2000)
    assert "and 2.0 KB of the mix on the same disk" in need.detail
    assert need.ok and "to download (kept there)" in need.detail and str(tmp_path / "cache" / "hub") in need.detail
    rows_of(source())
    client.cache_clear()
    assert reachable.download_need(data, tmp_path, 2000) == []
    assert columns(source())["to download"].startswith("0 B of ")


def test_a_disk_too_small_for_downloads_and_mix_together_is_a_missing_need(server, tmp_path, monkeypatch):
    server.add(NAME, files(), CARD)
    monkeypatch.setattr(reachable, "free_bytes", lambda path: 100_000)
    data = recipe({"mine": {"kind": "hub", "path": NAME, "subset": "main", "split": "code"}})
    assert reachable.download_need(data, tmp_path, 1000)[0].ok
    (need,) = reachable.download_need(data, tmp_path, 99_000)
    assert not need.ok and "DFLASH_CACHE" in need.fix
    monkeypatch.setattr(reachable, "same_disk", lambda *paths: False)
    assert reachable.download_need(data, tmp_path, 99_000)[0].ok


def big_mix(server) -> dict[str, SourceConfig]:
    """Every data set of mix914k on the server, with the columns that the real ones have and a few rows each."""
    plain = yaml.safe_load((ROOT / "data_recipes" / "mix914k.yaml").read_text("utf-8"))
    sources = {name: SourceConfig(**values) for name, values in plain["sources"].items()}
    parts: dict[str, tuple[dict, dict, bool]] = {}
    for name, one in sources.items():
        content, configs, _ = parts.setdefault(one.path, ({}, {}, bool(one.options.get("gated"))))
        for subset in one.options.get("subsets") or [one.subset or "default"]:
            path = f"{name}-{subset}.jsonl"
            content[path] = (FIXTURES / "forms" / f"{one.form}.jsonl").read_bytes()
            configs.setdefault(subset, []).append({"split": one.split, "path": path})
    for path, (content, configs, is_gated) in parts.items():
        card = [{"config_name": name, "data_files": files} for name, files in configs.items()]
        server.add(path, content, {"configs": card, "license": "mit"}, gated=is_gated, allowed={TOKEN})
    return sources


def test_the_dry_run_of_mix914k_names_both_gated_sets_and_with_a_token_finds_all_fifteen(server, monkeypatch):
    sources = big_mix(server)
    needs = {name: reachable.source_need(name, source) for name, source in sources.items()}
    gated = {name for name, source in sources.items() if source.options.get("gated")}
    assert {name for name, need in needs.items() if not need.ok} == gated and len(gated) == 5
    assert all(f"https://huggingface.co/datasets/{sources[name].path}" in needs[name].fix for name in gated)
    client.cache_clear()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    needs = {name: reachable.source_need(name, source) for name, source in sources.items()}
    assert [need.detail for need in needs.values() if not need.ok] == [] and len(needs) == 15
    assert "4 file(s)" in needs["hermes_fc"].detail


# ---------------------------------------------------------------- one revision a run


def test_one_run_never_mixes_two_revisions(server):
    data = server.add(NAME, files(), CARD)
    first = data.shas()[0]
    config = recipe({name: {"kind": "hub", "path": NAME, "subset": "main", "split": name} for name in ("code", "chat")})
    assert client().sha("code", config.sources["code"]) == first
    data.commits.append({**data.commits[0], "data/chat-00000-of-00001.parquet": parquet(conversations(1, "newer"))})
    pinned = pin(config)
    assert [source.revision for source in pinned.sources.values()] == [first, first]
    assert len(list(read_source("chat", pinned.sources["chat"], pinned))) == 30
    client.cache_clear()  # another run
    assert pin(config).sources["chat"].revision == data.shas()[1]
    assert len(list(read_source("chat", pin(config).sources["chat"], config))) == 1
    assert server.asked(r"resolve/main/") == 0  # nothing was ever fetched at a moving name


def test_unchanged_files_of_a_newer_revision_are_not_fetched_again(server):
    data = server.add(NAME, files(), CARD)
    rows_of(source())
    before = server.file_bytes("code-00000")
    data.commits.append({**data.commits[0], "data/code-00001-of-00002.parquet": parquet(conversations(3, "newer"))})
    client.cache_clear()
    assert len(rows_of(source())) == 103
    assert server.file_bytes("code-00000") == before > 0


def test_a_pinned_set_that_is_here_needs_no_hub(server, monkeypatch):
    data = server.add(NAME, files(), CARD)
    config = source(revision=data.shas()[0])
    assert len(rows_of(config)) == 200
    client.cache_clear()
    server.seen.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert len(rows_of(config)) == 200
    found = columns(config)
    assert (found["rows there"], found["counted by"]) == ("200", "footers")
    assert found["revision"].endswith("(pinned)") and found["to download"].startswith("0 B of")
    assert server.seen == []


def test_a_branch_or_tag_counts_as_unpinned(server):
    server.add(NAME, files(), CARD)
    assert columns(source(revision="main"))["revision"].endswith("(main today)")
    assert (
        pin(recipe({"a": {"kind": "hub", "path": NAME, "revision": "main"}})).sources["a"].revision
        == (server.sets[NAME].shas()[0])
    )


# ---------------------------------------------------------------- rows


def test_hub_rows_have_no_nulls_of_other_rows(server):
    """Trap 12: a columnar file gives every row the union of nested keys; row 1's call gains no argument of row 2."""
    call = lambda arguments: [
        {"role": "user", "content": "Go?"},
        {"role": "assistant", "content": "",
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]},
    ]  # fmt: skip
    body = parquet([{"messages": call({"city": "Oslo"})}, {"messages": call({"n": 3})}])
    (_, message) = pyarrow.parquet.read_table(io.BytesIO(body)).to_pylist()[0]["messages"]
    assert message["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo", "n": None}
    server.add(NAME, {"train.parquet": body})
    rows = rows_of(source(subset=None, split="train"))
    text = json.dumps(next(outcome(row) for row in rows))
    assert '"n"' not in text and "null" not in text and "Oslo" in text


def test_json_arrays_gzip_and_broken_lines_are_read_like_files(server):
    lines = jsonl(conversations(3)) + b'{"id": "cut", "messages": [\n' + jsonl(conversations(2, "more"))
    server.add(NAME, {"train/a.json": json.dumps(conversations(4, "array")).encode(),
                      "train/b.jsonl.gz": gzip.compress(lines)})  # fmt: skip
    raws = rows_of(source(subset=None, split="train"))
    assert [raw.drop for raw in raws if raw.drop] == ["bad_json"] and len(raws) == 10
    assert raws[0].id == "array0" and raws[-1].id == "more1"


def test_a_damaged_first_file_is_said_and_costs_the_mix_that_file_alone(server, capsys):
    server.add(NAME, {"train/a.jsonl.gz": b"this is no gzip", "train/b.jsonl": jsonl(conversations(3))})
    config = source(subset=None, split="train")
    assert columns(config)["rows there"] == "?"
    assert "train/a.jsonl.gz is damaged (error: Error" in capsys.readouterr().out
    assert [raw.drop for raw in rows_of(config)] == ["truncated_gzip", None, None, None]
    server.add(NAME, {"train/a.parquet": b"PAR1 no parquet PAR1", "train/b.parquet": parquet(conversations(3))})
    client.cache_clear()
    for _ in ("remote", "here"):
        assert columns(config)["rows there"] == "?"
        assert "train/a.parquet is damaged (ArrowInvalid" in capsys.readouterr().out
        assert [raw.drop for raw in rows_of(config)] == ["bad_parquet", None, None, None]
        client.cache_clear()


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if form.unread])
def test_columns_that_a_form_does_not_read_are_left_out_and_change_nothing(server, form, monkeypatch):
    row = {"id": "t0.1", "question": "Why is it so?", "system_prompt": "Be kind.", "input": "Write code, please.",
           "average_test_score": "1.0", "domain": "generic", "instance_id": "o__n-3", "repo": "o/n", "license": "mit",
           "language": "python", "resolved": 1, "messages": [{"role": "user", "content": "Fix it, please."}],
           **dict.fromkeys(FORMS[form].unread, "large " * 50)}  # fmt: skip
    server.add(NAME, {"train.parquet": parquet([row, {**row, "id": "t0.2"}])})
    config = source(subset=None, split="train", form=form)
    lean = rows_of(config)
    monkeypatch.setitem(FORMS, form, replace(FORMS[form], unread=()))
    full = rows_of(config)
    assert lean == full and all(raw.messages and not raw.drop and not raw.skip for raw in full)


def test_without_an_id_column_no_column_is_left_out(server, monkeypatch):
    rows = [{"question": "Why?", "response": "one"}, {"question": "Why?", "response": "two"}]
    monkeypatch.setitem(FORMS, "prompt", replace(FORMS["prompt"], unread=("response",)))
    server.add(NAME, {"train.parquet": parquet(rows)})
    first, second = rows_of(source(subset=None, split="train", form="prompt"))
    assert first.id != second.id  # ids are hashes of whole rows


def test_the_client_of_another_run_starts_without_memory():
    assert Client().answers == {} and Client().down is None


def test_an_evaluation_set_on_the_hub_is_looked_at_in_the_column_it_names(server):
    rows = [{"task_id": i, "text": f"Write a function that returns {i}.", "code": "pass"} for i in range(9)]
    configs = [{"config_name": "full", "data_files": [{"split": "test", "path": "full.parquet"}]}]
    server.add(NAME, {"full.parquet": parquet(rows)}, {"configs": configs})
    name = f"hub:{NAME}:full/test:text"
    assert contamination.evaluation_need(name).ok
    assert contamination.contamination_texts([name])[name][3] == ("Write a function that returns 3.",)
    need = contamination.evaluation_need(f"hub:{NAME}:full/test:prompt")
    assert not need.ok and "columns code, task_id, text" in need.detail and "a column prompt" in need.detail


def test_what_is_wrong_with_an_evaluation_set_never_names_a_source(server):
    server.add(NAME, {"train.jsonl": jsonl([{"text": "One?"}])})
    for name in (f"hub:{NAME}:test:text", f"hub:{NAME}:other/train:text", "hub:owner/none:test:text"):
        need = contamination.evaluation_need(name, ["gsm8k", name])
        assert not need.ok and "data.sources" not in need.fix
        with pytest.raises(UserError) as error:
            contamination.contamination_texts([name, "heldout"])
        assert error.value.field == f"data.decontaminate: {name}" and "data.sources" not in str(error.value)
        assert need.fix == "'data.decontaminate=[gsm8k]' leaves it out"
        assert error.value.fix == "'data.decontaminate=[heldout]' leaves it out"
    server.add(NAME, {"train.jsonl": jsonl([{"text": "One?"}])}, gated=True)
    client.cache_clear()
    assert "HF_TOKEN" in contamination.evaluation_need(f"hub:{NAME}:train:text", []).fix
