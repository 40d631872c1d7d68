"""Firmware, users and boot settings by a BMC, on documents in an iDRAC 9's documented form.

Not run on hardware.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import (
    _redfish_inventory,
    _redfish_session,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware._redfish_connection import Trust

from tests.standin import bmc as standin
from tests.standin import redfish

pytestmark = pytest.mark.covers("CTRL-15", "P15")

REPOSITORY = Path(__file__).resolve().parents[5]
RECORDED: dict[str, Any] = json.loads((REPOSITORY / "tests/data/redfish-idrac9.json").read_text())
ACCOUNTS = "/redfish/v1/AccountService/Accounts"


def read(bmc: standin.Bmc, **documents: Any) -> dict[str, Any]:
    bmc.begin(documents=RECORDED | documents)
    account = _redfish_session.Account("root", standin.PASSWORD)
    with _redfish_session.Client(bmc.address, account, Trust(bmc.ca_file), timeout=60) as client:
        return _redfish_inventory.read(client)


def test_installed_versions_users_and_boot_settings(bmc: standin.Bmc) -> None:
    report = read(bmc)
    assert report["unreadable"] == {}
    sections = report["sections"]
    assert sections["redfish_firmware"] == {
        "BIOS BIOS.Setup.1-1": "2.5.4",
        "Integrated Dell Remote Access Controller iDRAC.Embedded.1-1": "7.10.50.00",
        "Mellanox Network Adapter - B8:3F:D2:00:00:01 NIC.Slot.7-1-1": "32.41.1000",
        "NVIDIA H200 Video.Slot.21-1": "96.00.B7.00.01",
        "PM1743 RI E3.S 15.36TB Disk.Bay.0:Enclosure.Internal.0-1": "OPPA4B5Q",
    }
    assert sections["redfish_users"] == {
        "ActiveDirectory enabled": "False",
        "LDAP enabled": "False",
        "LocalAccountAuth": "Enabled",
        "user 2": "root Administrator enabled",
        "user 3": "maas Operator enabled",
    }
    assert sections["redfish_boot"]["BootOrder"] == "Boot0003,Boot0004"
    assert sections["redfish_boot"]["SecureBootMode"] == "DeployedMode"
    assert bmc.record()["open_sessions"] == 0


def test_a_user_that_a_tenant_added_is_one_more(bmc: standin.Bmc) -> None:
    planted = RECORDED[f"{ACCOUNTS}/4"] | {
        "UserName": "svc",
        "RoleId": "Administrator",
        "Enabled": True,
    }
    after = read(bmc, **{f"{ACCOUNTS}/4": planted})["sections"]["redfish_users"]
    assert after["user 4"] == "svc Administrator enabled"


def test_what_the_bmc_does_not_show_is_named_and_never_followed_elsewhere(bmc: standin.Bmc) -> None:
    root = RECORDED["/redfish/v1"]
    without = {key: value for key, value in root.items() if key != "UpdateService"}
    elsewhere = {"AccountService": {"@odata.id": "https://attacker.example/users"}}
    report = read(bmc, **{"/redfish/v1": without | elsewhere})
    assert set(report["sections"]) == {"redfish_boot"}
    assert report["unreadable"]["redfish_firmware"] == "bmc_feature_missing: none"
    assert report["unreadable"]["redfish_users"].startswith("bmc_answer_malformed: ")


def test_a_bmc_with_very_many_users_is_bounded(bmc: standin.Bmc) -> None:
    many = [{"Id": str(n), "UserName": "u" * 999, "RoleId": "x", "Enabled": 1} for n in range(400)]
    report = read(bmc, **{ACCOUNTS: {"Members": many}})
    users = report["sections"]["redfish_users"]
    assert len(users) == _redfish_inventory.MOST
    assert max(map(len, users.values())) == _redfish_inventory.LONGEST
    assert report["unreadable"]["redfish_users"] == "147 more entries"
    many[0] = many[0] | {"RoleId": "Administrator"}
    after = read(bmc, **{ACCOUNTS: {"Members": many}})["sections"]["redfish_users"]
    assert [name for name in users if users[name] != after[name]] == ["user 0"]


def test_the_program_prints_the_report_and_no_password(bmc: standin.Bmc) -> None:
    bmc.begin(documents=RECORDED)
    program = [sys.executable, str(REPOSITORY / "scripts/ops/redfish_firmware_inventory.py")]

    def run(password: str) -> subprocess.CompletedProcess[str]:
        login = {"IDRAC_HOST": bmc.address, "IDRAC_USER": "root", "IDRAC_PASSWORD": password}
        environment = os.environ | login | {"IDRAC_CA_FILE": bmc.ca_file}
        return subprocess.run(program, env=environment, capture_output=True, text=True, check=False)

    done = run(standin.PASSWORD)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sections"]["redfish_users"]["user 2"].startswith("root ")
    wrong = run("another-secret")
    assert wrong.returncode == 1 and "bmc_login_refused" in wrong.stderr
    assert "another-secret" not in wrong.stderr + wrong.stdout
    assert standin.PASSWORD not in done.stdout + done.stderr
    assert redfish.SYSTEM in RECORDED


def test_a_password_that_json_quotes_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = 'pa"ss\\word'
    monkeypatch.setattr(_redfish_session, "Client", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(_redfish_inventory, "read", lambda *_, **__: {"name": f"root {secret}"})
    login = {"IDRAC_HOST": "bmc.example", "IDRAC_USER": "root", "IDRAC_PASSWORD": secret}
    assert _redfish_inventory.main([], login) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "root ***"}
