"""`gpuaas maas` and the doctor's check, against a service and a stand-in MAAS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reconciler.inventory import maas_sync
from tests.standin.maas import TOKEN, USER
from tests.standin.service import Manager
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.cli.conftest import Gpuaas
from tests.unit.reconciler.work.test_maas import SLICE, machine, process

__all__ = ["process"]
pytestmark = pytest.mark.covers("ECO-3")


def begin(manager: Manager, **faults: Any) -> None:
    mine = {"hostname": NODE, "ip_addresses": ["192.0.2.7"], "tag_names": [SLICE]}
    manager.begin(**{"machines": [machine(**mine)], **faults})


@pytest.fixture
def maas(selling: Stack, process: Manager, gpuaas: Gpuaas) -> Manager:
    """A service with this MAAS."""
    gpuaas.leading(selling, process, maas_sync.tend)
    begin(process)
    return process


def test_diff_sync_and_a_slice_host_that_is_not_installed_anew(
    maas: Manager, selling: Stack, gpuaas: Gpuaas
) -> None:
    text = gpuaas("maas", "diff")
    assert gpuaas.status == 0
    assert "maas_script" in text
    assert "1 nodes bound, 1 machines annotated, 1 machines locked written" in gpuaas.err
    metrics = selling.client("admin", base="/").get("metrics").text
    assert "gpuaas_maas_complete 1.0" in metrics
    assert 'gpuaas_maas_differences{code="maas_script"} 2.0' in metrics
    result = json.loads(gpuaas("maas", "sync", "--reason", "day one", "--output", "json"))
    assert (result["done"], result["findings"]) == ({"scripts uploaded": 2}, [])
    assert json.loads(gpuaas("maas", "show", "--output", "json")) == result
    node = selling.client("admin").get(f"admin/nodes/{NODE}").json()
    assert (node["maas_system_id"], node["maas_tags"]) == ("abc123", [SLICE])
    for verb in ("deploy", "release"):
        gpuaas("maas", verb, NODE, "--yes")
        assert (gpuaas.status, "node_in_slice_mode" in gpuaas.err) == (1, True)
    gpuaas("maas", "unbind", NODE)
    gpuaas("maas", "deploy", NODE, "--yes")
    assert "maas_machine_unknown" in gpuaas.err
    for who in ("member", "node"):
        path = f"admin/nodes/{NODE}/maas-release"
        assert selling.client(who).post(path, json={}).status_code == 403


def test_a_site_without_maas_and_a_maas_that_answers_html(
    maas: Manager, selling: Stack, gpuaas: Gpuaas
) -> None:
    begin(maas, body="<html>Log in</html>")
    gpuaas("maas", "sync")
    assert (gpuaas.status, "maas_silent" in gpuaas.err) == (1, True)
    selling.settings = selling.settings.model_copy(update={"maas_url": ""})
    gpuaas.at(selling)
    gpuaas("maas", "diff")
    assert (gpuaas.status, "maas_not_configured" in gpuaas.err) == (1, True)


def test_the_doctor_checks_version_and_right(
    process: Manager, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path))

    def findings(**faults: Any) -> list[tuple[str, str]]:
        begin(process, **faults)
        rows = json.loads(gpuaas("doctor", "--output", "json"))["findings"]
        assert TOKEN not in str(rows)
        return [(row["status"], row["found"]) for row in rows if row["check"] == "maas"]

    assert findings() == [], "a site without one"
    for name, value in process.settings.items():
        monkeypatch.setenv(f"GPUAAS_{name.upper()}", str(value))
    assert findings() == [("ok", "version 3.5"), ("ok", f"user {USER}, an administrator")]
    assert [row[0] for row in findings(version="3.4.9")] == ["fail", "ok"]
    assert [row[0] for row in findings(superuser=False)] == ["ok", "fail"]
    ((status, text),) = findings(skew_s=400)
    assert (status, text.split(":")[0]) == ("fail", "maas_unauthorized")
