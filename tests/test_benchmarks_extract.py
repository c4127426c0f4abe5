"""The extraction and scaling benchmarks at toy sizes: their figures are there, and mean what they say."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_train import cli
from dflash_train.capture.desk import Here
from dflash_train.capture.setup import plan_all, resolve
from dflash_train.capture.worker import capture_jobs
from dflash_train.store.local import LocalStore
from dflash_train.store.markers import Marker
from dflash_train.store.shard import fetch_shard, list_markers, read_shard
from dflash_train.store.slices import ShardPlan
from dflash_train.target import random_weights
from dflash_train.target.canary import check_target
from dflash_train.target.tensor_parallel import start_group

sys.path.insert(0, str(cli.ROOT / "benchmarks"))
import extract_27b
import extract_path
import extract_table
import hybrid_27b
import scale
import scale_train
from extract_idle import union_s
from extract_naive import naive
from extract_split import layers_of, row_agreement

CPU = torch.device("cpu")
RATES = ("tokens_per_s", "samples_per_s")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tiny_setup(*words: str):
    run = extract_path.build_run(True, "store.shard_bytes=193250", *words)
    return resolve(run, random_weights.prepare(run.target))


# ---------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[dict, str]:
    """JSON and table of a run, one part of which fails."""
    out = tmp_path_factory.mktemp("extract_27b")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extract_27b.Bench, "worker", lambda self, name: {}["no worker here"])
        assert extract_27b.main(["--tiny", "--out", str(out), "--parts", "ours,naive,idle,worker"]) == 1
    return json.loads((out / "extract_27b.json").read_text()), (out / "extract_27b.md").read_text()


def test_every_figure_is_a_number_above_zero_and_nothing_is_lost(made):
    figures = made[0]["figures"]
    names = {f"{way} {n}" for way in ("ours", "idle") for n in ("a bfloat16", "b bfloat16", "c bfloat16")}
    assert set(figures) == names | {"naive a", "naive b", "naive c", "idle b fp8", "machine", "machine again", "build"}
    for name, part in figures.items():
        if name.startswith(("ours", "naive")):
            assert all(part[key] > 0 for key in RATES), name
        if name.startswith("ours"):
            assert part["tokens"] > 0 and 0 <= part["padding_waste"] < 0.5 and part["paused_share"] == 0
            assert part["lost_shards"] == part["duplicated_shards"] == part["wrong_samples"] == 0
            assert part["shards"] >= 4 and part["upload_mb_per_s"] > 0
        if name.startswith("idle"):
            assert 0 < part["idle_share"] < 1 and part["kernels"] > 100


def test_the_table_has_a_row_for_each_part_and_names_the_one_that_failed(made):
    record, table = made
    assert record["failed"] == {"worker b": "KeyError: 'no worker here'"}
    for name in ("ours a bfloat16", "ours b bfloat16", "ours c bfloat16", "naive a", "naive b", "naive c"):
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
        assert row.count("|") == len(extract_table.HEAD) + 1
    assert "FAILED worker b" in table and "matrix rate" in table and "x naive a" in table
    assert table.count("aim ") == 3  # (b), (c), and (a) against the naive way
    assert "WRONG" not in table


def test_a_lost_shard_and_a_throttled_machine_are_said(made):
    figures = json.loads(json.dumps(made[0]["figures"]))
    assert extract_table.wrong(figures) == []
    figures["ours b bfloat16"]["lost_shards"], figures["machine"]["void"] = 2, True
    assert extract_table.wrong(figures) == ["WRONG ours b bfloat16: lost_shards 2"]
    assert "VOID" in extract_table.markdown(figures, {})
    figures["ours c bfloat16"]["tokens_per_s"] = 12_500.0
    assert "aim reached, ours c bfloat16: 12,500 of 12,000 tokens/s" in extract_table.aims(figures)


def test_the_sizes_are_those_of_the_other_27b_benchmark():
    run, sizes = extract_path.build_run(False), hybrid_27b.Sizes()
    ours, theirs = (c.to_dict() for c in (random_weights.text_config(run.target), hybrid_27b.hf_config(sizes)))
    assert {key for key in ours if ours[key] != theirs[key]} <= {"eos_token_id", "pad_token_id"}
    assert resolve(run, random_weights.prepare(run.target)).layer_ids == sizes.layer_ids == (1, 16, 31, 46, 61)


# ---------------------------------------------------------------- what is extracted


@pytest.mark.parametrize("lengths", extract_27b.Sizes().lengths + extract_27b.TINY.lengths + (scale.Sizes().lengths,))
def test_the_lengths_have_the_mean_that_they_claim(lengths):
    drawn = lengths.draw()
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.01)
    assert drawn.min() >= lengths.shortest and drawn.max() <= lengths.longest
    assert (len(set(drawn.tolist())) == 1) == (lengths.sigma == 0)
    if lengths.sigma:  # skewed, as a log-normal is
        assert np.median(drawn) < lengths.mean


def test_the_chosen_shards_come_from_the_whole_plan(tmp_path):
    setup = tiny_setup()
    rows = extract_path.random_rows(tmp_path / "rows", extract_path.Lengths("b", 30, 0.8, 4, 128, 400).draw(), 128)
    chosen, plan = extract_path.spread(setup, rows, 1500), plan_all(setup, rows)
    numbers = [plan.index(shard) for shard in chosen]
    assert sum(shard.num_tokens for shard in chosen) == pytest.approx(1500, rel=0.35)
    assert numbers == sorted(set(numbers)) and numbers[0] < len(plan) / 4 and numbers[-1] > 3 * len(plan) / 4


def test_padding_waste_is_counted_by_hand():
    shards = [ShardPlan("train-00000", ("x", "y", "z"), (2, 4, 8))]
    assert extract_path.padding_waste(shards, 8) == pytest.approx(1 - 14 / (2 * 4 + 8))
    assert extract_path.padding_waste(shards, 24) == pytest.approx(1 - 14 / 24)


def test_naive_and_fast_ways_give_equal_rows(tmp_path):
    """Trap 5: the benchmark's two ways, one sample at a time and batched, in float32."""
    setup = tiny_setup("store.dtype=float32", "+target.options.std=0.15")
    run, lengths = setup.run, extract_path.Lengths("b", 20, 0.8, 4, 64, 12)
    target = random_weights.load(run.target, run.hardware)
    rows = extract_path.random_rows(tmp_path / "rows", lengths.draw(), 128)
    store, shards = LocalStore(tmp_path / "store"), plan_all(setup, rows)
    (tmp_path / "staging").mkdir()
    with extract_path.open_path(setup, store, rows, shards, tmp_path / "staging") as (order, desk):
        capture_jobs(target, order, desk.jobs(), Here(desk), desk.check)
    naive(target.model, rows, range(len(rows)), setup.layer_ids, tmp_path)
    seen = 0
    for marker in list_markers(store):
        shard = read_shard(fetch_shard(store, marker, tmp_path / "cache"))
        for i, sample_id in enumerate(shard.sample_ids):
            alone = load_file(tmp_path / f"{rows.sample_ids.index(sample_id)}.safetensors")
            mine = slice(int(shard.offsets[i]), int(shard.offsets[i + 1]))
            assert torch.equal(alone["token_ids"], shard.token_ids[mine].long())
            assert (alone["hidden"] - shard.hidden[mine]).abs().max() < 1e-4 < alone["hidden"].abs().max()
            seen += 1
    assert seen == len(rows) == 12


