"""Samples of one quantity, and what is said about them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from reconciler.benchmark.harness.reasons import Failed


def metric(
    name: str, unit: str, samples: Sequence[float], *, better: str = "higher", workers: int = 1
) -> dict[str, Any]:
    """One metric of a capture: the median, and the spread between extremes in percent of it.

    better: `higher` or `lower`. workers: how many CPUs took part. Raises Failed
    `measurement_invalid` for a sample that cannot be a measurement.
    """
    if not samples or not all(math.isfinite(sample) and sample > 0 for sample in samples):
        raise Failed(
            "measurement_invalid",
            expected=f"positive figures for {name}",
            found=", ".join(map(str, samples)) or "none",
            remedy="look at the tool's own output on the machine",
        )
    middle = statistics.median(samples)
    return {
        "metric": name,
        "unit": unit,
        "better": better,
        "workers": workers,
        "median": _short(middle),
        "spread_percent": round(100 * (max(samples) - min(samples)) / middle, 2),
        "samples": [_short(sample) for sample in samples],
    }


def _short(value: float) -> float:
    """Six digits: more than any of these measurements means."""
    return float(f"{value:.6g}")
