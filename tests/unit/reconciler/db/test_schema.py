"""The migrations and the tables say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from reconciler.db import migrations
from reconciler.db.engine import transaction
from reconciler.db.migrations import current, migrate, revisions
from reconciler.db.schema import metadata, proofs, tasks


@pytest.mark.covers("CTRL-2")
def test_migrated_schema_is_the_tables(engine: sa.Engine) -> None:
    assert migrate(engine) == current(engine)
    with engine.connect() as conn:
        assert compare_metadata(MigrationContext.configure(conn), metadata) == []


@pytest.mark.covers("CTRL-2")
def test_numbers_are_the_order_of_the_chain() -> None:
    files = sorted((Path(migrations.__file__).parent / "versions").glob("[0-9]*.py"))
    numbers = [f"{number:04}" for number in range(1, len(files) + 1)]
    assert list(revisions()) == numbers
    assert [file.name.partition("_")[0] for file in files] == numbers


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


@pytest.mark.covers("CTRL-2", "I16")
def test_proofs_from_before_belong_to_the_installation_that_was_seen_last(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'old.db'}")
    migrate(engine, "0013")
    seen = ((1, 5.0, "first"), (2, 15.0, "second"))
    with transaction(engine) as conn:
        for key, at, installation in seen:
            _old(conn, "topology_discoveries", id=key, node_id="n1", created_at=at,
                 install_id=installation)  # fmt: skip
        _old(
            conn,
            "nodes",
            id="n2",
            install_id="its own",
            state="ready",
            mode="slice",
            health_state="unknown",
        )
        for key, node, at in (("a", "n1", 10.0), ("b", "n1", 20.0), ("c", "n2", 1.0)):
            _old(conn, "wipe_proofs", id=key, node_id=node, created_at=at, kind="wipe")
    migrate(engine)
    with engine.connect() as conn:
        found = dict(conn.execute(sa.select(proofs.c.id, proofs.c.install_id)).all())
        assert found == {"a": "first", "b": "second", "c": "its own"}
    with transaction(engine) as conn, pytest.raises(sa.exc.IntegrityError, match="append-only"):
        conn.execute(sa.update(proofs).values(install_id="another"))
    engine.dispose()


def _old(conn: sa.Connection, table: str, **values: object) -> None:
    """A row of an older schema: what it must have and is not given is empty."""
    columns = [one for one in sa.inspect(conn).get_columns(table) if not one["nullable"]]
    names = [str(column["name"]) for column in columns]
    row = {**dict.fromkeys(names, 0), **values}
    conn.execute(sa.insert(sa.table(table, *(sa.column(name) for name in row))).values(row))


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