# ---------------------------------------------------------------- where it goes, and how fast


def test_a_drained_store_forgets_the_object_and_keeps_the_marker(tmp_path):
    store, path = extract_path.DrainedStore(tmp_path / "store"), tmp_path / "train-00000.safetensors"
    path.write_bytes(b"rows")
    for _ in range(2):
        store.put_file("shards/train-00000-abc.safetensors", path)
        assert store.size("shards/train-00000-abc.safetensors") == 4
        marker = {"shard_id": "train-00000", "sample_ids": ["s0"], "key": "shards/train-00000-abc.safetensors"}
        store.put_bytes("markers/train-00000.json", json.dumps(marker).encode())
        assert store.size("shards/train-00000-abc.safetensors") is None
    found = extract_path.accounts(store, [ShardPlan(f"train-0000{i}", (f"s{i}",), (1,)) for i in range(2)])
    assert found == {"lost_shards": 1, "duplicated_shards": 1, "wrong_samples": 1}


def test_a_steady_rate_leaves_out_what_came_before_the_first_marker():
    marker = lambda tokens: Marker("train-00000", "train", ["s"] * 2, [], tokens, 0, "key", 1000, "hash")
    marks = [(10.0, marker(900)), (14.0, marker(30)), (12.0, marker(50))]
    found = extract_path.steady(marks)
    assert found["tokens_per_s"] == 20 and found["samples_per_s"] == 1 and found["upload_mb_per_s"] == 0.0005
    with pytest.raises(ValueError, match="too few"):
        extract_path.steady(marks, skip=1)


def test_the_union_of_intervals_is_what_a_loop_over_every_moment_counts():
    rng = random.Random(0)
    for _ in range(200):
        starts = [rng.randrange(40) for _ in range(rng.randrange(8))]
        intervals = [(start, start + rng.randrange(12)) for start in starts]
        begin, end = sorted(rng.sample(range(50), 2))
        naive_count = sum(any(a <= moment < b for a, b in intervals) for moment in range(begin, end))
        assert union_s(intervals, begin, end) == naive_count


# ---------------------------------------------------------------- the random target


