"""Times, terabytes and money, by hand from the published figures of the 27B."""

from dataclasses import replace

import pytest
from helpers_plan import run_27b

from dflash_train.planning import cost, speed
from dflash_train.planning.shapes import read_parameters
from dflash_train.planning.speed import Rates

H200, A6000 = Rates(4.3e12, 7.9e14), Rates(7.68e11, 1.548e14)
UNKNOWN = Rates(None, None)


def test_a_token_takes_48_7_gflop_and_47_2_up_to_the_last_captured_layer():
    _, sizes = run_27b()
    assert speed.layer_flops(sizes) == pytest.approx(48.7e9, rel=2e-3)
    assert speed.layer_flops(sizes, 62) == pytest.approx(47.2e9, rel=2e-3)
    for rates, tokens_per_s in ((H200, 16_100), (A6000, 3_160), (Rates(1.6e12, 5.038e14), 10_300)):
        assert rates.flops / speed.layer_flops(sizes) == pytest.approx(tokens_per_s, rel=0.02)


def test_a_verify_pass_reads_51_2_gigabytes_in_11_9_ms_on_an_h200_and_33_4_on_two_a6000():
    _, sizes = run_27b()
    assert 2 * read_parameters(sizes, 1) == pytest.approx(51.2e9, rel=2e-3)
    no_context = lambda nodes, rates, ways=1: 1000 * speed.verify_s(sizes, nodes, 0, 2, rates, ways)
    assert no_context(1, H200) == pytest.approx(11.9, rel=0.01)
    assert no_context(1, A6000, 2) == pytest.approx(33.4, rel=0.01)
    assert no_context(200, A6000, 2) == pytest.approx(33.4, rel=0.02)  # then the products bound it
    assert no_context(256, A6000, 2) == pytest.approx(42, rel=0.02)
    assert no_context(512, A6000, 2) == pytest.approx(85, rel=0.01)
    assert no_context(1, A6000) == pytest.approx(2 * no_context(1, A6000, 2))  # spread layers wait for each other
    with_context = 1000 * speed.verify_s(sizes, 1, 4096, 2, H200)
    assert with_context - no_context(1, H200) == pytest.approx(1000 * 4096 * 65_536 / 4.3e12)


def test_a_block_takes_230_gflop_to_train_at_16_slots_and_112_at_8():
    run, _ = run_27b()
    assert speed.block_flops(run.drafter) == pytest.approx(230e9, rel=2e-3)
    eight = replace(run.drafter, block_size=8)
    assert speed.block_flops(eight) == pytest.approx(112e9, rel=4e-3)
    assert 7.9e14 / speed.block_flops(run.drafter) == pytest.approx(3_430, rel=5e-3)
    assert 7.9e14 / speed.block_flops(eight) == pytest.approx(7_050, rel=5e-3)
    by_hand = 512 * 229.8e9 + 4096 * 6 * (131_072_000 + 5 * 2 * 5120 * 1024)
    assert speed.row_flops(run.drafter, 4096, 512) == pytest.approx(by_hand, rel=1e-3)


def test_drafting_reads_the_drafter_the_head_and_its_cache_once():
    run, _ = run_27b()
    by_hand = (2 * (1_730_213_120 + 248_320 * 5120) + 4096 * 5 * 4096) / 4.3e12
    assert speed.draft_s(run.drafter, 4096, 2, H200) == pytest.approx(by_hand)


def test_speedup_is_tokens_a_round_over_tokens_a_pass():
    assert speed.speedup(4.0, 0.010, 0.020) == 2.0
    assert speed.speedup(2.0, 0.010, 0.020) == 1.0  # breaks even


def test_unknown_rates_give_unknown_times():
    run, sizes = run_27b()
    assert speed.verify_s(sizes, 1, 0, 2, UNKNOWN) is None
    assert speed.draft_s(run.drafter, 0, 2, UNKNOWN) is None
    work = cost.extraction(sizes, 1e6, 61, UNKNOWN, 1, 0.5, 51_200, None)
    assert work.rate is None and work.hours is None and work.usd(1, 2.0) is None
    assert "hardware.bf16_flops" in work.bound_by


