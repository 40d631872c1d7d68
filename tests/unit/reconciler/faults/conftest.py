"""A database of the fault programme's own: here processes die, and never the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from reconciler.db.migrations import migrate
from tests.unit.reconciler.conftest import Database


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """As everywhere, but nothing waits for the disk."""
    database = Database(tmp_path_factory.mktemp("faults"))

    def unsynced(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(database.engine, "connect", unsynced)
    yield database
    database.engine.dispose()


@pytest.fixture(scope="session")
def template(database: Database) -> Path:
    """A migrated database, made once."""
    migrate(database.restore(None))
    return database.keep("template.db")