def test_a_random_target_is_healthy_and_the_same_each_time():
    setup = tiny_setup("+target.options.std=0.15", "target.canary=true")
    config, hardware = setup.run.target, setup.run.hardware
    target, again = random_weights.load(config, hardware), random_weights.load(config, hardware)
    check_target(target, config, ["capture", "decode"], setup.layer_ids)
    state, other = target.model.state_dict(), again.model.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)
    assert target.text_config.layer_types.count("linear_attention") == config.shape.num_linear_layers


def test_sizes_that_do_not_fit_the_family_are_refused():
    run = extract_path.build_run(True, "target.shape.num_linear_layers=5", "target.shape.head_dim=16")
    with pytest.raises(cli.UserError, match=r"num_linear_layers\n  got:  5\n  want: 6"):
        random_weights.text_config(run.target)
    run.target.vocab_size = None
    with pytest.raises(cli.UserError, match=r"target.vocab_size\n  got:  no size"):
        random_weights.text_config(run.target)


@pytest.mark.slow
def test_a_random_target_over_two_processes_has_the_rows_of_one():
    setup = tiny_setup()
    config = setup.run.target
    one, ids = random_weights.load(config, setup.run.hardware), torch.arange(48).view(2, 24)
    with start_group(setup.files, torch.float32, ["cpu", "cpu"], random_seed=0) as two:
        agreement = row_agreement(layers_of(two, ids, (1, 3, 6)), layers_of(one, ids, (1, 3, 6)))
    assert all(layer["largest"] < 1e-5 and layer["cosine"] > 0.99999 for layer in agreement.values())
    with start_group(setup.files, torch.float32, ["cpu", "cpu"], random_seed=1) as other:
        agreement = row_agreement(layers_of(other, ids, (1, 3, 6)), layers_of(one, ids, (1, 3, 6)))
    assert all(layer["largest"] > 0.1 for layer in agreement.values())


# ---------------------------------------------------------------- scaling


def test_a_worker_is_killed_on_the_way_and_every_shard_is_there_once(tmp_path):
    """Trap 35: the set is whole whatever the number of workers, and while it changes."""
    sizes = replace(scale.TINY, seconds=1.5)
    part = scale.measure_extraction(sizes, [1, 2], [], True, tmp_path, str(tmp_path))
    assert part["lost_shards"] == part["duplicated_shards"] == part["wrong_samples"] == 0
    assert set(part["gpus"]) == {"1", "2"} and all(found["tokens_per_s"] > 0 for found in part["gpus"].values())
    (kill,) = part["kills"]
    assert kill["killed"] == kill["left"] == 1 and kill["recovered_s"] > 0 and part["shards"] > 4
    table = scale.markdown({"extract": part}, {})
    assert "| 2 |" in table and "lost 0, twice 0" in table and "WRONG" not in table
    assert scale.wrong({"extract": part | {"wrong_samples": 3}}) == ["WRONG extract: wrong_samples 3"]


def test_numbers_of_gpus_run_beside_each_other_where_they_fit():
    assert scale_train.rounds([1, 2, 4, 8], 8) == [[8], [4, 2, 1]]
    assert scale_train.rounds([1, 2], 2) == [[2], [1]]
    with pytest.raises(ValueError, match="4 GPUs are wanted, 2 are here"):
        scale_train.rounds([4], 2)


def test_efficiency_is_the_rate_a_gpu_over_that_of_one():
    size = {"samples_per_s": 10.0, "steps_per_s": 1.0, "blocks_per_s": 100.0, "peak_bytes": 10**9}
    part = {"sizes": {"1 zero1": size, "4 zero1": size | {"samples_per_s": 36.0}, "4 zero3": size}, "rows": 8,
            "flops_per_block": 1e12, "failed": ["8"]}  # fmt: skip
    rows = [line for line in scale.train_lines(part, {"matrix_tflops": 200.0}) if line.startswith("| 1 |")]
    assert "| 1.000 |" in rows[0] and "| 0.900 |" in rows[1] and "| 0.50 |" in rows[0]
    assert scale.wrong({"train": part}) == ["FAILED train on 8 GPUs"]


@pytest.mark.slow
def test_training_is_measured_under_every_stage_on_one_and_on_two_ranks(tmp_path):
    out = tmp_path / "out"
    assert scale.main(["--tiny", "--parts", "train", "--out", str(out)]) == 0
    sizes = json.loads((out / "scale.json").read_text())["figures"]["train"]["sizes"]
    assert set(sizes) == {f"{count} zero{stage}" for count in (1, 2) for stage in (1, 2, 3)}
    for count in (1, 2):  # the same rows and seeds: the stage changes the memory, not the loss
        losses = [sizes[f"{count} zero{stage}"]["loss"] for stage in (1, 2, 3)]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    assert all(found["samples_per_s"] > 0 for found in sizes.values())
    assert Path(out, "train-2.log").exists() and "| 3 | 2 |" in (out / "scale.md").read_text()