def test_zero_sends_its_gradients_and_weights_by_ring():
    assert speed.zero_traffic_bytes(1000, 1, 1, 8) == 0
    assert speed.zero_traffic_bytes(1000, 1, 2, 8) == 500 * (8 + 2)
    assert speed.zero_traffic_bytes(1000, 2, 2, 8) == 500 * (2 * 8 + 2)
    assert speed.zero_traffic_bytes(1000, 3, 2, 8) == 500 * (2 * 8 + 4 * 8)


# ---------------------------------------------------------------- hours and money


def test_the_mixs_hidden_states_are_84_terabytes_and_824_megabytes_a_second_at_the_limit():
    _, sizes = run_27b()
    tokens, token_bytes = 913_786 * 1800, 5 * 5120 * 2
    assert token_bytes == 51_200
    assert tokens == pytest.approx(1.6e9, rel=0.03) and tokens * token_bytes == pytest.approx(84e12, rel=5e-3)
    full = speed.layer_flops(sizes)
    assert H200.flops / full * token_bytes == pytest.approx(824e6, rel=0.01)
    assert cost.storage_usd(84e12, 0.023, 2) == pytest.approx(84_000 * 0.023 * 2)


def test_extraction_takes_the_matrix_rate_or_the_upload_whichever_is_slower():
    _, sizes = run_27b()
    tokens = 913_786 * 1800
    alone = cost.extraction(sizes, tokens, 61, H200, 1, 0.56, 51_200, None)
    assert alone.rate == pytest.approx(0.56 * 7.9e14 / speed.layer_flops(sizes, 62)) and alone.bound_by == "matrix rate"
    assert alone.hours == pytest.approx(tokens / 9_370 / 3600, rel=5e-3)
    assert alone.usd(1, 3.5) == pytest.approx(3.5 * alone.hours)
    assert cost.extraction(sizes, tokens, 61, H200, 8, 0.56, 51_200, None).rate == pytest.approx(8 * alone.rate)
    slow = cost.extraction(sizes, tokens, 61, H200, 8, 0.56, 51_200, 512e6)
    assert slow.rate == pytest.approx(10_000) and slow.bound_by == "upload"


def test_regeneration_is_bound_by_launches_until_the_pass_is_long_enough():
    _, sizes = run_27b()
    make = lambda launch_s: cost.regeneration(sizes, 1e9, 64, 1000, 2, H200, 2, launch_s)
    assert make(0.122).rate == pytest.approx(2 * 64 / 0.122) and make(0.122).bound_by == "kernel launches"
    read = 2 * read_parameters(sizes, 64) + 64 * (1000 * 65_536 + 2 * 150_994_944)
    assert make(0.0).rate == pytest.approx(2 * 64 / (read / 4.3e12))


def test_training_takes_the_blocks_of_all_epochs_at_the_assumed_share_of_the_rate():
    run, _ = run_27b()
    options = {"epochs": 6, "row_tokens": 4096, "num_anchors": 512, "mfu": 0.5, "rates": A6000,
               "parameters": 1_730_213_120, "stage": 1, "accumulation": 32,
               "interconnect_bytes_per_s": 3.2e10}  # fmt: skip
    two, one = (cost.training(run.drafter, 1.6e9, world=world, **options) for world in (2, 1))
    assert two.units == one.units == pytest.approx(6 * 1.6e9 / 4096 * 512)
    row_s = speed.row_flops(run.drafter, 4096, 512) / (0.5 * 1.548e14)
    assert one.rate == pytest.approx(512 / row_s)
    traffic_s = 0.5 * 1_730_213_120 * (8 + 2) / 3.2e10
    assert two.rate == pytest.approx(2 * 32 * 512 / (32 * row_s + traffic_s)) and two.bound_by == "matrix rate"
    slow = cost.training(run.drafter, 1.6e9, world=2, **options | {"stage": 3, "interconnect_bytes_per_s": 1e9})
    assert slow.bound_by == "interconnect" and slow.rate < two.rate
    unknown = cost.training(run.drafter, 1.6e9, world=2, **options | {"interconnect_bytes_per_s": None})
    assert unknown.rate is None and "hardware.interconnect_bytes_per_s" in unknown.bound_by
