"""Leases and deadlines are compared on the database's clock only (I22).

Two machines, one of which is a year off, do everything that is measured in time, on both engines.
And no code beside `db/clock.py` can ask a machine for the time where records are compared.
"""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import reconciler
from reconciler.db import clock, journal, leader
from reconciler.db.engine import transaction
from reconciler.lifecycle import drift
from reconciler.model.errors import Problem
from reconciler.model.states import Role, TaskKind
from reconciler.records import leasing, tokens
from reconciler.records import queue as task_queue
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.db import test_postgres

pytestmark = pytest.mark.covers("I22")
postgres_engine = test_postgres.engine

RECONCILER = Path(reconciler.__file__).parent
YEAR = 365 * 86_400.0
# Packages that decide on deadlines, holds and rights: none may read its machine's clock.
BY_DATABASE = ("db", "records", "lifecycle", "work", "service", "api", "model")
CLOCKS = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
    "func": {"now", "current_timestamp", "current_date", "julianday", "datetime", "unixepoch"},
}


def clocks_of(source: str) -> list[str]:
    """Every question for the time of day in some code."""
    clocks = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if node.attr in CLOCKS.get(name, ()):
                clocks.append(f"{name}.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            clocks += [f"time.{alias.name}" for alias in node.names if alias.name in CLOCKS["time"]]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.upper()
            clocks += [word for word in ("CURRENT_TIMESTAMP", "NOW()") if word in words]
    return clocks


def test_no_code_that_compares_asks_its_own_machine() -> None:
    wrong = {}
    for folder in BY_DATABASE:
        for file in sorted((RECONCILER / folder).rglob("*.py")):
            is_clock = file == RECONCILER / "db" / "clock.py"
            clocks = [] if is_clock else clocks_of(file.read_text(encoding="utf-8"))
            if clocks:
                wrong[str(file.relative_to(RECONCILER))] = clocks
    assert wrong == {}


@pytest.mark.parametrize(
    "code",
    [
        "late = task['deadline_at'] < time.time()",
        "from time import time_ns",
        "now = datetime.now(UTC)",
        "now = datetime.datetime.utcnow()",
        "query.where(column < sa.func.now())",
        "sa.text('SELECT CURRENT_TIMESTAMP')",
        "conn.exec_driver_sql('update t set at = now()')",
    ],
)
def test_a_machine_that_is_asked_is_seen(code: str) -> None:
    assert clocks_of(code)
    assert not clocks_of("began = time.monotonic(); at = clock.now()")


@contextlib.contextmanager
def off_by(seconds: float) -> Iterator[None]:
    """In here this machine's clock is wrong."""
    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() + seconds)
        patch.setattr(time, "time_ns", lambda: int((real() + seconds) * 1e9))
        yield


def observe(engine: sa.Engine, wrong: float) -> dict[str, Any]:
    """Results of two machines that share a database; only one of them has the right time."""
    results: dict[str, Any] = {}

    def queue(conn: sa.Connection, kind: TaskKind) -> None:
        task_queue.enqueue(conn, task_queue.Enqueue(kind, "n1", "test", kind.value), ADMIN)

    with off_by(wrong), transaction(engine) as conn:
        queue(conn, TaskKind.NODE_PARITY)
        (task,) = leasing.lease(conn, "wrong", seconds=60)
        task_queue.heartbeat(conn, task.id, task.lease_token, seconds=60)
        leader.campaign(conn, "by wrong", "wrong", 60)
        leader.record_process(conn, "wrong", ["worker"], host="h", pid=1, version="1")
        _, token = tokens.issue(conn, ADMIN, role=Role.PLATFORM_ADMIN, name="t", ttl_s=60)
        _, enrolment = tokens.issue_enrolment(conn, "n1", ADMIN, ttl_s=60)
    with transaction(engine) as conn:
        results["its lease stands"] = leasing.lease(conn, "right") == []
        results["its leadership stands"] = leader.campaign(conn, "by wrong", "right", 60) is None
        results["it lives"] = [row["live"] for row in leader.processes(conn)]
        results["its token opens"] = tokens.authenticate(conn, token) is not None
        results["its enrolment is good"] = redeemed(conn, enrolment)
        results["nothing of it is late"] = journal.overdue(conn) == []
        leader.campaign(conn, "by right", "right", 60)
        _, token = tokens.issue(conn, ADMIN, role=Role.PLATFORM_ADMIN, name="t", ttl_s=60)
        _, enrolment = tokens.issue_enrolment(conn, "n1", ADMIN, ttl_s=60)
    with off_by(wrong), transaction(engine) as conn:
        results["a lease stands for it"] = leasing.lease(conn, "other") == []
        results["a leadership stands for it"] = (
            leader.campaign(conn, "by right", "wrong", 60) is None
        )
        results["a token opens for it"] = tokens.authenticate(conn, token) is not None
        results["an enrolment is good for it"] = redeemed(conn, enrolment)
        results["nothing is late for it"] = journal.overdue(conn) == []
        results["no host is due for it"] = drift.due(conn, every_s=3600, at_once=9) == []
        task_queue.wait_for_host(conn, task.id, task.lease_token, "later", act=ADMIN)
        results["what waits, waits"] = leasing.lease(conn, "wrong") == []
    with transaction(engine) as conn:
        results["what it lets wait, waits"] = leasing.lease(conn, "right") == []
    return results


def redeemed(conn: sa.Connection, secret: str) -> bool:
    try:
        tokens.redeem_enrolment(conn, "n1", secret, used_by={})
    except Problem:
        return False
    return True


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def site(request: pytest.FixtureRequest) -> Site:
    """Node n1 on sale, on each engine."""
    if request.param == "sqlite":
        sold: Site = request.getfixturevalue("sold")
        return sold
    engine = request.getfixturevalue("postgres_engine")
    made = Site(engine)
    made.node()
    return made


@pytest.mark.parametrize("wrong", [YEAR, -YEAR], ids=["ahead", "behind"])
def test_a_machine_with_another_time_does_no_harm(site: Site, wrong: float) -> None:
    results = observe(site.engine, wrong)
    assert results.pop("it lives") == [True]
    assert [what for what, holds in results.items() if not holds] == []


@pytest.mark.parametrize("wrong", [YEAR, -YEAR], ids=["ahead", "behind"])
def test_on_the_machines_own_clocks_the_same_story_goes_wrong(
    sold: Site, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    """The test above could not fail otherwise."""
    monkeypatch.setattr(clock, "now", lambda: sa.literal(time.time()))
    results = observe(sold.engine, wrong)
    lies = {what for what, holds in results.items() if not holds}
    # A slow clock writes records that are expired at once; a fast clock ends the holds of others.
    outcome = "its leadership stands" if wrong < 0 else "a leadership stands for it"
    assert outcome in lies and len(lies) >= 3, lies
