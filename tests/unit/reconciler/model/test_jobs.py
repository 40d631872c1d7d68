"""Decisions about inference jobs."""

from __future__ import annotations

import pytest

from reconciler.model import jobs

pytestmark = pytest.mark.covers("ORCH-2")


@pytest.mark.parametrize(
    ("attempts", "shortest", "longest"), [(1, 1, 2), (2, 2, 4), (9, 150, 300), (1000, 150, 300)]
)
def test_a_failure_waits_twice_as_long_each_time(
    attempts: int, shortest: float, longest: float
) -> None:
    assert jobs.pause(attempts, 0.0) == shortest
    assert jobs.pause(attempts, 1.0) == longest
