"""What RunState counts with: a sliding rate, counters and a history of bounded size, and text fit for strict JSON."""

import math
from collections import Counter, deque

WINDOW_S = 60.0
_KEYS = 64
_POINTS = 240


class Rate:
    """Amounts over time: the sum of all, and the rate over the last WINDOW_S seconds (in buckets of one second)."""

    def __init__(self) -> None:
        self.total, self.since = 0.0, None
        self._buckets: deque[list[float]] = deque()

    def add(self, now: float, amount: float, seconds: float = 0.0) -> None:
        """`amount` done by `now`, begun `seconds` earlier: the first one sets where the overall rate starts."""
        if self.since is None:
            self.since = now - seconds
        self.total += amount
        second = math.floor(now)
        if self._buckets and self._buckets[-1][0] == second:
            self._buckets[-1][1] += amount
        else:
            self._buckets.append([second, amount])
        self._forget(now)

    def recent(self, now: float) -> float | None:
        """Amount per second in the window; None before the first."""
        if self.since is None:
            return None
        self._forget(now)
        return _per_second(sum(amount for _, amount in self._buckets), min(WINDOW_S, now - self.since))

    def overall(self, now: float) -> float | None:
        """Amount per second since the first began; None before it."""
        return None if self.since is None else _per_second(self.total, now - self.since)

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] < math.floor(now) + 1 - WINDOW_S:
            self._buckets.popleft()


def _per_second(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


class Reasons:
    """Counts by reason, at most 64 reasons: what comes later is counted under 'other'."""

    def __init__(self) -> None:
        self.counts: Counter = Counter()

    def add(self, reason: object, count: int = 1) -> None:
        key = clean(reason, 120)
        self.counts[key if key in self.counts or len(self.counts) < _KEYS else "other"] += count

    def as_dict(self) -> dict[str, int]:
        """Largest first, without those that came back to zero."""
        return {key: count for key, count in self.counts.most_common() if count}


class History:
    """Points over the whole run in bounded memory: when it is full, every second point goes and the step doubles."""

    def __init__(self, step_s: float = 2.0):
        self.step_s, self.points = step_s, []

    def due(self, elapsed_s: float) -> bool:
        return not self.points or elapsed_s - self.points[-1][0] >= self.step_s

    def add(self, elapsed_s: float, *values: float | None) -> None:
        self.points.append((elapsed_s, *values))
        if len(self.points) > _POINTS:
            self.points = self.points[::2]
            self.step_s *= 2

    def columns(self, *names: str) -> dict[str, list[float | None]]:
        """{name: one value a point}, the elapsed seconds first."""
        return {name: [point[i] for point in self.points] for i, name in enumerate(("elapsed_s", *names))}


def clean(value: object, limit: int) -> str:
    """Text of at most `limit` characters that encodes as UTF-8: a sample's id may hold half a surrogate pair."""
    text = str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def strict(value):
    """The same value with null for every number that JSON does not have."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
