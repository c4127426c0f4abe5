"""DeepSpeed equals a plain loop: every stage, accumulation and number of ranks; fp32 masters."""

import pytest
import torch
from helpers_train import one_rank
from helpers_train_ranks import CPU, Toy, assert_equal, numerator, run_plain, run_toy, toy_data, toy_settings

from dflash_train.config import ZeroConfig
from dflash_train.engine import zero
from dflash_train.util.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def _process_group():
    with one_rank():
        yield


@pytest.fixture(scope="module")
def plain() -> dict:
    return run_plain()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_training_in_deepspeed_equals_a_plain_loop(plain, stage, accumulation):
    """Traps 37, 41: sum then divide, whatever the accumulation; losses equal across stages."""
    assert_equal(run_toy(stage, accumulation), plain)


def test_stage_3_parameters_are_empty_outside_forward_and_gathered_for_files():
    """Trap 41."""
    got = run_toy(3, 1)
    assert set(map(tuple, got["shapes"].values())) == {(0,)}
    assert {name: tuple(torch.tensor(w).shape) for name, w in got["weights"].items()} == {
        name: tuple(p.shape) for name, p in Toy().named_parameters()
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_in_bfloat16_a_tiny_step_changes_the_masters_and_not_the_weights(stage):
    """Trap 42."""
    from deepspeed.utils import safe_get_full_fp32_param

    settings = toy_settings(dtype="bfloat16", micro_batch=8)
    engine = zero.ZeroEngine(Toy(), settings, ZeroConfig(stage), 1, CPU)
    weight = engine.engine.module.first
    before, before_weights = safe_get_full_fp32_param(weight).clone(), engine.gathered_state_dict()["first"]
    inputs, targets, weights = toy_data()
    engine.set_learning_rate(1e-6)
    engine.backward(numerator(engine(inputs[0]), targets[0], weights[0]), float(weights[0].sum()))
    after = safe_get_full_fp32_param(weight)
    change = (after - before).abs()
    assert before.dtype == torch.float32 and before_weights.dtype == torch.bfloat16
    assert 0.5e-6 < float(change.median()) < 2e-6
    assert (engine.gathered_state_dict()["first"] == before_weights).float().mean() > 0.95


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_trains_like_float32_within_its_precision(plain, stage):
    """Trap 42."""
    got = run_toy(stage, 4, dtype="bfloat16")
    assert got["losses"] == pytest.approx(plain["losses"], rel=2e-2)


def test_matrices_decay_and_vectors_do_not():
    groups = zero.parameter_groups(Toy(), 0.3)
    seen = [(group["weight_decay"], [p.dim() for p in group["params"]]) for group in groups]
    assert seen == [(0.3, [2, 2]), (0.0, [1])]


def test_the_engines_config_is_plain_values():
    """Trap 37."""

    def plain_types(value) -> bool:
        if type(value) is dict:
            return all(type(key) is str and plain_types(item) for key, item in value.items())
        return type(value) in (int, float, str, bool)

    config = zero.deepspeed_config(toy_settings(), ZeroConfig(2), 4)
    assert plain_types(config) and config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_batch_numbers_that_do_not_divide_are_refused_with_the_numbers():
    """Trap 37."""
    settings = toy_settings(global_batch=7, micro_batch=2)
    with pytest.raises(UserError, match=r"7 rows with micro_batch=2 on 1 rank"):
        settings.check_world(1)
    assert toy_settings(global_batch=16, micro_batch=2).check_world(4) == 2


def test_half_a_launch_environment_is_refused(monkeypatch):
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="WORLD_SIZE=4 without RANK"):
        zero._fill_launch_variables()
