"""The learning rate: warm-up, cosine, floor, and the clock."""

from itertools import pairwise

import pytest

from dflash_train.engine.schedule import learning_rate, progress_at


def rates(total: int, warmup: float = 0.04, floor: float = 0.0) -> list[float]:
    return [learning_rate(progress_at(step, total), 6e-4, warmup, floor) for step in range(total)]


def test_the_rate_rises_for_the_warm_up_then_falls_to_the_floor():
    lr = rates(1000, 0.1, 0.1)
    assert all(a < b for a, b in pairwise(lr[:100])) and all(a > b for a, b in pairwise(lr[101:]))
    assert max(lr) == pytest.approx(6e-4, rel=1e-3) and lr[-1] == pytest.approx(6e-5, rel=1e-3)
    assert lr[49] == pytest.approx(6e-4 * 49.5 / 100)
    assert lr[549] == pytest.approx(6e-4 * (0.1 + 0.9 * 0.5), rel=2e-3)  # the cosine's middle


def test_no_step_is_wasted_on_a_rate_of_zero():
    assert min(rates(7)) > 0 and min(rates(1)) > 0 and min(rates(100, warmup=0.0)) > 0


def test_a_time_limit_anneals_by_whichever_is_further():
    assert progress_at(10, 1000, elapsed_s=150, max_s=300) == 0.5
    assert progress_at(900, 1000, elapsed_s=150, max_s=300) == 0.9005
    assert progress_at(10, 1000, elapsed_s=900, max_s=300) == 1.0
    assert progress_at(10, 1000, elapsed_s=900) == 0.0105
