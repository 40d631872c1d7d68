"""Results that no database stores: the task ends, and its effect is unknown (I13).

The same on both: PostgreSQL refuses more than SQLite, and a worker that takes a refusal for a
database that is away would come back to it for ever.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import recovery
from reconciler.model.states import TaskKind
from reconciler.records import allocations, leasing, nodes, queue
from reconciler.runs.collect import Outcome
from reconciler.settings import Settings
from reconciler.work import worker
from reconciler.work.kinds import HANDLERS
from reconciler.work.settle import settle
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.lifecycle import test_task_failures

pytestmark = pytest.mark.covers("CTRL-8", "CTRL-9", "I13")
engine, sold, postgresql = (
    test_task_failures.engine,
    test_task_failures.sold,
    test_task_failures.postgresql,
)

# No row may be kept of these: neither as text, nor in a document, nor as a number.
REFUSED = {"nul": "serial ABC\0", "half a pair": "half \ud800", "no number": float("nan")}


def begun(sold: Site, tmp_path: Path) -> tuple[Settings, Task]:
    """The next task, its run under way."""
    settings = Settings(state_dir=tmp_path)
    with transaction(sold.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        (task,) = leasing.lease(conn, "worker")
    worker.prepare(sold.engine, settings, HANDLERS[task.kind], task, queue.run_id(task))
    return settings, task


def ended(ok: bool, evidence: dict[str, Any], **error: Any) -> Outcome:
    named = {} if ok else {"code": "x", "expected": "e", "found": "f", "remedy": "r", **error}
    result = {"schema": 1, "playbook": "p", "ok": ok, "step": "", "error": named}
    status = "successful" if ok else "failed"
    return Outcome(status, {**result, "evidence": evidence})


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("where", ["evidence of a success", "evidence of a failure", "error"])
def test_text_that_cannot_be_kept(sold: Site, tmp_path: Path, where: str, value: Any) -> None:
    with transaction(sold.engine) as conn:
        key = sold.allocate(conn)
    settings, task = begun(sold, tmp_path)
    untouched = {"disk_written": False, "leftovers": False}
    hostile = {"readiness": {"mac": value}, "plan": {}, "image": {}, **untouched}
    outcome = {
        "evidence of a success": lambda: ended(True, hostile),
        "evidence of a failure": lambda: ended(False, hostile),
        "error": lambda: ended(False, untouched, found=value),
    }[where]()
    settle(sold.engine, settings, HANDLERS[task.kind], task, outcome)
    with reading(sold.engine) as conn:
        row = queue.get(conn, task.id)
        assert (row.state, row.error["code"]) == ("failed", "outcome_unreadable")
        assert ("error" if where == "error" else "mac") in row.error["found"]
        assert allocations.get(conn, key).state == "failed"
        (slot,) = recovery.blocked(conn)
        assert slot.health_detail["code"] == "outcome_unreadable"


def test_why_a_host_was_not_reached_can_always_be_kept(sold: Site, tmp_path: Path) -> None:
    with transaction(sold.engine) as conn:
        sold.allocate(conn)
    settings, task = begun(sold, tmp_path)
    lost = Outcome("failed", None, "unreachable: \0 \ud800 who", unreachable=True)
    settle(sold.engine, settings, HANDLERS[task.kind], task, lost)
    with reading(sold.engine) as conn:
        error = queue.get(conn, task.id).error
        assert error["code"] == "host_unreachable"
        assert error["found"] == "unreachable: \ufffd \ufffd who"


def test_a_number_that_fits_no_column(sold: Site, tmp_path: Path) -> None:
    with transaction(sold.engine) as conn:
        queue.enqueue(conn, queue.Enqueue(TaskKind.NODE_PARITY, "n1", "node", "n1"), ADMIN)
    settings, task = begun(sold, tmp_path)
    report = {"parity": {"intent": "slice", "failures": 10**30, "warnings": 0, "identity": {}}}
    settle(sold.engine, settings, HANDLERS[task.kind], task, ended(True, report))
    with reading(sold.engine) as conn:
        row = queue.get(conn, task.id)
        assert (row.state, row.error["code"]) == ("failed", "outcome_unreadable")
        row.error["found"].encode()
