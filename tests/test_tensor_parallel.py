"""A target in shares of its heads: the shares together are the model, each is read alone, and what cannot be split is
refused. Ranks are threads here; test_tensor_parallel_group.py has them as processes."""

import json

import pytest
import torch
from helpers_hybrid import everything_in_float64, relative, save_composite, tiny_float64
from helpers_plan import run_27b
from helpers_target import random_ids, tiny
from helpers_tensor_parallel import CPU, like_27b, load_ranks, run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_train.config import TargetConfig
from dflash_train.planning.fit import Problem, extract_parts, knobs, with_key
from dflash_train.planning.shapes import (
    layers_parameters,
    share_sizes,
    sizes_from_files,
    table_parameters,
    target_sizes,
)
from dflash_train.target import sharded_load
from dflash_train.target.sharded_load import FileWeights, RandomWeights, Share, check_split, load_share, piece_of
from dflash_train.target.tiny import Options, save_tiny, tiny_config
from dflash_train.util.errors import UserError

EXACT, ROUNDED = 1e-12, 1e-4  # in float64; in float32, where a tiny hybrid itself is 1.5e-5 off its float64 twin
LAYERS = (0, 1)


def by_layer(features) -> dict[int, torch.Tensor]:
    return dict(enumerate(features.hidden.chunk(len(LAYERS), dim=-1))) | {-1: features.last_hidden}


def worst(got, want) -> float:
    return max(relative(rows, by_layer(want)[layer]) for layer, rows in by_layer(got).items())


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("arch", ("qwen3_5", "qwen3", "llama"))
def test_rows_of_two_ranks_equal_one_devices_and_every_rank_has_them(arch):
    """In float64 to 1e-12, in every captured layer and after the final norm; two sums a layer."""
    ids, single = torch.stack([random_ids(70, 1), random_ids(70, 2)]), tiny_float64(arch)
    decoders = [decoder.double() for decoder in load_ranks(single.text_config, single.files.folder, 2)]
    with everything_in_float64():
        want = single.capture(ids, LAYERS, True)
        ranks, calls = run_ranks(decoders, ids, LAYERS)
    assert max(worst(got, want) for got in ranks) < EXACT
    assert torch.equal(ranks[0].hidden, ranks[1].hidden)
    assert calls == [2 * single.spec.num_layers] * 2


@pytest.mark.parametrize("arch", ("qwen3_5", "qwen3"))
def test_in_float32_two_ranks_are_as_near_the_exact_rows_as_one_device(arch):
    """What a split changes is the order of sums, and float32 has no better one."""
    ids, target, exact = random_ids(70, 1)[None], tiny(arch), tiny_float64(arch)
    with everything_in_float64():
        want = exact.capture(ids, LAYERS, True)
    single = target.capture(ids, LAYERS, True)
    (split, _), _ = run_ranks(load_ranks(target.text_config, target.files.folder, 2), ids, LAYERS)
    assert worst(split, want) < 2 * worst(single, want) < ROUNDED


def test_in_bfloat16_partial_sums_add_no_error_to_speak_of():
    """Each rank's part is rounded before it is added: as far from the float32 rows as one device's, within a tenth."""
    text, ids = like_27b(8), random_ids(64, 3)[None]
    weights = RandomWeights(text, 7, torch.bfloat16, CPU)
    (exact,), _ = run_ranks(load_ranks(text, weights, 1), ids, LAYERS)
    (one,), _ = run_ranks(load_ranks(text, weights, 1, torch.bfloat16), ids, LAYERS)
    (two, _), _ = run_ranks(load_ranks(text, weights, 2, torch.bfloat16), ids, LAYERS)
    assert worst(two, exact) < 1.1 * worst(one, exact) < 0.02
    assert worst(two, one) < 0.01


