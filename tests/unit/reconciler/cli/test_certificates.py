"""Certificates of hosts as operators meet them: in lists, in the doctor, in numbers, renewed."""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from reconciler.db import clock
from reconciler.db import schema as tables
from reconciler.db.engine import transaction
from reconciler.db.schema import Task
from reconciler.settings import Settings
from reconciler.trust import keygen
from reconciler.trust.certificates import read_certificate
from reconciler.work import worker
from reconciler.work.handler import open_work
from reconciler.work.kinds import HANDLERS
from tests.unit.reconciler.api.stack import NODE, Stack, discovery
from tests.unit.reconciler.cli.conftest import Gpuaas
from tests.unit.reconciler.cli.test_doctor import Doctor, doctor, sound
from tests.unit.reconciler.work.conftest import Runs, runs

pytestmark = pytest.mark.covers("HOST-13")
__all__ = ["doctor", "runs", "sound"]

DAY = 86_400.0


@pytest.fixture
def enrolled(sound: Stack, tmp_path: Path) -> Stack:
    """The host has enrolled, by the API and with a key of its own."""
    keygen.new_key(tmp_path / "host", "root@host")
    accepted = sound.client("admin").post(f"admin/nodes/{NODE}/enrollment-token").json()
    answer = enrol(sound, tmp_path, accepted["token"])
    assert answer.status_code == 200, answer.text
    return sound


def enrol(stack: Stack, folder: Path, token: str) -> httpx.Response:
    """The request of the userdata script, from the host that has the key in this folder."""
    key = keygen.public_key((folder / "host.pub").read_text())
    body = discovery()["identity"] | {"host_key": key, "token": token, "node_id": NODE}
    return stack.client().post(f"nodes/{NODE}/enrol", json=body | {"hostname": "lab"})


def given(userdata: str) -> str:
    """The token in the script that `gpuaas nodes userdata` prints."""
    (token,) = re.findall(r"^token='(.+)'$", userdata, re.MULTILINE)
    return str(token)


def discovered(stack: Stack, runs: Runs) -> dict[str, Any]:
    """A task of the node, leased and attended; its run finds the host as it was."""
    accepted = stack.client("admin").post(f"admin/nodes/{NODE}/slice-topology/discovery")
    assert accepted.status_code == 202, accepted.text
    task = stack.lease()
    assert task.id == accepted.json()["id"]
    runs.ends(evidence={"discovery": discovery()})
    settings = stack.settings.model_copy(update={"poll_s": 0.01})
    worker.attend(stack.engine, settings, task, threading.Event())
    ended: dict[str, Any] = stack.client("admin").get(f"admin/tasks/{task.id}").json()
    return ended


def left(stack: Stack, days: float) -> None:
    """Of the certificate's time, so much is left."""
    with transaction(stack.engine) as conn:
        until = clock.now() + days * DAY
        conn.execute(sa.update(tables.node_certificates).values(valid_until=until))


def metrics(stack: Stack) -> dict[str, float]:
    lines = stack.client("admin").get("http://test/metrics").text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith("gpuaas_host_certificate"))
    return {name: float(value) for name, _space, value in pairs}


def test_the_end_of_a_certificate_is_seen_before_it_comes(
    enrolled: Stack, doctor: Doctor, gpuaas: Gpuaas
) -> None:
    assert "host_certificates" not in doctor()
    valid = {
        'gpuaas_host_certificates{validity="valid"}': 1.0,
        'gpuaas_host_certificates{validity="expired"}': 0.0,
    }
    result = metrics(enrolled)
    assert result.items() >= valid.items()
    assert 89 * DAY < result["gpuaas_host_certificate_seconds"] < 90 * DAY

    left(enrolled, 10)
    finding = doctor()["host_certificates"]
    assert (finding["status"], NODE in finding["found"]) == ("warn", True)
    assert f"gpuaas nodes renew-certificate {NODE}" in finding["remedy"]
    assert 9 * DAY < metrics(enrolled)["gpuaas_host_certificate_seconds"] < 10 * DAY
    (listed,) = enrolled.client("admin").get("admin/nodes").json()["items"]
    shown = enrolled.client("admin").get(f"admin/nodes/{NODE}").json()
    assert listed["certificate_valid_until"] == shown["certificate_valid_until"]
    assert listed["certificate_valid_until"] in gpuaas.at(enrolled)("nodes", "list")

    left(enrolled, -1)
    finding = doctor()["host_certificates"]
    assert (finding["status"], "host_certificate_expired" in finding["found"]) == ("fail", True)
    assert f"gpuaas nodes userdata {NODE}" in finding["remedy"]
    assert metrics(enrolled)['gpuaas_host_certificates{validity="expired"}'] == 1.0


