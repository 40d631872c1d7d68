"""A PostgreSQL server of our own, for the tests that want both engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgresql import running


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of its database."""
    with running(fsync=False) as found:
        yield found.url