def test_right_padding_reaches_no_real_row():
    """Trap 3: lengths 12 and 17 in one batch, on two ranks, against each alone on one device."""
    single, samples = tiny_float64("qwen3_5"), [random_ids(12, 5), random_ids(17, 6)]
    batch = torch.full((2, 17), 50)
    for row, ids in zip(batch, samples):
        row[: len(ids)] = ids
    decoders = [decoder.double() for decoder in load_ranks(single.text_config, single.files.folder, 2)]
    with everything_in_float64():
        (got, _), _ = run_ranks(decoders, batch, LAYERS)
        for row, ids in enumerate(samples):
            want = single.capture(ids[None], LAYERS).hidden[0]
            assert relative(got.hidden[row, : len(ids)], want) < EXACT


@pytest.mark.parametrize("world", (2, 4))
def test_the_27bs_ratios_of_heads_are_kept_and_random_weights_are_one_model_for_any_world(world):
    """3 value heads a key head, 6 query heads a KV head, with its gate."""
    text, ids = like_27b(), random_ids(70, 3)[None]
    weights = RandomWeights(text, 7, torch.float32, CPU, std=0.15)
    (want,), _ = run_ranks(load_ranks(text, weights, 1), ids, LAYERS)
    ranks, _ = run_ranks(load_ranks(text, weights, world), ids, LAYERS)
    assert worst(ranks[0], want) < ROUNDED and worst(ranks[-1], want) < ROUNDED
    other = RandomWeights(text, 8, torch.float32, CPU, std=0.15)
    assert worst(run_ranks(load_ranks(text, other, 1), ids, LAYERS)[0][0], want) > 0.5


@pytest.mark.parametrize("drop", ((0, "linear_attn.out_proj"), (1, "mlp.down_proj"), (3, "self_attn.o_proj")))
def test_a_sum_that_is_left_out_is_far_off(drop):
    """Control: each of the three kinds of sums is needed."""
    target, ids = tiny("qwen3_5"), random_ids(30, 1)[None]
    (got, _), _ = run_ranks(load_ranks(target.text_config, target.files.folder, 2), ids, LAYERS, drop=drop)
    assert relative(got.last_hidden, target.capture(ids, LAYERS, True).last_hidden) > 0.05


class Rolled:
    """Weights whose rows of one kind are given out one head off."""

    def __init__(self, weights, kind: str, by: int):
        self.weights, self.kind, self.by = weights, kind, by

    def read(self, piece):
        value = self.weights.read(piece)
        return value.roll(self.by, 0) if self.kind in piece.name else value


@pytest.mark.parametrize("kind, by", (("in_proj_z", 16), ("A_log", 1), ("q_proj", 32), ("v_proj", 16), ("conv1d", 16)))
def test_heads_in_another_order_are_far_off(kind, by):
    """Control: the bound above sees one kind of heads moved by one."""
    text, ids = like_27b(), random_ids(40, 1)[None]
    weights = RandomWeights(text, 7, torch.float32, CPU, std=0.15)
    (want,), _ = run_ranks(load_ranks(text, weights, 1), ids, LAYERS)
    (got, _), _ = run_ranks(load_ranks(text, Rolled(weights, kind, by), 2), ids, LAYERS)
    assert relative(got.last_hidden, want.last_hidden) > 1e-3


def test_a_fused_product_cut_as_one_block_is_far_off(monkeypatch):
    """Control: q, k and v are shared out each by itself; halves of [q | k | v] have the right shape and wrong heads."""
    text, ids = like_27b(), random_ids(40, 1)[None]
    weights = RandomWeights(text, 7, torch.float32, CPU, std=0.15)
    (want,), _ = run_ranks(load_ranks(text, weights, 1), ids, LAYERS)
    monkeypatch.setattr(sharded_load, "FUSED", ())
    (got, _), _ = run_ranks(load_ranks(text, weights, 2), ids, LAYERS)
    assert relative(got.hidden, want.hidden) > 0.05


# ---------------------------------------------------------------- loading


