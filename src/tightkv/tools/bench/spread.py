"""Mean and percentiles of measured times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

_PERCENTS = (50, 90, 99)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values)} | {
        f"p{percent}": percentile(values, percent) for percent in _PERCENTS
    }


def milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    """The same in milliseconds; None of nothing."""
    return spread([1e3 * value for value in seconds]) if seconds else None


def percentile(values: Sequence[float], percent: int) -> float:
    """Between the two nearest ranks, linearly: 0 gives the least, 100 the greatest."""
    if percent in (0, 100) or len(values) == 1:
        return max(values) if percent == 100 else min(values)
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
