"""The client side of the hub on loopback: the real libraries pointed at it, a small data set, what is asked of both."""

import os
import time
from contextlib import contextmanager
from pathlib import Path

from helpers_data import recipe
from helpers_hub import jsonl, parquet

from dflash_train.config import SourceConfig
from dflash_train.data import reachable
from dflash_train.data.recipe import read_source

NAME, ROOT = "owner/set", Path(__file__).parents[1]
SPLITS = [{"split": "code", "path": "data/code-*.parquet"}, {"split": "chat", "path": "data/chat-*.parquet"}]
CARD = {
    "license": "cc-by-4.0",
    "configs": [
        {"config_name": "main", "data_files": SPLITS, "default": True},
        {"config_name": "extra", "data_files": "extra.jsonl"},
    ],
}


def environment(hub_url: str, home: Path, token: str | None = None) -> dict[str, str]:
    """For a subprocess: the hub's address, caches of its own, no credentials but `token`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": hub_url, "HF_HOME": str(home / "hf"), "DFLASH_CACHE": str(home / "cache"),
           "HF_HUB_DOWNLOAD_TIMEOUT": "2", "HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
    return {**kept, **own, **({"HF_TOKEN": token} if token else {})}


@contextmanager
def at_hub(hub_url: str, home: Path, monkeypatch, token: str | None = None):
    """Point this process's huggingface_hub and datasets at the hub: the one place that knows their constants."""
    import datasets
    import huggingface_hub
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    from dflash_train.data.hub import hub

    for key, value in environment(hub_url, home, token).items():
        if key in ("DFLASH_CACHE", "HF_TOKEN"):
            monkeypatch.setenv(key, value)
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    template = hub_url + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, file_download):
        if "HUGGINGFACE_CO_URL_TEMPLATE" in vars(module):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    values = {"ENDPOINT": hub_url, "HF_HUB_CACHE": str(home / "hf" / "hub"), "HF_HUB_DOWNLOAD_TIMEOUT": 20,
              "HF_TOKEN_PATH": str(home / "no-token"), "HF_HUB_OFFLINE": False}  # fmt: skip
    for key, value in values.items():
        monkeypatch.setattr(constants, key, value)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub_url)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub_url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HUB_DATASETS_URL", hub_url + "/datasets/{repo_id}/resolve/{revision}/{path}")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(home / "hf" / "datasets"))
    monkeypatch.setattr(_http, "time", _NoSleep())  # the library's own pauses between tries
    forget = (huggingface_hub.HfFileSystem.clear_instance_cache, hub.cache_clear)
    for clear in forget:
        clear()
    yield
    for clear in forget:
        clear()


class _NoSleep:
    """The time module without waiting."""

    def __getattr__(self, name: str):
        return (lambda seconds: None) if name == "sleep" else getattr(time, name)


# ---------------------------------------------------------------- a data set, and what is asked of it


def conversations(count: int, word: str = "question") -> list[dict]:
    return [
        {"id": f"{word}{i}", "messages": [{"role": "user", "content": f"{word} {i * 7919}?"}]} for i in range(count)
    ]


def rows(count: int, word: str = "question") -> list[dict]:
    return [{"id": f"{word}{i}", "prompt": f"{word} number {i * 7919}, please?"} for i in range(count)]


def added(server, count: int = 3000):
    """A set of two JSONL files."""
    some = rows(count)
    return server.add(NAME, {"train/0.jsonl": jsonl(some[: count // 2]), "train/1.jsonl": jsonl(some[count // 2 :])})


def files(count: int = 200) -> dict[str, bytes]:
    rows = conversations(count)
    return {
        "data/code-00000-of-00002.parquet": parquet(rows[: count // 2]),
        "data/code-00001-of-00002.parquet": parquet(rows[count // 2 :]),
        "data/chat-00000-of-00001.parquet": parquet(conversations(30, "chat")),
        "extra.jsonl": jsonl(conversations(7, "extra")),
    }


def with_counts(card: dict, rows: int) -> dict:
    splits = [{"name": "code", "num_examples": rows, "num_bytes": 1}]
    return {**card, "dataset_info": {"config_name": "main", "splits": splits}}


def source(**values) -> SourceConfig:
    return SourceConfig(**{"kind": "hub", "path": NAME, "subset": "main", "split": "code", **values})


def rows_of(config: SourceConfig) -> list:
    return list(read_source("mine", config, recipe({"mine": {"kind": "hub", "path": config.path}})))


def columns(config: SourceConfig) -> dict[str, str]:
    """The source's row of the dry run's table."""
    data = recipe({"mine": {"kind": "hub", "path": config.path}})
    data.sources["mine"] = config
    return dict(zip(reachable.COLUMNS, reachable.source_rows(data)[0]))
