"""Shared test set-up: one seed, few threads, no network, private cache folders for compiled extensions."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", tempfile.mkdtemp(prefix="dflash-ext-"))

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tiny tensors: a second thread only spins, and on a busy machine for tens of ms a call


def pytest_collection_modifyitems(items):
    """DeepSpeed's group of one rank stays open to the end of a test process, so what starts a group of its own goes
    first."""
    items.sort(key=lambda item: "test_tensor_parallel" not in item.nodeid)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub of data sets on loopback (helpers_hub.py) that the client libraries are pointed at; `pauses` are those
    between tries, which take no time."""
    from helpers_hub import Hub
    from helpers_hub_client import at_hub

    from dflash_train.data.hub import errors

    with Hub() as hub, at_hub(hub.url, tmp_path, monkeypatch):
        hub.pauses = []
        monkeypatch.setattr(errors, "pause", hub.pauses.append)
        yield hub
