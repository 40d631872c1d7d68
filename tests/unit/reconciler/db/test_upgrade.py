"""New databases, and upgrades of older ones, which keep all rows."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import migrations
from reconciler.db import schema as tables
from reconciler.db.engine import open_engine, transaction
from reconciler.db.migrations import current, head, migrate, revisions
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.db import stored

BASELINE = revisions()[0]
# The baseline is stored as soon as there are migrations.
STORED = sorted({BASELINE, *(file.name[:4] for file in stored.FOLDER.glob("*.sql"))})
TEXTS = {
    "sqlite": "SELECT name, sql FROM sqlite_master WHERE type IN ('index', 'trigger')",
    "postgresql": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' UNION ALL"
    " SELECT tgname, pg_get_triggerdef(oid) || pg_get_functiondef(tgfoid) FROM pg_trigger"
    " WHERE NOT tgisinternal",
}
MIGRATION = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "9998", {!r}
def upgrade():
    op.add_column("projects", sa.Column("added", sa.Text(), nullable=False, server_default="x"))
    {}
"""
# Columns that stay null where another column has a value.
EMPTY = {"console_sessions.login"}
# Values that satisfy checks over several columns and triggers. Other columns take any value.
PLAIN: dict[str, Any] = {
    "allocations.state": "released",
    "allocation_resource_claims.kind": "slice",
    "allocation_resource_claims.state": "released",
    "node_resource_slots.status": "disabled",
    "node_resource_slots.wanted": "disabled",
    "nodes.mode": "slice",
    "nodes.state": "ready",
    "tasks.state": "succeeded",
    "usage_records.end_state": "released",
}
KINDS: tuple[tuple[type[sa.types.TypeEngine[Any]], Any], ...] = (
    (sa.Boolean, True),
    (sa.JSON, {"kept": [1, "ü", None]}),
    (sa.Integer, 7),
    (sa.Float, 1.5),
    (sa.Numeric, 1.5),
)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    """A database without a schema and without the check of foreign keys."""
    if request.param == "sqlite":
        engine = open_engine(f"sqlite:///{tmp_path / 'old.db'}")
        sa.event.listen(engine, "connect", lambda conn, _: conn.execute("PRAGMA foreign_keys=OFF"))
        yield engine
    else:
        server = request.getfixturevalue("server")
        name = f"u_{uuid.uuid4().hex[:8]}"
        admin = sa.create_engine(server, isolation_level="AUTOCOMMIT")
        with admin.connect() as conn:
            conn.exec_driver_sql(f"CREATE DATABASE {name}")
        admin.dispose()
        engine = open_engine(server.replace("/postgres?", f"/{name}?"))
        yield engine
    engine.dispose()


