"""How long to wait before asking again: what a busy server says, and doubling pauses of which half is chance."""

import math
import random
import time
from datetime import UTC
from email.utils import parsedate_to_datetime


def backoff_s(tries: int, first_s: float, longest_s: float) -> float:
    """The pause after `tries` (1, 2, ..) failures: first_s, doubled for each further one, at most longest_s; from half
    of that up to all of it by chance, so that many clients do not come back at one moment."""
    return min(longest_s, first_s * 2 ** min(tries - 1, 20)) * random.uniform(0.5, 1.0)


def retry_after_s(header: str | None) -> float:
    """Seconds that a Retry-After header asks for, a number or a date (RFC 9110, 10.2.3); 0 without one, for a time that
    has passed, and for what is neither."""
    text = (header or "").strip()
    try:
        seconds = float(text)
    except ValueError:
        seconds = _seconds_until(text)
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _seconds_until(date: str) -> float:
    try:
        when = parsedate_to_datetime(date)
        when = when if when.tzinfo else when.replace(tzinfo=UTC)  # HTTP dates are in GMT, however they are written
        return when.timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
