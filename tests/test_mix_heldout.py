"""A held-out row is never trained on: the manifest lists their ids, and extraction refuses one among the train rows."""

import json

import pytest

from dflash_train.data.answers.mix_rows import heldout_ids
from dflash_train.data.rendering import Rows
from dflash_train.util.errors import UserError


def sample(split: str) -> dict:
    return {"id": "a/1", "source": "a", "license": "MIT", "bucket": "chat", "split": split, "thinking": "off",
            "messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}  # fmt: skip


def test_a_held_out_id_among_train_rows_is_refused_whatever_its_split_says():
    with pytest.raises(UserError, match="sample a/1"):
        Rows(frozenset({"a/1"})).add([sample("train")], "train", renderer=None, max_tokens=9)
    with pytest.raises(UserError, match="held out by the mix"):
        Rows().add([sample("heldout")], "train", renderer=None, max_tokens=9)


def test_the_ids_are_read_from_the_mixs_manifest(tmp_path):
    assert heldout_ids(tmp_path) == frozenset()
    (tmp_path / "manifest.json").write_text(json.dumps({"heldout_ids": ["a/1", "b/2"]}))
    assert heldout_ids(tmp_path) == {"a/1", "b/2"}
