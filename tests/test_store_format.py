"""store/FORMAT.md: its reading example runs with safetensors alone and finds what was written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers_train import NAME, make_store
from safetensors import safe_open

from dflash_train.store import shard as shards
from dflash_train.store.catalog import tally
from dflash_train.store.loader import hidden_rows

TEXT = Path(shards.__file__).with_name("FORMAT.md").read_text()
EXAMPLE = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1]
TRAIN = [[20, 30, 12], [7]]


@pytest.mark.parametrize("fp8", [False, True])
def test_the_reading_example_yields_every_sample_as_it_was_stored(tmp_path, fp8):
    store = make_store(tmp_path, TRAIN, [[9]], fp8=fp8)
    namespace = {}
    exec(EXAMPLE, namespace)
    got = list(namespace["samples"](tmp_path / NAME))
    assert [len(ids) for _, ids, _, _ in got] == [20, 30, 12, 7]
    at = 0
    for marker in shards.list_markers(store, "train"):
        shard = shards.read_shard(store.folder / marker.key)
        for j, sample_id in enumerate(marker.sample_ids):
            rows = slice(int(shard.offsets[j]), int(shard.offsets[j + 1]))
            name, token_ids, loss_mask, hidden = got[at]
            assert name == sample_id and torch.equal(token_ids, shard.token_ids[rows])
            assert torch.equal(loss_mask.bool(), shard.loss_mask[rows]) and loss_mask.any()
            assert torch.equal(hidden, hidden_rows(shard, rows, torch.float32).float())
            at += 1


def test_the_example_imports_nothing_of_this_package(tmp_path):
    make_store(tmp_path, TRAIN)
    code = f"{EXAMPLE}\nimport sys\nassert len(list(samples(sys.argv[1]))) == 4\n"
    code += "assert not any(name.startswith('dflash_train') for name in sys.modules)"
    command = [sys.executable, "-I", "-c", code, str(tmp_path / NAME)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("fp8", [False, True])
def test_the_document_names_every_key_tensor_and_field(tmp_path, fp8):
    store = make_store(tmp_path, TRAIN, [[9]], fp8=fp8)
    tally(store, update_catalog=True)
    documented = set(re.findall(r"`([\w/<>.-]+)`", TEXT))
    assert {key.partition("/")[0] for key, _ in store.list()} <= {name.partition("/")[0] for name in documented}
    marker = shards.list_markers(store)[0]
    assert set(vars(marker)) <= documented
    with safe_open(store.folder / marker.key, framework="pt") as f:
        assert set(f.keys()) <= documented and ("hidden_scale" in set(f.keys())) == fp8
        assert list(f.metadata()) == ["shard"]
    assert set(shards.read_manifest(store)) <= documented
