"""Upgrades from every known revision keep all rows."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from reconciler.db import schema as tables
from reconciler.db.engine import open_engine, transaction
from reconciler.db.migrations import migrate, revisions
from tests.unit.reconciler.pools.test_leases import check_counts

# Columns that a migration removes on purpose, by table.
DROPPED: dict[str, frozenset[str]] = {}
# Tables whose rows end with an upgrade: people log in again.
ENDED = {"console_sessions"}
# Columns that stay null where another one has a value.
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


# Tables that get a row by an upgrade: the host of pools whose workers are elsewhere.
GROWN = ("pool_hosts",)


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


@pytest.mark.covers("CTRL-2")
@pytest.mark.parametrize("revision", revisions())
def test_nothing_is_lost_on_the_way_to_this_version(empty: sa.Engine, revision: str) -> None:
    migrate(empty, revision)
    with transaction(empty) as conn:
        filled = {table.name: _fill(conn, table) for table in _tables(conn)}
    assert "nodes" in filled

    assert migrate(empty) == revisions()[-1]
    if "job_counts" not in filled:
        check_counts(empty)

    with transaction(empty) as conn:
        now = {table.name: table for table in _tables(conn)}
        for name, row in filled.items():
            if name in ENDED:
                continue
            expected = {column: row[column] for column in row if column not in _dropped(name)}
            after = conn.execute(sa.select(now[name])).mappings().all()
            kept = [{column: each.get(column) for column in expected} for each in after]
            assert expected in kept, name
            assert len(kept) == 1 or name in GROWN, name
        assert compare_metadata(MigrationContext.configure(conn), tables.metadata) == []


@pytest.mark.covers("CTRL-15")
@pytest.mark.parametrize(
    ("kind", "task", "marked"),
    [
        ("node_exclusive", "baremetal.provision", ["machine_id ü"]),
        ("node_exclusive", "node.parity", []),
        ("slice", "baremetal.provision", []),
    ],
)
def test_a_machine_that_had_a_tenant_as_a_whole_needs_a_reinstall(
    empty: sa.Engine, monkeypatch: pytest.MonkeyPatch, kind: str, task: str, marked: list[str]
) -> None:
    migrate(empty, "0022")
    same = {"node_id": "m1", "allocation_id": "a1", "kind": kind, "id": "m1"}
    monkeypatch.setitem(PLAIN, "nodes.id", "m1")
    for column, value in same.items():
        monkeypatch.setitem(PLAIN, f"allocation_resource_claims.{column}", value)
    monkeypatch.setitem(PLAIN, "tasks.kind", task)
    monkeypatch.setitem(PLAIN, "tasks.allocation_id", "a1")
    with transaction(empty) as conn:
        for table in _tables(conn):
            if table.name in ("nodes", "allocation_resource_claims", "tasks"):
                _fill(conn, table)
    migrate(empty)
    with transaction(empty) as conn:
        node = conn.execute(sa.select(tables.nodes)).one()
        assert node.tenant_machine_ids == marked
        # Nothing shows its firmware before that tenant.
        assert node.firmware_before == ({} if marked else None)


def _dropped(table: str) -> frozenset[str]:
    return DROPPED.get(table, frozenset())


def _tables(conn: sa.Connection) -> list[sa.Table]:
    stored = sa.MetaData()
    stored.reflect(conn)
    return [table for name, table in stored.tables.items() if name != "alembic_version"]


def _fill(conn: sa.Connection, table: sa.Table) -> dict[str, Any]:
    """One row with a value in every column."""
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
