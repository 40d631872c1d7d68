"""The migrations and the tables say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from reconciler.store.engine import transaction
from reconciler.store.migrations import current, migrate
from reconciler.store.tables import metadata, tasks


@pytest.mark.covers("CTRL-2")
def test_migrated_schema_is_the_tables(engine: sa.Engine) -> None:
    assert migrate(engine) == current(engine)
    with engine.connect() as conn:
        assert compare_metadata(MigrationContext.configure(conn), metadata) == []


@pytest.mark.covers("CTRL-2")
def test_tasks_from_before_belong_to_no_runner(tmp_path: Path) -> None:
    # Without foreign keys, so that a task needs no node.
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'old.db'}")
    assert migrate(engine, "0004") == "0004"
    with transaction(engine) as conn:
        columns = [one for one in sa.inspect(conn).get_columns("tasks") if not one["nullable"]]
        names = [column["name"] for column in columns]
        assert "runner" not in names
        values = dict.fromkeys(names, 0) | {"id": "t1", "state": "running"}
        old = sa.table("tasks", *(sa.column(name) for name in names))
        conn.execute(sa.insert(old).values(values))
    migrate(engine)
    with engine.connect() as conn:
        assert conn.execute(sa.select(tasks.c.runner)).scalars().all() == [""]
    engine.dispose()


@pytest.mark.covers("CTRL-2")
def test_checks_are_the_same(engine: sa.Engine) -> None:
    inspector = sa.inspect(engine)
    for table in metadata.tables.values():
        wanted = {
            str(check.name): " ".join(str(check.sqltext).split())
            for check in table.constraints
            if isinstance(check, sa.CheckConstraint)
        }
        found = {
            str(check["name"]): " ".join(check["sqltext"].split())
            for check in inspector.get_check_constraints(table.name)
        }
        assert found == wanted, table.name


def test_foreign_keys_are_on(engine: sa.Engine) -> None:
    with engine.connect() as conn:
        assert conn.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert conn.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
