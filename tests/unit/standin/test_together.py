"""`make standins`: every stand-in answers a client of the product, changes by itself, and ends with
the command.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reconciler.doctor.inventory import maas, netbox
from reconciler.doctor.services import awx
from reconciler.inventory import maas as maas_api
from reconciler.inventory import netbox as netbox_api
from reconciler.inventory.maas import Status
from reconciler.inventory.netbox import Device
from reconciler.runs.awx.client import Client, awx_access
from reconciler.settings import PREFIX, Settings
from scripts.scenarios import ROOT
from tests.standin.__main__ import ADDRESSES, TAG

pytestmark = pytest.mark.slow


def test_a_service_works_with_them_by_the_settings_that_are_written(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.standin", str(tmp_path), "0.2"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert any("Ctrl-C" in line for line in process.stdout)
            rows = (tmp_path / "gpuaas.env").read_text().splitlines()
            pairs = [row.removeprefix(PREFIX).split("=", 1) for row in rows]
            values = {name.lower(): value for name, value in pairs}
            settings = Settings(**values, launcher="awx")
            for check in (netbox, maas, awx):
                findings = list(check(settings))
                assert findings and "fail" not in {each.status for each in findings}, findings
            _edited_meanwhile(settings)
            _installed_at_the_second_attempt(settings)
            _job_that_runs(settings)
            children = _children(process.pid)
            assert len(children) == 4
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(20)
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def _edited_meanwhile(settings: Settings) -> None:
    """Another user has changed the device since it was read, and both changes stay."""
    change = {"custom_fields": {"gpuaas_state": "ready"}}
    with netbox_api.Client(netbox_api.netbox_access(settings)) as client:
        device = next(row for row in client.every(Device, tag=TAG) if row.name == "gpu1")
        with pytest.raises(netbox_api.Conflict):
            client.patch(device, change)
        after = client.patch(client.read(device), change)
        assert after.custom_fields["gpuaas_state"] == "ready"


def _installed_at_the_second_attempt(settings: Settings) -> None:
    with maas_api.Client(maas_api.maas_access(settings)) as client:

        def seen() -> list[Status]:
            """Its states until it rests."""
            states = [Status(client.machine("abc2").status)]
            while states[-1] in (Status.DEPLOYING, Status.RELEASING):
                time.sleep(0.02)
                states.append(Status(client.machine("abc2").status))
            return sorted(set(states), key=states.index)

        for end in (Status.FAILED_DEPLOYMENT, Status.DEPLOYED):
            client.release("abc2", comment="a test")
            assert _went(seen(), Status.RELEASING, Status.READY)
            client.deploy("abc2", userdata="#!/bin/sh", series="noble", comment="a test")
            assert _went(seen(), Status.DEPLOYING, end)
        assert client.machine("abc2").ip_addresses == [ADDRESSES[1]]


def _job_that_runs(settings: Settings) -> None:
    with Client(awx_access(settings)) as client:
        (template,) = client.every("/job_templates/", name="gpuaas.slice.discover")
        wish = {"limit": "gpu1", "extra_vars": {}, "timeout": 60}
        job = client.post(f"/job_templates/{template['id']}/launch/", wish)
        states = [job["status"]]
        while states[-1] in ("pending", "waiting", "running"):
            time.sleep(0.02)
            states.append(client.get(f"/jobs/{job['id']}/")["status"])
        assert states[0] in ("pending", "waiting")
        seen = sorted(set(states), key=states.index)
        assert _went(seen, "pending", "waiting", "running", "successful")
        events = [row["event"] for row in client.every(f"/jobs/{job['id']}/job_events/")]
        assert (events[0], events[-1]) == ("playbook_on_start", "playbook_on_stats")


def _went(seen: list[Any], *states: Any) -> bool:
    """Whether it went through these states to the last. A busy machine may miss some."""
    return seen[-1] == states[-1] and seen == [state for state in states if state in seen]


def _children(parent: int) -> list[str]:
    return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
