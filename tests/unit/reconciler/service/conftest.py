"""Both engines, for tests of real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgresql import Server, running
from tests.unit.reconciler.api.conftest import databases, selling

__all__ = ["databases", "selling"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A running server."""
    # Data that the system has taken over survives the end of a process: no need to sync here.
    with running(fsync=False) as server:
        yield server