class Counted:
    """safe_open, counting the bytes that leave the files."""

    def __init__(self):
        self.largest = self.total = 0

    def __call__(self, *args, **kwargs):
        outer, file = self, safe_open(*args, **kwargs)

        class Slice:
            def __init__(self, stored):
                self.get_shape, self.stored = stored.get_shape, stored

            def __getitem__(self, index):
                value = self.stored[index]
                outer.total, outer.largest = outer.total + value.nbytes, max(outer.largest, value.nbytes)
                return value

        class File:
            keys = file.keys

            def get_slice(self, name):
                return Slice(file.get_slice(name))

        return File()


def test_a_rank_reads_its_own_slices_and_no_more(tmp_path, monkeypatch):
    """No process holds the whole model: bytes read are bytes held, and beside norms and embedding a W-th of all."""
    folder = save_tiny(tmp_path / "model", Options("qwen3_5", num_layers=4))
    text, whole = tiny_config(Options("qwen3_5", num_layers=4)), load_file(folder / "model.safetensors")
    whole_bytes = sum(value.nbytes for name, value in whole.items())
    replicated = sum(v.nbytes for k, v in whole.items() if "norm" in k or "embed" in k)
    for rank in range(2):
        monkeypatch.setattr(sharded_load, "safe_open", counted := Counted())
        decoder = load_share(text, FileWeights(folder), Share(rank, 2), torch.float32, CPU)
        held = sum(parameter.nbytes for parameter in decoder.parameters())
        assert counted.total == held == replicated + (whole_bytes - replicated) // 2
        assert counted.largest == max(parameter.nbytes for parameter in decoder.parameters())


def test_the_ranks_pieces_together_are_every_weight_once():
    """Each element of each parameter is on exactly one rank, or whole on all of them."""
    text = like_27b()
    shapes = {name: tuple(p.shape) for name, p in sharded_load.meta_decoder(text, torch.float32).named_parameters()}
    assert len(shapes) > 50
    for name, shape in shapes.items():
        seen = torch.zeros(shape, dtype=torch.int64)
        index = torch.arange(seen.numel()).view(shape)
        for rank in range(4):
            seen.view(-1)[piece_of(name, shape, text, Share(rank, 4)).cut(index).reshape(-1)] += 1
        assert seen.unique().tolist() in ([1], [4]), name
        assert (seen.unique().tolist() == [4]) == ("norm" in name or "embed" in name), name


@pytest.mark.parametrize("shard_size", ("50GB", "100KB"))
def test_an_image_text_checkpoint_in_several_files_is_read_under_its_own_names(tmp_path, shard_size):
    """Traps 2, 7: text part of a composite; its vision tower, and a draft head it ships, are left alone."""
    folder = save_composite(tmp_path / "model", max_shard_size=shard_size)
    save_file({"mtp.layers.0.self_attn.q_proj.weight": torch.zeros(3), "mtp.embed_tokens.weight": torch.zeros(3)},
              folder / "mtp.safetensors")  # fmt: skip
    target, ids = tiny("qwen3_5"), random_ids(30, 4)[None]
    (got, _), _ = run_ranks(load_ranks(target.text_config, folder, 2), ids, LAYERS)
    assert relative(got.hidden, target.capture(ids, LAYERS).hidden) < ROUNDED


@pytest.mark.parametrize("tied", (True, False))
def test_the_head_read_from_the_files_is_the_models_bit_for_bit(tied):
    """Trap 7: embedding, head and final norm; one tensor where they are tied."""
    target = tiny("qwen3_5", tied=tied)
    got, want = FileWeights(target.files.folder).head(target.text_config, torch.float32), target.head()
    assert torch.equal(got.embedding, want.embedding) and torch.equal(got.head, want.head)
    assert torch.equal(got.final_norm, want.final_norm) and (got.head is got.embedding) == tied
    assert (got.final_norm_offset, got.final_norm_eps) == (want.final_norm_offset, want.final_norm_eps)


