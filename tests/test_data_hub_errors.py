"""What goes wrong with a data set on a hub: one clear message for each kind, before any file is fetched; a busy hub is
asked again, for a bounded time."""

import json

import pytest
from helpers_hub import TOKEN, Fault, jsonl, parquet
from helpers_hub_client import CARD, NAME, columns, conversations, files, rows_of, source, with_counts

from dflash_train.config import SourceConfig
from dflash_train.data import reachable
from dflash_train.data.hub import errors as hub_errors
from dflash_train.data.hub import hub as client
from dflash_train.util.errors import UserError

# ---------------------------------------------------------------- errors, one message a kind


def gated(server) -> None:
    server.add(NAME, files(), with_counts(CARD, 4321), gated=True, allowed={TOKEN})


def refused(config: SourceConfig) -> tuple[str, str]:
    """(what the preflight row says, what reading says): the same thing, before any file is fetched."""
    need = reachable.source_need("mine", config)
    with pytest.raises(UserError) as error:
        rows_of(config)
    assert not need.ok and str(error.value).startswith("data.sources.mine")
    return f"{need.detail} | {need.fix}", str(error.value)


def test_a_gated_set_without_a_token_names_its_licence_page_and_still_its_card(server):
    gated(server)
    for options in ({}, {"gated": True}):
        client.cache_clear()
        for text in refused(source(options=options)):
            assert "gated, and there is no token" in text
            assert f"https://huggingface.co/datasets/{NAME}" in text and "HF_TOKEN" in text
        found = columns(source(options=options))
        assert (found["rows there"], found["counted by"], found["gated"]) == ("4,321", "card", "yes")
    assert server.file_bytes() == 0


def test_a_token_without_access_names_the_licence_page_and_one_with_access_reads(server, monkeypatch):
    gated(server)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 34)
    for text in refused(source()):
        assert "this token's account may not read it" in text and f"huggingface.co/datasets/{NAME}" in text
    client.cache_clear()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert len(rows_of(source())) == 200 and columns(source())["gated"] == "yes"
    for name in server.seen:
        assert TOKEN not in name.line


def test_a_token_that_the_hub_does_not_know_is_named(server, monkeypatch):
    server.add(NAME, files(), CARD)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
    server.faults = [Fault("/api/datasets", status=401, headers=headers, times=99)]
    for text in refused(source()):
        assert "does not know this token" in text and TOKEN not in text


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_set_that_is_gone_is_named(server, monkeypatch, token):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    for text in refused(source()):
        assert NAME in text and "there is none of that name" in text and "'~data.sources.mine'" in text


def test_a_renamed_split_or_subset_lists_what_exists(server):
    server.add(NAME, files(), CARD)
    for text in refused(source(split="coding")):
        assert "'coding', which owner/set does not have" in text and "chat, code" in text
        assert "data.sources.mine.split=chat" in text
    for text in refused(source(subset="primary")):
        assert "'primary', which owner/set does not have" in text and "main, extra" in text
        assert "data.sources.mine.subset=main" in text
    assert server.file_bytes("code") == 0


def test_several_subsets_and_none_named_lists_them(server):
    configs = [{"config_name": name, "data_files": f"{name}.parquet"} for name in ("a", "b")]
    server.add(NAME, {f"{n}.parquet": parquet(conversations(5)) for n in "ab"}, {"configs": configs})
    for text in refused(source(subset=None, split="train")):
        assert "none, and owner/set has several" in text and "one of a, b" in text


def test_an_unknown_revision_is_named(server):
    server.add(NAME, files(), CARD)
    for revision in ("v2", "0" * 40):
        for text in refused(source(revision=revision)):
            assert f"no revision {revision}" in text and "revision=null" in text


@pytest.mark.parametrize("path", ["train.parquet", "train.jsonl", "train.json"])
def test_renamed_columns_are_noticed_before_the_download(server, path):
    rows = [{"identifier": i, "query_text": f"{'words ' * 200}{i}?"} for i in range(20_000)]
    body = {"train.parquet": parquet, "train.jsonl": jsonl, "train.json": lambda r: json.dumps(r).encode()}[path](rows)
    server.add(NAME, {path: body})
    need = reachable.source_need("mine", source(subset=None, split="train", form="openorca"))
    assert not need.ok and "columns identifier, query_text" in need.detail
    assert server.file_bytes() <= max(1 << 18, 0.5 * len(body))
    with pytest.raises(UserError, match="columns identifier, query_text"):
        rows_of(source(subset=None, split="train", form="openorca"))


def test_files_that_cannot_be_read_are_named(server):
    server.add(NAME, {"train.csv": b"prompt\nWhy?\n"})
    for text in refused(source(subset=None, split="train")):
        assert "train.csv" in text and ".jsonl" in text


def test_no_connection_is_said_once_and_not_waited_for_by_every_source(server, tmp_path, monkeypatch):
    server.server.shutdown()
    server.server.server_close()
    for number in range(15):
        need = reachable.source_need(f"s{number}", source(path=f"owner/set{number}"))
        assert not need.ok and "no connection to http://127.0.0.1" in need.detail and "HTTPS_PROXY" in need.fix
    assert len(server.pauses) == 1


def test_offline_by_choice_is_its_own_message(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for text in refused(source()):
        assert "HF_HUB_OFFLINE is set" in text and "unset HF_HUB_OFFLINE" in text
    assert server.seen == [] and server.pauses == []


# ---------------------------------------------------------------- a busy hub


INFO, FILE = "GET /api/datasets/owner/set$", r"code-0.*parquet"


@pytest.mark.parametrize(
    ("status", "where"),
    [
        (503, INFO),
        (503, "README"),
        (503, "tree"),
        (503, "paths-info"),
        (503, FILE),
        (429, INFO),
        (429, FILE),
        (500, FILE),
    ],
)
def test_a_busy_hub_is_asked_again_wherever_it_is_busy(server, status, where):
    server.add(NAME, files(), CARD)
    server.faults = [Fault(where, status=status, times=3)]
    assert len(rows_of(source())) == 200
    assert server.faults[0].times == 0


def test_retry_after_is_obeyed_up_to_a_bound(server):
    server.add(NAME, files(), CARD)
    server.faults = [Fault("owner/set$", status=429, headers={"Retry-After": "7"}),
                     Fault("owner/set$", status=429, headers={"Retry-After": "9999"})]  # fmt: skip
    assert len(rows_of(source())) == 200
    assert server.pauses == [7.0, hub_errors.LONGEST_PAUSE_S]


@pytest.mark.parametrize(("status", "said"), [(429, "too many requests"), (503, "the hub answers 503")])
def test_a_hub_that_stays_busy_is_given_up_after_a_bounded_time(server, status, said):
    server.add(NAME, files(), CARD)
    server.faults = [Fault(".", status=status, times=10_000)]
    need = reachable.source_need("mine", source())
    assert not need.ok and said in need.detail and "what is downloaded stays" in need.fix
    assert len(server.pauses) == hub_errors.ATTEMPTS - 1 and sum(server.pauses) <= 60
