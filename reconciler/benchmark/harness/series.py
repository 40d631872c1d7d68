"""Samples of a quantity, with their median and spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from reconciler.benchmark.harness.reasons import Failed


def metric(
    name: str, unit: str, samples: Sequence[float], *, better: str = "higher", workers: int = 1
) -> dict[str, Any]:
    """A metric of a capture: median, and spread between the extremes in percent of the median.

    better: `higher` or `lower`. workers: number of CPUs used. Raises Failed `measurement_invalid`
    for a sample that is not a positive number.
    """
    if not samples or not all(math.isfinite(sample) and sample > 0 for sample in samples):
        raise Failed(
            "measurement_invalid",
            expected=f"positive figures for {name}",
            found=", ".join(map(str, samples)) or "none",
            remedy="check the output of the tool on the machine",
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
    """Six significant digits, more than the precision of any probe."""
    return float(f"{value:.6g}")
