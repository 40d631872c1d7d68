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
            after = conn.execute(sa.select(now[name])).mappings().all()
            assert [{column: each.get(column) for column in row} for each in after] == [row], name
        assert compare_metadata(MigrationContext.configure(conn), tables.metadata) == []


@pytest.mark.covers("CTRL-2")
def test_launches_that_have_ended_lose_the_cloud_configs_of_their_tenants(empty: sa.Engine) -> None:
    migrate(empty, "0051")
    secret, ended = {"tenant_data": {"password": "s"}, "slots": [1]}, {"finished_at": 1.0}
    with transaction(empty) as conn:
        (tasks,) = [table for table in _tables(conn) if table.name == "tasks"]
        row = _fill(conn, tasks) | {"parameters": secret}
        conn.execute(sa.delete(tasks))
        rows = {
            "ended": {"kind": "slice.vm_provision", **ended},
            "runs": {"kind": "slice.vm_provision", "finished_at": None, "state": "running"},
            "other": {"kind": "slice.wipe", **ended},
            "without": {"kind": "slice.vm_provision", **ended, "parameters": {"slots": [1]}},
        }
        for id, changes in rows.items():
            conn.execute(sa.insert(tasks).values(row | {"id": id} | changes))
    migrate(empty)
    with transaction(empty) as conn:
        query = sa.select(tables.tasks.c.id, tables.tasks.c.parameters)
        kept = {id: "tenant_data" in parameters for id, parameters in conn.execute(query)}
    assert kept == {"ended": False, "runs": True, "other": True, "without": False}


def test_long_results_of_reports_before_the_newest_become_counts(empty: sa.Engine) -> None:
    migrate(empty, "0052")
    # Not the same again and again, which PostgreSQL packs.
    differences = [f"{uuid.uuid4()}" for _ in range(200)]
    long, short = {"differences": differences, "skipped": []}, {"differences": ["x"]}
    with transaction(empty) as conn:
        (tasks,) = [table for table in _tables(conn) if table.name == "tasks"]
        row = _fill(conn, tasks) | {"kind": "slice.drift_reconcile", "state": "succeeded"}
        conn.execute(sa.delete(tasks))
        for number in range(25):
            values = {"id": f"{number}", "created_at": number, "result": long if number else short}
            conn.execute(sa.insert(tasks).values(row | values))
            report = {"kind": "node.parity", "id": f"1{number:02}"}
            conn.execute(sa.insert(tasks).values(row | values | report))
        conn.execute(sa.insert(tasks).values(row | {"id": "other", "kind": "x", "result": long}))
    migrate(empty)
    with transaction(empty) as conn:
        query = sa.select(tables.tasks.c.id, tables.tasks.c.result)
        results = {row.id: row.result for row in conn.execute(query)}
    assert results.pop("0") == results.pop("100") == short and results.pop("other") == long
    counts = {"counts": {"differences": 200, "skipped": 0}}
    old = {id for id, result in results.items() if result == counts}
    assert old == {*("1", "2", "3", "4"), *("101", "102", "103", "104")}
    assert all(result == long for id, result in results.items() if id not in old)


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
