"""Extraction of a tiny target, end to end on a folder store: 8 train and 2 held-out samples, one sample a shard."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers_store import FlakyStore, make_run, write_answers
from safetensors.torch import load_file

from dflash_train import extract, regenerate
from dflash_train.capture import worker
from dflash_train.config import ExtractRun
from dflash_train.store import catalog, claims, local, upload
from dflash_train.store.resume import is_complete
from dflash_train.store.shard import fetch_shard, list_markers, read_manifest, read_shard, read_target_head
from dflash_train.target import tiny
from dflash_train.util import provenance
from dflash_train.util.errors import UserError

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
EXTRACT = """
import os, signal, sys
sys.path.insert(0, "tests")
from pathlib import Path
from helpers_store import make_run
from dflash_train import extract, regenerate
from dflash_train.store import local
from dflash_train.util import provenance
regenerate.ensure_answers = lambda run: None
provenance.code_version = lambda: "test"
number, put_bytes = int(sys.argv[2]), local.LocalStore.put_bytes

def count_markers(self, key, data, *, if_absent=False):
    global number
    if key.startswith("markers/"):
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        number -= 1
    return put_bytes(self, key, data, if_absent=if_absent)

local.LocalStore.put_bytes = count_markers
sys.exit(extract.main(make_run(Path(sys.argv[1]))))
"""


@pytest.fixture(autouse=True)
def answered(monkeypatch):
    """Answers are there, and a commit made while the tests run changes no bytes."""
    monkeypatch.setattr(provenance, "code_version", lambda: "test")
    monkeypatch.setattr(regenerate, "ensure_answers", lambda run: run.answers_dir)


def open_store(run: ExtractRun) -> local.LocalStore:
    return local.open_store(run.store, run.store_name)


def contents(run: ExtractRun) -> dict[str, bytes]:
    """Key -> bytes of everything that training reads."""
    store = open_store(run)
    return {key: store.get_bytes(key) for key, _ in store.list() if key.startswith(("shards/", "markers/", "target/"))}


def all_shards(run: ExtractRun, cache: Path) -> list:
    store = open_store(run)
    return [read_shard(fetch_shard(store, marker, cache)) for marker in list_markers(store)]


def refuse_to_load(monkeypatch):
    def load(*arguments):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(tiny, "load", load)


# ---------------------------------------------------------------- what is stored


@pytest.mark.parametrize("last_hidden", [False, True])
def test_every_sample_is_stored_once_and_its_rows_are_those_of_a_forward_of_its_own(tmp_path, last_hidden):
    """Trap 5: rows do not depend on what else was in the batch; naive twin: one unpadded forward a sample."""
    run = make_run(tmp_path, store__last_hidden=last_hidden, store__shard_bytes=10**6)
    assert extract.main(run) is None
    target = tiny.load(run.target, run.hardware)
    seen = []
    for shard in all_shards(run, tmp_path / "cache"):
        for i, sample_id in enumerate(shard.sample_ids):
            rows = slice(int(shard.offsets[i]), int(shard.offsets[i + 1]))
            alone = target.capture(shard.token_ids[rows].long()[None], (0, 1), last_hidden)
            assert (shard.hidden[rows] - alone.hidden[0]).abs().max() <= 1e-4
            if last_hidden:
                assert (shard.last_hidden[rows] - alone.last_hidden[0]).abs().max() <= 1e-4
            answer = target.tokenizer.decode(shard.token_ids[rows][shard.loss_mask[rows]])
            assert answer.endswith("<|im_end|>")
            seen.append(sample_id)
    assert sorted(seen) == sorted([f"train-{i}" for i in range(8)] + ["heldout-0", "heldout-1"])


@pytest.mark.parametrize("batch_tokens", [64, 256])
def test_ids_masks_offsets_and_order_do_not_depend_on_the_batches(tmp_path, batch_tokens):
    """Trap 5: batch composition changes hidden rows by rounding alone, and nothing else."""
    one = make_run(tmp_path / "one", store__shard_bytes=10**6)
    other = make_run(tmp_path / "other", store__shard_bytes=10**6, extract__batch_tokens=batch_tokens)
    extract.main(one)
    extract.main(other)
    for a, b in zip(all_shards(one, tmp_path / "a"), all_shards(other, tmp_path / "b"), strict=True):
        assert a.sample_ids == b.sample_ids
        for name in ("token_ids", "loss_mask", "offsets"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert (a.hidden - b.hidden).abs().max() <= 1e-4


def test_the_store_alone_is_enough_to_train(tmp_path):
    run = make_run(tmp_path)
    extract.main(run)
    store, target = open_store(run), tiny.load(run.target, run.hardware)
    head = read_target_head(store)
    assert torch.equal(head.embedding, target.head().embedding) and head.head is head.embedding
    assert torch.equal(head.final_norm, target.head().final_norm)
    manifest = read_manifest(store)
    assert manifest["target"]["fingerprint"] == target.spec.fingerprint
    assert manifest["target"]["stop_ids"] == list(target.spec.stop_ids) == [2]
    assert manifest["target"]["config"]["num_hidden_layers"] == 3 == json.loads(
        store.get_bytes("target/config.json"))["num_hidden_layers"]  # fmt: skip
    facts = {"layer_ids": [0, 1], "hidden_size": 64, "dtype": "float32", "last_hidden": False, "mask_token_id": 127,
             "shards": {"train": 8, "heldout": 2}, "samples": {"train": 8, "heldout": 2}}  # fmt: skip
    assert {key: manifest[key] for key in facts} == facts
    assert sum(manifest["tokens"].values()) == sum(m.num_tokens for m in list_markers(store))
    assert store.get_bytes("target/chat_template.jinja").decode() == target.tokenizer.chat_template
    assert "tokenizer.json" in str(store.list("target/"))


def test_hidden_rows_are_stored_as_bfloat16_when_asked(tmp_path):
    run = make_run(tmp_path / "b", store__dtype="bfloat16", store__shard_bytes=10**6)
    exact = make_run(tmp_path / "f", store__shard_bytes=10**6)
    extract.main(run)
    extract.main(exact)
    shards = zip(all_shards(run, tmp_path / "cache"), all_shards(exact, tmp_path / "cache2"), strict=True)
    for rounded, full in shards:
        assert rounded.sample_ids == full.sample_ids and full.hidden.dtype == torch.float32
        assert torch.equal(rounded.hidden, full.hidden.bfloat16())


def test_long_samples_are_cut_and_those_without_supervision_left_are_dropped_and_counted(tmp_path, capsys):
    """Trap 9: rows without a supervised token are dropped and counted."""
    run = make_run(tmp_path, extract__max_tokens=33)
    extract.main(run)
    manifest = read_manifest(open_store(run))
    dropped = manifest["dropped"]["no_supervised_token_after_cut"]
    assert manifest["num_cut"] > dropped > 0
    assert sum(manifest["samples"].values()) == 10 - dropped
    assert max(n for m in list_markers(open_store(run)) for n in m.lengths) == 33
    assert f"{manifest['num_cut']} cut to 33 tokens; {dropped} dropped" in capsys.readouterr().out


def test_a_state_that_is_not_finite_ends_the_run_by_sample_and_nothing_is_stored(tmp_path, monkeypatch):
    run = make_run(tmp_path, store__shard_bytes=10**6)
    load = tiny.load

    def broken(*arguments):
        target = load(*arguments)
        target.layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
        return target

    monkeypatch.setattr(tiny, "load", broken)
    with pytest.raises(UserError, match=r"canary: rows .*\n.*NaN or Inf after mlp of layer 1"):
        extract.main(run)
    assert [key for key, _ in open_store(run).list("")] == ["manifest.json"], "the canary comes before any work"
    run.target.canary = False
    with pytest.raises(UserError, match=r"NaN or Inf, samples \['"):
        extract.main(run)
    assert open_store(run).list("shards/") == [] == open_store(run).list("markers/")


# ---------------------------------------------------------------- resume


def test_a_run_killed_between_shards_is_resumed_to_the_bytes_of_an_uninterrupted_one(tmp_path):
    """Traps 33, 35: kill -9 at the seventh marker; the set is complete, nothing twice, the same bytes."""
    whole, killed = make_run(tmp_path / "whole"), make_run(tmp_path / "killed")
    extract.main(whole)
    run = [sys.executable, "-c", EXTRACT, str(tmp_path / "killed"), "6"]
    result = subprocess.run(run, cwd=ROOT, env=ENVIRONMENT, capture_output=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert 3 <= len(open_store(killed).list("markers/")) <= 6  # up to three more threads were cut in the middle
    assert extract.main(killed) is None
    assert len(list_markers(open_store(killed), "train")) == 8
    a, b = contents(whole), contents(killed)
    assert a.keys() <= b.keys() and {key: b[key] for key in a} == a
    killed.extract.verify = True
    assert extract.main(killed) == 0  # sweeps the object whose marker the kill prevented
    assert contents(killed) == a


@pytest.mark.parametrize("keep", [{0, 2, 5}, set()])
def test_only_what_has_no_marker_is_done(tmp_path, keep, monkeypatch):
    """Trap 35: markers for shards 0, 2, 5 of 8."""
    run = make_run(tmp_path)
    extract.main(run)
    store, before = open_store(run), contents(run)
    for i in set(range(8)) - keep:
        store.delete(f"markers/train-{i:05d}.json")
    done = []
    stage = worker.stage
    monkeypatch.setattr(worker, "stage", lambda *a: (done.append(a[2].shard.shard_id), stage(*a)))
    extract.main(run)
    assert done == [f"train-{i:05d}" for i in range(8) if i not in keep]
    assert contents(run) == before


def test_a_killed_runs_markers_are_read_once_and_none_is_read_to_see_that_some_are_missing(tmp_path, monkeypatch):
    """Of 80,000 shards each reading is 80,000 requests. A killed run leaves no catalogue."""
    monkeypatch.setattr(catalog, "SMALLEST", 2)
    run = make_run(tmp_path)
    extract.main(run)
    store, before, read = open_store(run), contents(run), Counter()
    missing = {f"markers/train-{i:05d}.json" for i in (1, 4, 6)}
    store.delete_many([*missing, *(key for key, _ in store.list("catalog/"))])
    get_bytes = local.LocalStore.get_bytes
    count = lambda self, key: (read.update([key]), get_bytes(self, key))[1]
    monkeypatch.setattr(local.LocalStore, "get_bytes", count)
    assert not is_complete(store, read_manifest(store)["inputs_hash"])
    assert not any(key.startswith("markers/") for key in read)
    assert extract.main(run) is None
    markers = {key for key in before if key.startswith("markers/")}
    assert {key: n for key, n in read.items() if key.startswith("markers/")} == dict.fromkeys(markers, 1)
    assert extract.main(run) is None, "and from catalogues alone when all is there"
    assert {key: n for key, n in read.items() if key.startswith("markers/")} == dict.fromkeys(markers, 1)
    assert contents(run) == before


def test_a_run_that_rounds_otherwise_than_the_stores_first_one_says_so(tmp_path, capsys):
    run = make_run(tmp_path)
    extract.main(run)
    assert read_manifest(open_store(run))["computed_with"]["target.kernels"] == "auto"
    assert "begun" not in capsys.readouterr().out
    open_store(run).delete("markers/train-00003.json")
    run.target.kernels = "library"
    extract.main(run)
    assert "the store was begun with target.kernels auto, now library" in capsys.readouterr().out.replace("\n", " ")


def test_a_finished_store_is_recognized_without_loading_the_target_or_rendering(tmp_path, monkeypatch, capsys):
    """Trap 35: all 8 of 8."""
    run = make_run(tmp_path)
    extract.main(run)
    refuse_to_load(monkeypatch)
    monkeypatch.setattr(extract, "rendered_rows", lambda *a: pytest.fail("rendered"))
    assert extract.main(run) is None
    assert "every shard is in" in capsys.readouterr().out


def test_a_slow_host_that_comes_back_after_another_took_its_shards_over_changes_nothing(tmp_path, monkeypatch, capsys):
    """Trap 35: two hosts instead of one. The first shows no sign of life while the second does everything, the shard
    that the first has captured and not published included."""
    alone, run = make_run(tmp_path / "alone"), make_run(tmp_path / "both", extract__lease_s=0.3)
    extract.main(alone)
    monkeypatch.setattr(claims.Claims, "_keep_beating", lambda self: None)
    capture, captured = worker.capture_shard, []

    def interrupted(*arguments):
        capture(*arguments)
        captured.append(arguments[2].shard.shard_id)
        if len(captured) == 3:
            assert extract.main(run) is None

    monkeypatch.setattr(worker, "capture_shard", interrupted)
    assert extract.main(run) is None
    assert captured.count("train-00002") == 2  # by both, and the second one's marker won
    assert contents(run) == contents(alone)
    out = capsys.readouterr().out
    assert "train-00002: taken over from" in out and "no sign of life" in out
    assert "shard(s) were made by other hosts" in out
    assert not open_store(run).list("claims/") and not open_store(run).list("hosts/")


@pytest.mark.slow
def test_two_workers_at_once_make_the_set_once(tmp_path):
    """Trap 35: 2 workers instead of 1, as processes."""
    alone, run = make_run(tmp_path / "alone"), make_run(tmp_path / "both")
    extract.main(alone)
    command = [sys.executable, "-c", EXTRACT, str(tmp_path / "both"), "-1"]
    workers = [subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert contents(run) == contents(alone)


@pytest.mark.parametrize("size", [0, 50, -1])
def test_a_cut_object_is_done_again(tmp_path, size):
    """Trap 33: objects cut to 0, 50 and size-1 bytes."""
    run = make_run(tmp_path)
    extract.main(run)
    before = contents(run)
    key = next(key for key in before if key.startswith("shards/train-00003"))
    path = open_store(run).folder / key
    path.unlink()
    path.write_bytes(before[key][:size])
    assert extract.main(run) is None
    assert contents(run) == before


@pytest.mark.parametrize("change,field", [
    ({"target__options": {"seed": 1}}, "target.fingerprint"),
    ({"extract__layer_ids": [1, 0]}, "layer_ids"),
    ({"store__dtype": "bfloat16"}, "dtype"),
    ({"store__last_hidden": True}, "last_hidden"),
    ({"store__shard_bytes": 10**6}, "plan_hash"),
])  # fmt: skip
def test_a_store_made_from_something_else_is_refused_before_the_target_is_loaded(tmp_path, monkeypatch, change, field):
    extract.main(make_run(tmp_path))
    refuse_to_load(monkeypatch)
    with pytest.raises(UserError, match=rf"manifest.json: {field}"):
        extract.main(make_run(tmp_path, **change))


def test_a_store_made_with_another_chat_template_is_refused_by_name(tmp_path, monkeypatch):
    """Traps 10, 11: what the target reads would differ."""
    extract.main(make_run(tmp_path))
    template = tmp_path / "other.jinja"
    template.write_text(tiny.CHAT_TEMPLATE.replace("result: ", "answer: "))
    refuse_to_load(monkeypatch)
    with pytest.raises(UserError, match=r"manifest.json: chat_template_hash"):
        extract.main(make_run(tmp_path, target__chat_template=str(template)))


def test_other_answers_are_refused_too(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    extract.main(run)
    write_answers(run, seed=1)
    refuse_to_load(monkeypatch)
    with pytest.raises(UserError, match="plan_hash"):
        extract.main(run)


# ---------------------------------------------------------------- before and at the end


def test_too_many_bytes_are_refused_before_the_weights_are_loaded(tmp_path, monkeypatch, capsys):
    """Trap 44: the arithmetic is printed, and the run refused, before weights load."""
    run = make_run(tmp_path, store__max_bytes=10_000)
    refuse_to_load(monkeypatch)
    with pytest.raises(UserError, match=r"store.max_bytes(.|\n)*extract.num_taps"):
        extract.main(run)
    assert "hidden 64 x 2 layers x float32 = 0.51 KB a token" in capsys.readouterr().out
    assert open_store(run).list() == []


def test_a_recipe_of_a_million_rows_is_refused_before_anything_is_answered(tmp_path, monkeypatch, capsys):
    """Trap 44: an estimate refuses what cannot fit before mix and regenerate run."""
    run = make_run(tmp_path, store__max_bytes=10**9)
    (run.answers_dir / "manifest.json").unlink()
    run.data.total, run.target.hidden_size = 914_000, 4096
    monkeypatch.setattr(regenerate, "ensure_answers", lambda run: pytest.fail("answered"))
    with pytest.raises(SystemExit) as stop:
        extract.main(run)
    assert stop.value.code == 2 and "MISSING" in capsys.readouterr().out


def test_a_dry_run_does_nothing(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    run.dry_run = True
    monkeypatch.setattr(regenerate, "ensure_answers", lambda run: pytest.fail("answered"))
    with pytest.raises(SystemExit) as stop:
        extract.main(run)
    assert stop.value.code == 0 and open_store(run).list() == []


@pytest.mark.parametrize("change,field", [
    ({"extract__layer_ids": [0, 2]}, "extract.layer_ids"),
    ({"extract__layer_ids": None}, "extract.layer_ids"),
    ({"target__mask_token_id": 2}, "target.mask_token_id"),
])  # fmt: skip
def test_wrong_layers_and_mask_tokens_are_refused_before_anything_is_answered(tmp_path, monkeypatch, change, field):
    """Traps 1, 20: refused by name, before GPU work."""
    run = make_run(tmp_path, **change)
    monkeypatch.setattr(regenerate, "ensure_answers", lambda run: pytest.fail("answered"))
    with pytest.raises(UserError, match=field):
        extract.main(run)


def test_several_ranks_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(extract, "world_size", lambda: 2)
    with pytest.raises(UserError, match="WORLD_SIZE"):
        extract.main(make_run(tmp_path))


def test_a_store_that_stops_taking_shards_ends_the_run_and_a_second_run_completes_it(tmp_path, monkeypatch):
    """Trap 32: the failed shard is named; what was uploaded counts."""
    run = make_run(tmp_path)
    flaky = FlakyStore(open_store(run).folder, failures=0)
    put_file = FlakyStore.put_file

    def fail_shards_after_two(self, key, path):
        if key.startswith("shards/") and self.puts >= 4:
            self.failures = -1
        put_file(self, key, path)

    monkeypatch.setattr(FlakyStore, "put_file", fail_shards_after_two)
    with monkeypatch.context() as patch:
        patch.setattr(local, "open_store", lambda config, name: flaky)
        patch.setattr(upload.time, "sleep", lambda seconds: None)
        with pytest.raises(UserError, match=r"upload to file://(.|\n)*-0000"):
            extract.main(run)
    assert 0 < len(list_markers(open_store(run))) < 10
    assert extract.main(run) is None
    assert len(list_markers(open_store(run))) == 10


def test_verify_fails_on_a_changed_object_and_loads_no_target(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path)
    extract.main(run)
    refuse_to_load(monkeypatch)
    run.extract.verify = True
    assert extract.main(run) == 0
    path = next((open_store(run).folder / "shards").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert extract.main(run) == 1
    assert f"BAD shards/{path.name}" in capsys.readouterr().out


def test_the_staging_folder_is_empty_and_no_thread_is_left_after_a_run(tmp_path):
    extract.main(make_run(tmp_path))
    assert list((tmp_path / "staging").iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("upload-")]


def test_a_shard_carries_where_it_came_from_and_no_folder_of_this_machine(tmp_path):
    run = make_run(tmp_path)
    extract.main(run)
    (path, *_) = sorted((open_store(run).folder / "shards").iterdir())
    origin = read_shard(path).provenance
    for key in ("config", "config_hash", "code_version", "target_fingerprint", "layer_ids", "chat_template_hash"):
        assert key in origin
    assert origin["config"]["seed"] == 0 and str(tmp_path) not in json.dumps(origin)
    assert set(load_file(path)) == {"token_ids", "loss_mask", "offsets", "hidden"}
