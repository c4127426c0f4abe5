"""Learning rate as a pure function of how far training is, and how far it is as a function of steps and clock."""

import math


def progress_at(step: int, total_steps: int, elapsed_s: float = 0.0, max_s: float | None = None) -> float:
    """Share of training done in the middle of `step` (0-based), 0 < progress <= 1.

    With a time limit it is the larger of the steps' share and the clock's, so that a run ended by the clock has still
    annealed. Such a run depends on the machine's speed: only without a limit is a resumed run equal to an unbroken one.
    """
    by_step = (step + 0.5) / max(total_steps, 1)
    by_clock = elapsed_s / max_s if max_s else 0.0
    return min(max(by_step, by_clock), 1.0)


def learning_rate(progress: float, peak: float, warmup_ratio: float, min_ratio: float) -> float:
    """Linear from 0 to `peak` over the first `warmup_ratio` of training, then half a cosine to peak * min_ratio."""
    if progress < warmup_ratio:
        return peak * progress / warmup_ratio
    share = (progress - warmup_ratio) / (1.0 - warmup_ratio)
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0))))
