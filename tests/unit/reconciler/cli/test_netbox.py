"""`gpuaas netbox` and the doctor's check, against a service and a stand-in NetBox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reconciler.inventory import sync
from reconciler.inventory.expected import DEVICE_FIELDS, MACHINE_FIELDS
from tests.standin.netbox import DEVICES, TOKEN
from tests.standin.service import Manager
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.cli.conftest import Gpuaas
from tests.unit.reconciler.inventory.conftest import device, process

__all__ = ["process"]
pytestmark = pytest.mark.covers("ECO-2")
ROOT = Path(__file__).parents[4]


def begin(manager: Manager, **faults: Any) -> None:
    devices = [device(NODE, "192.0.2.7", local_context_data=None)]
    manager.begin(**{"devices": devices, "fields": list(DEVICE_FIELDS), **faults})


@pytest.fixture
def netbox(selling: Stack, process: Manager, gpuaas: Gpuaas) -> Manager:
    """A service with this NetBox."""
    gpuaas.leading(selling, process, sync.tend)
    begin(process)
    return process


def test_diff_sync_and_metrics(netbox: Manager, selling: Stack, gpuaas: Gpuaas) -> None:
    text = gpuaas("netbox", "diff")
    assert gpuaas.status == 0
    assert "netbox_outdated" in text and "`gpuaas netbox sync` writes it" in text
    assert "1 differences; nothing written" in gpuaas.err
    metrics = selling.client("admin", base="/").get("metrics").text
    assert "gpuaas_netbox_complete 1.0" in metrics
    assert 'gpuaas_netbox_differences{code="netbox_outdated"} 1.0' in metrics
    result = json.loads(gpuaas("netbox", "sync", "--reason", "day one", "--output", "json"))
    assert (result["done"], result["findings"]) == ({"devices written": 1}, [])
    assert json.loads(gpuaas("netbox", "show", "--output", "json")) == result
    (event,) = selling.client("admin").get("admin/audit?action=admin.netbox.sync").json()["items"]
    assert event["reason"] == "day one"
    for who in ("member", "node"):
        assert selling.client(who).post("admin/netbox/sync", json={}).status_code == 403


def test_a_netbox_that_answers_html(netbox: Manager, gpuaas: Gpuaas) -> None:
    begin(netbox, body="<html>Log in</html>")
    gpuaas("netbox", "sync")
    assert gpuaas.status == 1
    assert "netbox_silent" in gpuaas.err and "not JSON" in gpuaas.err


def test_names_of_netbox_cannot_write_to_the_terminal(netbox: Manager, gpuaas: Gpuaas) -> None:
    begin(netbox, devices=[device("\x1b]0;x\x07gpu")])
    assert "\x1b]0" not in gpuaas("netbox", "diff")


def test_a_site_without_netbox_and_without_a_reading(selling: Stack, gpuaas: Gpuaas) -> None:
    gpuaas.at(selling)
    gpuaas("netbox", "diff")
    assert (gpuaas.status, "netbox_not_configured" in gpuaas.err) == (1, True)
    gpuaas("netbox", "show")
    assert "netbox_reading_not_found" in gpuaas.err


def test_the_doctor_checks_version_fields_and_least_rights(
    process: Manager, gpuaas: Gpuaas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(tmp_path))
    others = ["/api/dcim/sites/", "/api/extras/tags/", "/api/extras/custom-fields/"]
    others += ["/api/users/permissions/", "/api/ipam/prefixes/", DEVICES]
    network = ["/api/ipam/vrfs/", "/api/dcim/mac-addresses/", "/api/ipam/ip-addresses/"]
    created = ["/api/extras/journal-entries/", *network]
    least = [f"{verb} {path}" for path in others for verb in ("POST", "PATCH", "DELETE")]
    least.remove(f"PATCH {DEVICES}")
    least += [f"{verb} {path}" for path in created for verb in ("PATCH", "DELETE")]

    def findings(**faults: Any) -> list[tuple[str, str]]:
        begin(process, **faults)
        rows = json.loads(gpuaas("doctor", "--output", "json"))["findings"]
        assert TOKEN not in str(rows)
        return [(row["status"], row["found"]) for row in rows if row["check"] == "netbox"]

    assert findings() == [], "a site without one"
    for name, value in process.settings.items():
        monkeypatch.setenv(f"GPUAAS_{name.upper()}", str(value))
    (fields, rights) = findings(forbidden=least)
    assert fields == ("ok", "1 tagged devices")
    # NetBox shows custom fields with an object only.
    ((status, text), _) = findings(forbidden=least, devices=[])
    assert status == "warn" and "no tagged device" in text
    assert rights[0] == "ok" and "and no others" in rights[1]
    (_, excess) = findings()
    assert excess[0] == "warn" and "may also: add /dcim/devices/" in excess[1]
    # The right to delete is known before the first deletion, which nothing was asked to do.
    (_, missing) = findings(forbidden=[*least, "DELETE /api/virtualization/virtual-machines/"])
    assert missing == ("warn", "the token may not: delete /virtualization/virtual-machines/")
    deleted = [row for row in process.record()["requests"] if row.startswith("DELETE")]
    assert deleted and all(row.endswith("/0/") for row in deleted)
    reading = [*least, f"PATCH {DEVICES}", "POST /api/virtualization/virtual-machines/"]
    (_, missing) = findings(forbidden=[*least, "GET /api/extras/journal-entries/"])
    assert missing == ("warn", "the token may not: view /extras/journal-entries/")
    unseen = [f"GET {path}" for path in ("/api/ipam/prefixes/", *network)]
    (_, missing) = findings(forbidden=[*least, *unseen])
    # Without the networks of sites there is no comparison.
    names = "/dcim/mac-addresses/, view /ipam/ip-addresses/, view /ipam/prefixes/, view /ipam/vrfs/"
    assert missing == ("fail", f"the token may not: view {names}")
    (_, missing) = findings(forbidden=reading)
    assert missing[0] == "warn"
    assert "change /dcim/devices/, add /virtualization/virtual-machines/" in missing[1]
    monkeypatch.setenv("GPUAAS_NETBOX_SYNC", "true")
    assert findings(forbidden=reading)[1][0] == "fail"
    assert findings(fields=["gpuaas_state"])[0][0] == "fail"
    ((status, text),) = findings(version="4.5")
    assert (status, text.split(":")[0]) == ("fail", "netbox_too_old")


def test_the_page_lists_the_custom_fields_of_the_code() -> None:
    page = (ROOT / "docs" / "netbox.md").read_text()
    block = page.split("```")[1].split("\n")[2:-1]
    listed = {line.split(",")[0]: line.rsplit(",", 2)[1] for line in block}
    assert listed == {**DEVICE_FIELDS, **MACHINE_FIELDS}