def test_a_certificate_is_renewed_on_request(enrolled: Stack, gpuaas: Gpuaas) -> None:
    left(enrolled, 10)

    def act(conn: Any, task: Task) -> dict[str, Any]:
        evidence = {"certificate": {"serial": "1", "principals": [NODE], "valid_until": "x"}}
        settings = Settings(state_dir=enrolled.settings.state_dir)
        return HANDLERS[task.kind].succeed(open_work(conn, settings, task), evidence)

    run = gpuaas.at(enrolled).ending(enrolled, act)
    run("nodes", "renew-certificate", NODE)
    assert run.status == 0, run.err
    assert metrics(enrolled)["gpuaas_host_certificate_seconds"] > 89 * DAY
    reasons = {row["reason"] for row in enrolled.client("admin").get("admin/audit").json()["items"]}
    assert "certificate renewed" in reasons


def test_two_who_ask_get_one_renewal_and_who_is_late_gets_a_way_back(
    enrolled: Stack, gpuaas: Gpuaas, runs: Runs, tmp_path: Path
) -> None:
    admin, run = enrolled.client("admin"), gpuaas.at(enrolled)
    first, second = (admin.post(f"admin/nodes/{NODE}/certificate") for _ in range(2))
    assert (first.status_code, first.json()["kind"]) == (202, "node.enrol")
    assert first.json()["id"] == second.json()["id"]
    admin.post(f"admin/tasks/{first.json()['id']}/cancel")
    left(enrolled, -1)
    late = admin.post(f"admin/nodes/{NODE}/certificate")
    assert (late.status_code, late.json()["code"]) == (409, "host_certificate_expired")

    # No task starts on such a host; the task shows the reason, and the node the time of expiry.
    refused = discovered(enrolled, runs)
    assert (refused["state"], refused["error"]["code"]) == ("failed", "host_certificate_expired")
    assert f"gpuaas nodes userdata {NODE}" in refused["error"]["remedy"]
    assert runs.launched == []
    ended = admin.get(f"admin/nodes/{NODE}").json()["certificate_valid_until"]
    assert datetime.fromisoformat(ended) < datetime.now(UTC)
    assert ended in run("nodes", "show", NODE)

    # The remedy enrols the host again with the token of its script; an expired token is refused,
    # and the next token is accepted.
    token = given(run("nodes", "userdata", NODE))
    with transaction(enrolled.engine) as conn:
        conn.execute(sa.update(tables.enrolment_tokens).values(expires_at=clock.now() - 1))
    late = enrol(enrolled, tmp_path, token)
    assert (late.status_code, late.json()["code"]) == (401, "token_invalid")
    assert f"gpuaas nodes userdata {NODE}" in late.json()["remedy"]
    answer = enrol(enrolled, tmp_path, given(run("nodes", "userdata", NODE)))
    assert answer.status_code == 200, answer.text
    certificate = read_certificate(answer.json()["certificate"])
    assert (certificate.kind, certificate.principals) == ("host", (NODE,))
    assert certificate.valid_before > datetime.now(UTC) + timedelta(days=89)
    assert metrics(enrolled)['gpuaas_host_certificates{validity="expired"}'] == 0.0
    assert ended not in run("nodes", "list")

    # And the host is worked on again.
    assert discovered(enrolled, runs)["state"] == "succeeded"
    (spec,) = runs.launched
    assert (spec.playbook, spec.node.node_id) == ("discover", NODE)
