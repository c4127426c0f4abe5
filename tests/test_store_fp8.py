"""Eight-bit rows: codes and scales, their way through buffer, shard, verify, loader and training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers_store import make_run, make_shard, publish
from helpers_train import build_run, make_store, metrics, one_rank, run_here
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dflash_train import extract, regenerate
from dflash_train.config import StoreConfig
from dflash_train.engine.inputs import row_bytes
from dflash_train.records import Features
from dflash_train.store import budget, local
from dflash_train.store.fp8 import E4M3, LARGEST, dequantize, quantize, scale_problems
from dflash_train.store.gather import RowBuffer, RowLayout, gather_rows
from dflash_train.store.loader import RowReader, ShardCache
from dflash_train.store.order import Row
from dflash_train.store.shard import fetch_shard, list_markers, non_finite_rows, read_shard, write_shard
from dflash_train.store.verify import content_problems
from dflash_train.util.errors import UserError

CPU = torch.device("cpu")
CODES = torch.arange(256, dtype=torch.uint8).view(E4M3)
FINITE = CODES.float()[torch.isfinite(CODES.float())]


def rows_like_a_model(num_rows=64, layers=3, hidden=32, seed=0) -> torch.Tensor:
    """bf16 rows whose layers differ in size by orders of magnitude and have a few channels that tower over the rest."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, layers, hidden, generator=generator)
    rows *= 10.0 ** torch.arange(layers)[:, None] * torch.rand(num_rows, 1, 1, generator=generator).exp()
    rows[:, :, 3] *= 50
    return rows.flatten(1).bfloat16()


def naive_quantize(rows: torch.Tensor, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """(values, scales) in float64: the nearest of all e4m3 values, one number at a time."""
    table = np.unique(FINITE.double().numpy())
    parts = rows.double().numpy().reshape(len(rows), layers, -1)
    scales, values = np.ones((len(rows), layers)), np.zeros(parts.shape)
    for r, layer in np.ndindex(len(rows), layers):
        largest = np.float32(np.abs(parts[r, layer]).max())
        scales[r, layer] = 1.0 if largest == 0 else np.float32(largest / np.float32(LARGEST))
        for i, x in enumerate(parts[r, layer]):
            values[r, layer, i] = np.abs(table - x / scales[r, layer]).argmin()
    return table[values.astype(int)].reshape(len(rows), -1), scales


# ---------------------------------------------------------------- codes


def test_codes_are_the_nearest_ones_and_scales_are_the_largest_value_over_448():
    rows = rows_like_a_model(num_rows=20)
    rows[4], rows[5, :32] = 0, 0  # a row of zeros, and a layer of zeros in another
    codes, scales = quantize(rows, 3)
    values, want = naive_quantize(rows, 3)
    assert codes.dtype == E4M3 and scales.dtype == torch.float32
    assert scales.double().numpy().tolist() == want.tolist()
    exact = rows.double().numpy() / np.repeat(want, 32, axis=1)
    difference = np.abs(codes.double().numpy() - exact) - np.abs(values - exact)
    assert np.abs(difference).max() < 1e-6  # equally near: ties may fall either way
    assert scales[4].tolist() == [1, 1, 1] and scales[5, 0] == 1 and not codes[4].float().any()
    assert scale_problems(codes, scales) == []


def test_every_code_decodes_to_its_value_as_the_slow_way_says():
    codes = FINITE.to(E4M3).view(1, -1).repeat(3, 1)
    scales = torch.tensor([[1.0], [3e-5], [700.0]])
    slow = codes.float() * scales
    assert torch.equal(dequantize(codes, scales, torch.float32), slow)
    assert torch.equal(dequantize(codes, scales), slow.bfloat16())
    assert len(FINITE) == 254 and FINITE.abs().max() == LARGEST


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.floats(1e-30, 1e30), st.integers(0, 999))
def test_a_decoded_value_is_within_a_sixteenth_or_a_thousandth_of_its_scale(layers, hidden, size, seed):
    rows = torch.randn(7, layers * hidden, generator=torch.Generator().manual_seed(seed)).mul(size).bfloat16()
    codes, scales = quantize(rows, layers)
    error = (dequantize(codes, scales, torch.float64) - rows.double()).abs()
    bound = rows.double().abs() / 16 + scales.double().repeat_interleave(hidden, 1) / 1000
    assert (error <= bound).all() and scale_problems(codes, scales) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_never_hides_in_eight_bits(tmp_path, bad):
    rows = rows_like_a_model(10)
    rows[4, 40] = bad  # layer 1 of row 4, which is sample s1's
    codes, scales = quantize(rows, 3)
    assert non_finite_rows(scales) == [4]
    shard = replace(make_shard(), hidden=codes, hidden_scale=scales)
    with pytest.raises(UserError, match=r"not positive|samples \['s1'\]"):
        write_shard(tmp_path / "a.safetensors", shard)
    assert list(tmp_path.iterdir()) == []


def test_of_all_codes_only_the_two_nans_are_not_finite():
    assert non_finite_rows(CODES.view(256, 1)) == [0x7F, 0xFF]
    assert non_finite_rows(CODES[:0x7F].view(1, -1)) == []


