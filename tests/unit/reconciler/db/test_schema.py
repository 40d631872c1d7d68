"""The migrations make the tables of the schema."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from reconciler.db import migrations
from reconciler.db.engine import transaction
from reconciler.db.migrations import current, migrate, revisions
from reconciler.db.schema import metadata
from reconciler.model.errors import Problem


@pytest.mark.covers("CTRL-2")
def test_migrated_schema_is_the_tables(engine: sa.Engine) -> None:
    assert migrate(engine) == current(engine)
    with engine.connect() as conn:
        assert compare_metadata(MigrationContext.configure(conn), metadata) == []


@pytest.mark.covers("CTRL-2")
def test_numbers_are_the_order_of_the_chain() -> None:
    """The service reads the names of the files, and Alembic what is in them."""
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent)).walk_revisions()
    chain = [script.revision for script in scripts][::-1]
    # The first migration has the number of the schema that it was made from.
    assert list(revisions()) == chain == [f"{number:04}" for number in range(44, 44 + len(chain))]


@pytest.mark.covers("CTRL-2")
@pytest.mark.parametrize("revision", ["0001", "0043", "9999"])
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


@pytest.mark.covers("CTRL-2")
def test_checks_are_the_same(engine: sa.Engine) -> None:
    inspector = sa.inspect(engine)
    for table in metadata.tables.values():
        expected = {
            str(check.name): " ".join(str(check.sqltext).split())
            for check in table.constraints
            if isinstance(check, sa.CheckConstraint)
        }
        checks = {
            str(check["name"]): " ".join(check["sqltext"].split())
            for check in inspector.get_check_constraints(table.name)
        }
        assert checks == expected, table.name


def test_foreign_keys_are_on(engine: sa.Engine) -> None:
    with engine.connect() as conn:
        assert conn.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
