"""The schema, and the chain of migrations to it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.script import ScriptDirectory

from reconciler.db import migrations
from reconciler.db.engine import transaction
from reconciler.db.migrations import current, migrate, revisions
from reconciler.db.schema import creation
from reconciler.model.errors import Problem

# Of the statements that make the schema of the baseline.
BASELINE = {
    "sqlite://": "35d6c59519be8787caef09a7e0910a078c10a706603fe109e60caaf21587dbac",
    "postgresql+psycopg://": "d1b98e5445ad2a812434993984c808ee03fd94969071672bdf3c452e474d34fb",
}


@pytest.mark.covers("CTRL-2")
@pytest.mark.skipif(len(revisions()) > 1, reason="test_upgrade has a stored database instead")
@pytest.mark.parametrize("url", BASELINE)
def test_the_schema_of_the_baseline_is_as_it_was(url: str) -> None:
    """A change is a migration, see CONTRIBUTING.md. Sites keep the schema that they have."""
    statements: list[str] = []

    def note(statement: Any, *_: object) -> None:
        first, *lines = str(statement.compile(dialect=engine.dialect)).strip().splitlines()
        # The order of columns and constraints does not matter.
        statements.append("\n".join([first, *sorted(line.strip("\t ,") for line in lines)]))

    engine = sa.create_mock_engine(url, note)
    creation.create(engine)
    digest = hashlib.sha256("\n".join(sorted(statements)).encode()).hexdigest()
    assert digest == BASELINE[url]


@pytest.mark.covers("CTRL-2")
def test_numbers_are_the_order_of_the_chain() -> None:
    """The service reads the names of the files, and Alembic their contents."""
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent)).walk_revisions()
    chain = [script.revision for script in scripts][::-1]
    # The baseline has the number of the last migration before it.
    assert list(revisions()) == chain == [f"{number:04}" for number in range(58, 58 + len(chain))]


@pytest.mark.covers("CTRL-2")
@pytest.mark.parametrize("revision", ["0001", "0057", "9999"])
def test_a_database_at_an_unknown_revision_is_refused_and_left_alone(
    engine: sa.Engine, revision: str
) -> None:
    version = sa.table("alembic_version", sa.column("version_num"))
    with transaction(engine) as conn:
        conn.execute(sa.update(version).values(version_num=revision))
    with pytest.raises(Problem) as refused:
        migrate(engine)
    problem = refused.value
    assert problem.code == "schema_outdated"
    assert (revisions()[0] in problem.expected, problem.found) == (True, f"revision {revision}")
    assert "version of the service that made this database" in problem.remedy
    assert current(engine) == revision


def test_foreign_keys_are_on(engine: sa.Engine) -> None:
    with engine.connect() as conn:
        assert conn.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
