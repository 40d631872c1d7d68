"""Both engines, for tests of real processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.reconciler.api.conftest import selling, stages
from tests.unit.reconciler.service.postgres import Postgres

__all__ = ["selling", "stages"]


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A running server."""
    server = Postgres()
    server.start()
    yield server
    server.remove()