def test_rotary_frequencies_stay_float32_in_a_bfloat16_share():
    """Trap 19: equal to those of the library's own loading."""
    target = tiny("qwen3_5")
    share = load_share(target.text_config, FileWeights(target.files.folder), Share(1, 2), torch.bfloat16, CPU)
    assert share.layers[0].linear_attn.in_proj_qkv.weight.dtype == torch.bfloat16
    assert torch.equal(share.rotary_emb.inv_freq, target.decoder.rotary_emb.inv_freq)
    assert share.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("change", ("missing", "shape"))
def test_a_weight_that_is_missing_or_of_another_shape_is_named(tmp_path, change):
    """Trap 7: never a random one, never a part of the wrong one."""
    folder, name = save_tiny(tmp_path / "model", Options("qwen3_5")), "model.layers.1.linear_attn.dt_bias"
    tensors = load_file(folder / "model.safetensors")
    lost = tensors.pop(name)
    if change == "shape":
        tensors[name] = torch.cat([lost, lost])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.linear_attn\.dt_bias"):
        load_ranks(tiny_config(Options("qwen3_5")), folder, 2)


@pytest.mark.parametrize("arch", ("qwen3_5", "qwen3"))
def test_what_plan_reckons_for_a_rank_is_what_a_rank_holds(arch):
    """Weights per GPU: layers in shares, the embedding whole, no head."""
    text = tiny(arch).text_config
    sizes = target_sizes(sizes_from_files(TargetConfig(name="x", kind="hf"), text.to_dict()))[0]
    decoder = load_share(text, FileWeights(tiny(arch).files.folder), Share(1, 2), torch.float32, CPU)
    share = share_sizes(sizes, 2)
    planned = layers_parameters(share) + table_parameters(sizes) + sizes.hidden_size
    assert planned == sum(parameter.numel() for parameter in decoder.parameters())


def test_plan_gives_the_27b_on_two_small_cards_a_half_each_and_names_the_key():
    """24.35B of layers halved beside 1.27B of embedding: 26.9 GB a card in bfloat16."""
    run, sizes = run_27b("a6000x2")
    split = with_key(run, "extract.gpus_per_worker", 2)
    one, two = (extract_parts(Problem(r, sizes)) for r in (run, split))
    assert two["weights"] == pytest.approx(2 * (24.35e9 / 2 + 1.271e9), rel=2e-3)
    assert two["activations"] < one["activations"]
    assert Problem(split, sizes).capturing == 2 and Problem(run, sizes).capturing == 1
    assert knobs("extract", run)["extract.gpus_per_worker"] == [2]
    assert knobs("extract", with_key(run, "hardware.num_gpus", 8))["extract.gpus_per_worker"] == [2, 4]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("world, name", ((4, "num_key_value_heads=2"), (3, "num_attention_heads=4")))
def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused_naming_them(world, name):
    with pytest.raises(UserError, match=name) as refused:
        check_split(tiny_config(Options("qwen3_5")), world)
    assert "want: 1 | 2" in str(refused.value).replace("  ", " ")


@pytest.mark.parametrize("arch", ("qwen3_5_moe", "qwen3_next"))
def test_mixtures_are_refused_by_name(arch):
    with pytest.raises(UserError, match=tiny_config(Options(arch)).model_type):
        check_split(tiny_config(Options(arch)), 2)


def test_a_parameter_without_a_rule_is_refused_by_name():
    """A bias behind a sum would be added once a rank."""
    text = tiny_config(Options("llama"))
    text.attention_bias = True
    weights = RandomWeights(text, 0, torch.float32, CPU)
    with pytest.raises(UserError, match=r"layers.0.self_attn.\w+.bias"):
        load_share(text, weights, Share(0, 2), torch.float32, CPU)


def test_the_configs_of_ranks_leave_the_whole_ones_alone():
    text = like_27b()
    before = json.dumps(text.to_dict(), sort_keys=True, default=str)
    local = sharded_load.local_config(text, 4)
    assert (local.num_attention_heads, local.num_key_value_heads, local.linear_num_value_heads) == (6, 1, 3)
    assert json.dumps(text.to_dict(), sort_keys=True, default=str) == before
