"""Certificates of hosts: renewed in time, and named when they have ended; hosts are scripted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.lifecycle import host
from reconciler.model.errors import Problem
from reconciler.model.states import TaskKind
from reconciler.records import allocations, certificates, leasing, queue, tokens
from reconciler.runs import contract
from reconciler.settings import Settings
from reconciler.trust import keygen
from reconciler.trust.certificates import read_certificate
from reconciler.work import loops
from reconciler.work.loops import LOOPS
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.work.conftest import Attend, Runs, launched, statuses
from tests.unit.reconciler.work.test_unreachable import SILENT, STRANGER, attend

pytestmark = pytest.mark.covers("HOST-13")
__all__ = ["attend"]

DAY = 86_400.0


@pytest.fixture(scope="module")
def host_key(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("host") / "key"
    keygen.new_key(file, "root@host")
    return keygen.public_key(file.with_name("key.pub").read_text())


def certified(engine: sa.Engine, host_key: str, days: float, node_id: str = "n1") -> None:
    """The node's certificate ends in so many days."""
    with transaction(engine) as conn:
        tokens.record_certificate(
            conn,
            node_id,
            ADMIN,
            serial=str(days),
            public_key=host_key,
            certificate="as signed",
            principals=[node_id],
            valid_until=clock.read(conn) + days * DAY,
        )


def renewals(engine: sa.Engine) -> list[Task]:
    with transaction(engine) as conn:
        return queue.every(conn, kind=TaskKind.NODE_ENROL)


def test_a_certificate_is_renewed_for_the_same_key_before_it_ends(
    sold: Site, settings: Settings, runs: Runs, attend: Attend, host_key: str
) -> None:
    certified(sold.engine, host_key, 31)
    loops.renew_certificates(sold.engine, settings)
    assert renewals(sold.engine) == []
    with transaction(sold.engine) as conn:
        conn.execute(sa.update(tables.node_certificates).values(valid_until=clock.now() + 29 * DAY))
    loops.renew_certificates(sold.engine, settings)
    loops.renew_certificates(sold.engine, settings)
    (task,) = renewals(sold.engine)
    certificate = {"serial": "1", "principals": ["n1"], "valid_until": "2026-01-01T00:00:00Z"}
    runs.ends(evidence={"certificate": certificate})
    assert attend().state == "succeeded"
    (spec,) = runs.launched
    contract.check_vars("renew_certificate", spec.variables)
    signed = read_certificate(spec.variables["slice_certificate"])
    assert (signed.kind, signed.principals) == ("host", ("n1",))
    with transaction(sold.engine) as conn:
        newest = certificates.current(conn, "n1")
        assert newest.certificate == spec.variables["slice_certificate"]
        assert newest.public_key == host_key
        assert certificates.ends(conn, ["n1"])["n1"] - clock.read(conn) > 89 * DAY
        assert sold.statuses(conn) == ["available", "available"], "the host is the same"
    loops.renew_certificates(sold.engine, settings)
    assert [row.id for row in renewals(sold.engine)] == [task.id]


def test_the_leader_looks_for_certificates_that_end() -> None:
    assert [loop.act for loop in LOOPS if loop.name == "certificates"] == [loops.renew_certificates]


def test_a_renewal_that_fails_is_tried_again_the_next_day(
    sold: Site, settings: Settings, runs: Runs, attend: Attend, host_key: str
) -> None:
    certified(sold.engine, host_key, 20)
    loops.renew_certificates(sold.engine, settings)
    error = {"code": "certificate_not_taken", "expected": "x", "found": "y", "remedy": "z"}
    runs.ends("failed", step="Put the certificate in place", error=error, evidence={})
    assert attend().error["code"] == "certificate_not_taken"
    loops.renew_certificates(sold.engine, settings)
    assert len(renewals(sold.engine)) == 1
    with transaction(sold.engine) as conn:
        assert certificates.ends(conn, ["n1"])["n1"] < clock.read(conn) + 21 * DAY
        earlier = clock.now() - host.RENEWAL_RETRY_S - 1
        conn.execute(sa.update(tables.tasks).values(created_at=earlier))
    loops.renew_certificates(sold.engine, settings)
    assert len(renewals(sold.engine)) == 2


def test_a_key_that_was_replaced_meanwhile_is_not_brought_back(
    sold: Site, settings: Settings, runs: Runs, attend: Attend, host_key: str
) -> None:
    certified(sold.engine, host_key, 20)
    loops.renew_certificates(sold.engine, settings)
    with transaction(sold.engine) as conn:
        tokens.replace_certificates(conn, "n1", "ssh-ed25519 another", ADMIN)
    runs.ends(evidence={"certificate": {"serial": "1", "principals": [], "valid_until": ""}})
    assert attend().error["code"] == "host_key_not_accepted"
    with transaction(sold.engine) as conn, pytest.raises(Problem, match="host_certificate_missing"):
        certificates.current(conn, "n1")


def test_nobody_can_renew_what_has_ended_or_never_was(
    sold: Site, settings: Settings, host_key: str
) -> None:
    with transaction(sold.engine) as conn, pytest.raises(Problem, match="host_certificate_missing"):
        host.queue_renewal(conn, settings, "n1", ADMIN)
    certified(sold.engine, host_key, -1)
    loops.renew_certificates(sold.engine, settings)
    assert renewals(sold.engine) == []
    with transaction(sold.engine) as conn, pytest.raises(Problem) as caught:
        host.queue_renewal(conn, settings, "n1", ADMIN)
    assert caught.value.code == "host_certificate_expired"
    assert "gpuaas nodes userdata n1" in caught.value.remedy


def test_no_run_begins_on_a_host_whose_certificate_has_ended(
    sold: Site, runs: Runs, attend: Attend, host_key: str
) -> None:
    """So nothing is unknown: the slot is not blocked, and not sold again before a parity."""
    certified(sold.engine, host_key, -1)
    key = launched(sold)
    ended = attend()
    assert (ended.state, runs.launched) == ("failed", [])
    assert ended.error["code"] == "host_certificate_expired"
    assert "enrollment-token" in ended.error["remedy"]
    with transaction(sold.engine) as conn:
        assert allocations.get(conn, key).state == "failed"
        assert sold.statuses(conn) == ["disabled", "available"]


def test_a_host_that_is_refused_because_its_certificate_ended_meanwhile(
    sold: Site, runs: Runs, attend: Attend, host_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The effects of the run are unknown, as with any other contact that was lost."""
    certified(sold.engine, host_key, -1)
    monkeypatch.setattr(certificates, "require_valid", lambda *_: None)
    launched(sold)
    runs.outcome = replace(SILENT, problem=STRANGER)
    ended = attend()
    assert ended.error["code"] == "host_certificate_expired"
    assert STRANGER in ended.error["found"]
    assert statuses(sold) == ["available", "cleanup_blocked"]


def test_a_task_that_waits_for_a_lost_host_says_that_its_certificate_has_ended(
    sold: Site, runs: Runs, attend: Attend, host_key: str
) -> None:
    launched(sold)
    runs.outcome = SILENT
    waits = attend()
    certified(sold.engine, host_key, -1)
    with transaction(sold.engine) as conn:
        reason = leasing.wait_reasons(conn, [waits])[waits.id]
    assert (reason["code"], reason["attempts"]) == ("host_certificate_expired", 1)
    assert "gpuaas nodes userdata n1" in reason["detail"]