# ---------------------------------------------------------------- buffer and bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8"])
@pytest.mark.parametrize("last_hidden", [False, True])
def test_rows_that_went_through_a_buffer_are_what_the_features_said(dtype, last_hidden):
    layout = RowLayout.of(8, 3, StoreConfig(kind="local", root="x", dtype=dtype, last_hidden=last_hidden))
    buffer = RowBuffer(40, layout.width, layout.buffer_dtype, CPU)
    captured, lengths = [], [torch.tensor([7, 2, 5]), torch.tensor([4, 1, 4])]
    for seed, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda width, generator=generator: torch.randn(3, 7, width, generator=generator).bfloat16()
        captured.append(Features(draw(24), draw(8) if last_hidden else None))
        buffer.put(layout.gather(captured[-1], length))
    rows = layout.split(buffer.rows())
    join = lambda pick: torch.cat([gather_rows(Features(pick(f)), n) for f, n in zip(captured, lengths)])
    hidden = join(lambda f: f.hidden)
    if dtype == "fp8":
        codes, scales = quantize(hidden, 3)
        assert torch.equal(rows["hidden"].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(rows["hidden_scale"], scales)
    else:
        assert torch.equal(rows["hidden"], hidden.to(rows["hidden"].dtype)) and rows["hidden_scale"] is None
    assert (rows["last_hidden"] is None) == (not last_hidden)
    if last_hidden:
        want = torch.float32 if dtype == "float32" else torch.bfloat16  # logits are rebuilt from it: never eight bits
        assert rows["last_hidden"].dtype == want and torch.equal(
            rows["last_hidden"], join(lambda f: f.last_hidden).to(want)
        )
    stored = sum(t.nbytes for t in rows.values() if t is not None)
    assert stored == layout.row_bytes * buffer.filled == budget.row_bytes(
        8, 3, StoreConfig(kind="local", root="x", dtype=dtype, last_hidden=last_hidden)) * 23  # fmt: skip


def test_the_budget_of_eight_bits_is_half_and_four_bytes_a_layer():
    """limits: 25,620 bytes a token for five layers of 5,120."""
    config = StoreConfig(kind="local", root="x", dtype="fp8")
    config.check()
    assert budget.row_bytes(5120, 5, config) == 25_620
    assert "x fp8 = 25.62 KB a token" in budget.storage_line(5120, 5, config, 10, 1000)
    config.last_hidden = True
    assert budget.row_bytes(5120, 5, config) == 25_620 + 2 * 5120
    with pytest.raises(UserError, match=r"store\.dtype(.|\n)*bfloat16 . float32 . fp8"):
        StoreConfig(kind="local", root="x", dtype="float8_e4m3fn").check()


def eight_bit_shard(width=24, layers=3, last_hidden=None, **options):
    shard = make_shard(width=width, last_hidden=last_hidden, **options)
    codes, scales = quantize(shard.hidden, layers)
    return replace(shard, hidden=codes, hidden_scale=scales)


@pytest.mark.parametrize("last_hidden", [None, 8])
def test_an_eight_bit_shard_reads_back_as_it_was_written(tmp_path, last_hidden):
    shard = eight_bit_shard(last_hidden=last_hidden)
    write_shard(tmp_path / "a.safetensors", shard)
    back = read_shard(tmp_path / "a.safetensors")
    assert torch.equal(back.hidden.view(torch.uint8), shard.hidden.view(torch.uint8))
    assert torch.equal(back.hidden_scale, shard.hidden_scale)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as f:
        dtypes = {name: f.get_slice(name).get_dtype() for name in ("hidden", "hidden_scale")}
    assert dtypes == {"hidden": "F8_E4M3", "hidden_scale": "F32"}


BROKEN = {
    "codes without scales": lambda s: replace(s, hidden_scale=None),
    "scales without codes": lambda s: replace(s, hidden=s.hidden.float()),
    "scales of another shape": lambda s: replace(s, hidden_scale=s.hidden_scale[:, :0]),
    "scales that divide no columns": lambda s: replace(s, hidden_scale=s.hidden_scale.repeat(1, 3)),
    "too few scales": lambda s: replace(s, hidden_scale=s.hidden_scale[:-1]),
    "a zero scale": lambda s: replace(s, hidden_scale=s.hidden_scale * 0),
    "a negative scale": lambda s: replace(s, hidden_scale=-s.hidden_scale),
    "half-precision scales": lambda s: replace(s, hidden_scale=s.hidden_scale.half()),
    "a NaN code": lambda s: replace(s, hidden=CODES[[0x7F]].repeat(*s.hidden.shape)),
    "a last hidden state of codes": lambda s: replace(s, last_hidden=s.hidden),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_inconsistent_eight_bit_shard_is_not_written(tmp_path, name):
    with pytest.raises(UserError, match=r"a\.safetensors"):
        write_shard(tmp_path / "a.safetensors", BROKEN[name](eight_bit_shard()))
    assert list(tmp_path.iterdir()) == []


def test_verify_sees_scales_and_codes_that_do_not_belong_together(tmp_path):
    shard = eight_bit_shard()
    marker = publish(local.LocalStore(tmp_path / "store"), tmp_path, "train-00000", shard)
    manifest = {"layer_ids": [1, 2, 5], "hidden_size": 8, "dtype": "fp8", "last_hidden": False}
    shard = replace(shard, provenance={"layer_ids": [1, 2, 5]})
    assert content_problems(shard, marker, manifest) == []
    codes, scales = shard.hidden.view(torch.uint8).clone(), shard.hidden_scale.clone()
    codes[3, 8:16] = 0  # nothing was copied for one layer of one row
    zero = replace(shard, hidden=codes.view(E4M3))
    assert content_problems(zero, marker, manifest) == [
        "1 rows of hidden are all zero in captured layer(s) [1]",
        "1 rows whose codes do not fill the range of their scale",
    ]
    doubled = replace(shard, hidden=dequantize(shard.hidden, scales / 2).float().to(E4M3))
    assert "codes do not fill the range" in str(content_problems(doubled, marker, manifest))
    (text,) = content_problems(shard, marker, manifest | {"dtype": "bfloat16"})
    assert "(24, 'fp8', False), the manifest says (24, 'bfloat16', False)" in text
    assert "2 layers" in str(content_problems(shard, marker, manifest | {"layer_ids": [1, 2], "hidden_size": 12}))


# ---------------------------------------------------------------- a run


@pytest.fixture
def answered(monkeypatch):
    monkeypatch.setattr(regenerate, "ensure_answers", lambda run: run.answers_dir)


def shards_of(run):
    store = local.open_store(run.store, run.store_name)
    return [read_shard(fetch_shard(store, marker, f"{run.work_dir}/cache")) for marker in list_markers(store)]


def test_an_eight_bit_extraction_has_the_rows_of_a_float_one_within_eight_bits(tmp_path, answered, capsys):
    changes = {"store__last_hidden": True, "store__shard_bytes": 10**6}
    exact, small = make_run(tmp_path / "a", **changes), make_run(tmp_path / "b", store__dtype="fp8", **changes)
    assert extract.main(exact) is None and extract.main(small) is None
    small.extract.verify = True
    assert extract.main(small) == 0, capsys.readouterr().out
    for want, got in zip(shards_of(exact), shards_of(small), strict=True):
        assert got.sample_ids == want.sample_ids and torch.equal(got.token_ids, want.token_ids)
        codes, scales = quantize(want.hidden, 2)
        assert torch.equal(got.hidden.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(got.hidden_scale, scales)
        assert torch.equal(got.last_hidden, want.last_hidden.bfloat16())


def test_a_store_of_one_dtype_is_not_continued_in_another(tmp_path, answered):
    extract.main(make_run(tmp_path, store__dtype="fp8"))
    with pytest.raises(UserError, match="dtype"):
        extract.main(make_run(tmp_path, store__dtype="bfloat16"))


def test_the_loader_decodes_rows_to_bfloat16(tmp_path):
    exact, small = make_store(tmp_path / "a", [[20, 30], [25]]), make_store(tmp_path / "b", [[20, 30], [25]], fp8=True)
    rows = [Row(0, ((0, 0), (1, 0))), Row(0, ((0, 1),)), Row(0, ())]
    batches = []
    for store in (exact, small):
        cache = ShardCache(store, store.folder.parent / "cache", 10**9)
        batches.append(RowReader(cache, list_markers(store, "train"), 48).read(rows))
    want, got = batches
    assert got.hidden.dtype == torch.bfloat16 and torch.equal(got.token_ids, want.token_ids)
    shape = (-1, want.hidden.shape[-1])
    decoded = dequantize(*quantize(want.hidden.reshape(shape), 2)).view_as(got.hidden)
    assert torch.equal(got.hidden, decoded) and not torch.equal(got.hidden, want.hidden)


def test_training_on_an_eight_bit_store_learns_as_on_a_bfloat16_one(tmp_path):
    losses, heldout = {}, {}
    with one_rank():
        for fp8 in (False, True):
            folder = tmp_path / str(fp8)
            make_store(folder / "store", [[20 + 2 * i for i in range(12)]] * 2, [[30, 22]], fp8=fp8)
            learn = {"train.epochs": 4, "train.lr": 1e-2, "train.global_batch": 2, "train.eval_every": 20}
            run_here(folder, **learn, **{"train.eval_samples": 2})
            losses[fp8] = [row["loss"] for row in metrics(folder)]
            heldout[fp8] = metrics(folder, "heldout_loss")[-1]["heldout_loss"]
    assert losses[True][-1] < 0.5 * losses[True][0]
    assert losses[True] != losses[False]
    assert np.allclose(losses[True][:15], losses[False][:15], rtol=0.1)  # later, small differences have grown
    assert heldout[True] == pytest.approx(heldout[False], rel=0.3)


def test_host_memory_is_reckoned_for_decoded_rows(tmp_path):
    run = build_run(tmp_path)
    manifest = {"layer_ids": [1, 2], "hidden_size": 64, "last_hidden": False}
    assert row_bytes(run, manifest | {"dtype": "fp8"}) == row_bytes(run, manifest | {"dtype": "bfloat16"})