@pytest.fixture
def add_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Adds a migration to those of this version, or replaces it by a failing migration."""
    before, folder = head(), tmp_path / "migrations"
    shutil.copytree(Path(migrations.__file__).parent, folder)

    def add(last: str = "") -> None:
        (folder / "versions" / "9998_added.py").write_text(MIGRATION.format(before, last))
        revisions.cache_clear()

    monkeypatch.setattr(migrations, "__file__", str(folder / "__init__.py"))
    yield add
    revisions.cache_clear()


@pytest.mark.covers("CTRL-2")
def test_a_creation_that_is_killed_leaves_nothing(empty: sa.Engine) -> None:
    last = "INSERT INTO alembic_version"

    def kill(_conn: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith(last):
            os._exit(9)

    def create() -> None:
        sa.event.listen(empty, "before_cursor_execute", kill)
        migrate(empty)

    assert _ends(_fork(create)) == 9
    assert current(empty) is None and sa.inspect(empty).get_table_names() == []
    # With functions of PostgreSQL, which exist once.
    assert migrate(empty) == head()


@pytest.mark.covers("CTRL-2")
def test_a_start_waits_for_the_one_that_makes_the_database(tmp_path: Path) -> None:
    file = tmp_path / "new.db"
    first = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    first.execute("BEGIN IMMEDIATE")
    end = threading.Timer(0.2, first.rollback)
    end.start()
    engine = open_engine(f"sqlite:///{file}")
    assert migrate(engine) == head()
    end.join()


@pytest.mark.covers("CTRL-2")
def test_first_starts_at_once_make_one_schema(empty: sa.Engine) -> None:
    def start() -> None:
        engine = open_engine(empty.url.render_as_string(hide_password=False))
        assert os.read(ready, 1)
        assert migrate(engine) == head()

    ready, go = os.pipe()
    starts = [_fork(start) for _ in range(4)]
    os.write(go, b"x" * len(starts))
    assert [_ends(start) for start in starts] == [0] * len(starts)
    os.close(ready)
    os.close(go)
    assert current(empty) == head()
    with transaction(empty) as conn:
        assert conn.execute(sa.select(tables.control.c.id)).scalars().all() == ["jobs"]


@pytest.mark.covers("CTRL-2")
def test_an_upgrade_is_complete_or_not_begun(
    on_either: Site, add_migration: Callable[..., None]
) -> None:
    engine, projects = on_either.engine, sa.table("projects", sa.column("added"))
    before = head()
    assert migrate(engine) == before
    add_migration("raise InterruptedError")
    with pytest.raises(InterruptedError):
        migrate(engine)
    assert current(engine) == before
    assert "added" not in {column["name"] for column in sa.inspect(engine).get_columns("projects")}
    add_migration()
    assert migrate(engine) == "9998"
    with transaction(engine) as conn:
        assert conn.execute(sa.select(projects)).scalars().all() == ["x"]


@pytest.mark.covers("CTRL-2")
def test_a_new_database_needs_no_migration(
    empty: sa.Engine, add_migration: Callable[..., None]
) -> None:
    add_migration("raise InterruptedError")
    assert migrate(empty) == "9998"


@pytest.mark.covers("CTRL-2")
@pytest.mark.parametrize("revision", STORED)
def test_an_upgrade_keeps_all_rows_and_makes_the_schema_of_a_new_database(
    empty: sa.Engine, revision: str, request: pytest.FixtureRequest
) -> None:
    if revision == head():
        migrate(empty)
    else:
        stored.load(empty, revision)
    with transaction(empty) as conn:
        filled = {table.name: _fill(conn, table) for table in _tables(conn)}
    assert "nodes" in filled

    assert migrate(empty) == head()

    with transaction(empty) as conn:
        now = {table.name: table for table in _tables(conn)}
        for name, row in filled.items():
            after = conn.execute(sa.select(now[name])).mappings().all()
            assert [{column: each.get(column) for column in row} for each in after] == [row], name
    if empty.dialect.name == "sqlite":
        new = request.getfixturevalue("engine")
    else:
        new = request.getfixturevalue("postgres_database").restore()
    assert _catalog(empty) == _catalog(new)


def _fork(work: Callable[[], object]) -> int:
    """A process that does the work."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def _ends(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _catalog(engine: sa.Engine) -> dict[str, Any]:
    """The schema of a database, without the order of columns and their defaults.

    A column that a migration adds is the last column, and has a default for the rows that exist.
    Writers give every value.
    """
    inspector = sa.inspect(engine)
    catalog: dict[str, Any] = {}
    for table in inspector.get_table_names():
        catalog[table] = {
            (column["name"], str(column["type"]), column["nullable"], str(column.get("computed")))
            for column in inspector.get_columns(table)
        }
        catalog[f"{table} key"] = inspector.get_pk_constraint(table)["constrained_columns"]
        catalog[f"{table} uniques"] = {
            tuple(unique["column_names"]) for unique in inspector.get_unique_constraints(table)
        }
        catalog[f"{table} references"] = {
            (*key["constrained_columns"], key["referred_table"], *key["referred_columns"])
            for key in inspector.get_foreign_keys(table)
        }
        catalog[f"{table} checks"] = {
            check["name"]: " ".join(check["sqltext"].split())
            for check in inspector.get_check_constraints(table)
        }
    with engine.connect() as conn:
        rows = conn.exec_driver_sql(TEXTS[engine.dialect.name])
        return catalog | {name: " ".join(text.split()) for name, text in rows if text}


def _tables(conn: sa.Connection) -> list[sa.Table]:
    stored = sa.MetaData()
    stored.reflect(conn)
    return [table for name, table in stored.tables.items() if name != "alembic_version"]


def _fill(conn: sa.Connection, table: sa.Table) -> dict[str, Any]:
    """Insert a row with a value in every column."""
    conn.execute(sa.delete(table))  # A migration may have made a row.
    today = tables.metadata.tables[table.name].columns
    row = {
        column.name: _value(table, column)
        for column in table.columns
        if column.name not in today or not today[column.name].computed
        if f"{table.name}.{column.name}" not in EMPTY
    }
    if conn.dialect.name == "postgresql":
        # Foreign keys are triggers there. Without them, the order of the tables does not matter.
        conn.exec_driver_sql("SET LOCAL session_replication_role = replica")
    conn.execute(sa.insert(table).values(row))
    return row


def _value(table: sa.Table, column: sa.Column[Any]) -> Any:
    fixed = PLAIN.get(f"{table.name}.{column.name}")
    if fixed is not None:
        return fixed
    today = tables.metadata.tables[table.name]
    for check in today.constraints:
        if isinstance(check, sa.CheckConstraint) and check.info.get("column") == column.name:
            return next(iter(check.info["states"])).value
    for kind, value in KINDS:
        if isinstance(column.type, kind):
            return value
    return f"{column.name} ü"
