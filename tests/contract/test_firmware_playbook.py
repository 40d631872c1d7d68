"""Firmware playbook run by hand, against a stand-in that behaves like the real RACADM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from reconciler.model import firmware
from reconciler.runs import contract
from tests.deployed_machine import ALONE, NEEDS_ROOT

ROOT = Path(__file__).resolve().parents[2]


def play(
    folder: Path, *, beside: str = "", inventory: dict[str, Any] | None = None, **variables: Any
) -> tuple[int, dict[str, Any]]:
    """Return exit code and slice_result of a run on this machine, with only `beside` running.

    inventory: variables of the host in the inventory.
    """
    profile = yaml.safe_load((ROOT / "profiles" / "xe9680l-h200.yml").read_text())
    given = folder / "variables.json"
    defaults = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "slice_profile": profile,
        "slice_racadm_program": str(folder / "racadm"),
        "bios_settings_down_after": 0,
    }
    values = {key: value for key, value in (defaults | variables).items() if value is not None}
    given.write_text(json.dumps(values))
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps({"all": {"hosts": {"host": inventory or {}}}}))
    done = subprocess.run(
        [*ALONE, "sh", "-c", f'{beside} exec "$@"', "sh",
         str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(hosts),
         "-e", f"@{given}",
         str(ROOT / "playbooks" / "firmware.yml")],
        capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "build" / "collections"),
             "ANSIBLE_SHOW_CUSTOM_STATS": "1", "ANSIBLE_NOCOLOR": "1",
             "ANSIBLE_HOME": str(folder / "ansible"), "ANSIBLE_PIPELINING": "1"},
    )  # fmt: skip
    run = done.stdout.rpartition("RUN: ")[2]
    assert run, done.stdout + done.stderr
    return done.returncode, contract.check_result(json.JSONDecoder().decode(run)["slice_result"])


@pytest.mark.covers("HOST-1")
@NEEDS_ROOT
def test_settings_are_applied_and_the_job_is_followed(tmp_path: Path) -> None:
    (tmp_path / "racadm").symlink_to(ROOT / "tests" / "standin" / "racadm")
    state = tmp_path / "racadm-state.json"
    state.write_text('{"power": 1}')
    allowed: dict[str, object] = {"slice_apply": True, "slice_allow_reboot": True}
    code, result = play(tmp_path, **allowed, slice_approved_plan=f"sha256:{'0' * 64}")
    assert (code, result["error"]["code"]) == (2, "plan_changed")
    plan = firmware.approvable(result["evidence"]["bios"]["differences"])
    code, result = play(tmp_path, **allowed, slice_approved_plan=plan["digest"])
    assert (code, result["ok"], result["evidence"]["bios"]["settled"]) == (0, True, True)
    assert {job["status"] for job in result["evidence"]["bios"]["jobs"]} == {
        "Completed", "Reboot Completed",
    }  # fmt: skip
    checks = {row["check"]: row["status"] for row in result["evidence"]["preflight"]["checks"]}
    assert checks["bios_settings"] == "PASS" and json.loads(state.read_text())["cycles"] == 1
    # A run that was lost after it had made its job: the next run follows the same job.
    controller = json.loads(state.read_text())
    controller["settings"]["ProcSettings"]["LogicalProc"] = "Disabled"
    state.write_text(json.dumps(controller))
    for words in (
        ("set", "BIOS.ProcSettings.LogicalProc", "Enabled"),
        ("jobqueue", "create", "BIOS.Setup.1-1", "-r", "pwrcycle", "-s", "TIME_NOW"),
    ):
        subprocess.run([tmp_path / "racadm", *words], check=True, capture_output=True)
    # As `-e slice_apply=false` gives it: a text.
    _code, result = play(tmp_path, slice_apply="false", slice_allow_reboot="true")
    assert json.loads(state.read_text())["cycles"] == 1
    plan = firmware.approvable(result["evidence"]["bios"]["differences"])
    assert [step["name"] for step in plan["differences"]] == ["finish_job"]
    allowed = {"slice_apply": "true", "slice_allow_reboot": "true"}
    code, result = play(tmp_path, **allowed, slice_approved_plan=plan["digest"])
    assert (code, result["evidence"]["bios"]["settled"]) == (0, True)
    assert json.loads(state.read_text())["cycles"] == 2


@pytest.mark.covers("HOST-2")
@NEEDS_ROOT
def test_racadm_comes_from_where_the_profile_says(tmp_path: Path) -> None:
    """The variables name no repository and no program. The key does not exist, so nothing is
    trusted."""
    profile = yaml.safe_load((ROOT / "profiles" / "xe9680l-h200.yml").read_text())
    profile["racadm"]["key_url"] = f"file://{tmp_path}/no-key.asc"
    profile["racadm"]["packages"] = ["gpuaas-no-such-package"]
    mine = {"slice_profile": profile, "slice_racadm_program": None}
    # A variable of the inventory does not count as the result of a skipped task.
    forged = {f"bios_settings_{name}": {"settled": True} for name in ("first", "last")}
    code, result = play(tmp_path, inventory=forged, **mine, slice_apply=False)
    # The settings could not be read; the rest of the machine was checked.
    assert (code, result["ok"], result["evidence"]["bios"]) == (0, True, {})
    checks = {row["check"]: row for row in result["evidence"]["preflight"]["checks"]}
    assert checks["bios_settings"]["status"] == "FAIL" and len(checks) > 1
    assert f"{tmp_path}/no-key.asc" in checks["bios_settings"]["detail"]
    # When the run has to change the settings, it fails, with that reason.
    code, result = play(tmp_path, **mine, slice_apply=True, slice_allow_reboot=True)
    assert (code, result["ok"]) == (2, False)
    assert f"file://{tmp_path}/no-key.asc" in result["error"]["expected"]
    assert result["evidence"]["preflight"]["checks"]
    # On a machine that a tenant has as a whole, nothing is trusted or installed.
    entry = json.dumps({"slot_id": "machine", "fence": 1, "allocation_id": "a-tenant"})
    tenant = (
        "mount -t tmpfs tmpfs /opt && mkdir /opt/u /opt/w && mount -t overlay overlay"
        " -o lowerdir=/var/lib,upperdir=/opt/u,workdir=/opt/w /var/lib &&"
        f" mkdir -p /var/lib/gpuaas/ledger && echo '{entry}' > /var/lib/gpuaas/ledger/machine.json"
        " || exit;"
    )
    code, result = play(tmp_path, beside=tenant, **mine, slice_apply=False)
    checks = {row["check"]: row for row in result["evidence"]["preflight"]["checks"]}
    assert (code, "a-tenant" in checks["bios_settings"]["detail"]) == (0, True)


@pytest.mark.covers("HOST-2")
@NEEDS_ROOT
def test_a_racadm_that_answers_is_enough_whatever_brought_it(tmp_path: Path) -> None:
    """On an air-gapped host, a working RACADM makes the profile's repository unnecessary."""
    profile = yaml.safe_load((ROOT / "profiles" / "xe9680l-h200.yml").read_text())
    profile["racadm"]["key_url"] = f"file://{tmp_path}/no-key.asc"
    profile["racadm"]["packages"] = ["gpuaas-no-such-package"]
    file = Path("/opt/dell/srvadmin/bin/idracadm7")
    there = (
        f"mount -t tmpfs tmpfs /opt && mkdir -p {file.parent} &&"
        f" ln -s {ROOT}/tests/standin/racadm {file} || exit;"
    )
    code, result = play(
        tmp_path, beside=there, slice_profile=profile, slice_racadm_program=None, slice_apply=False
    )
    assert (code, result["ok"]) == (0, True)
    checks = {row["check"]: row["detail"] for row in result["evidence"]["preflight"]["checks"]}
    assert "is Disabled, not Enabled" in checks["bios_settings"]


@pytest.mark.covers("HOST-1")
@NEEDS_ROOT
def test_a_machine_with_a_guest_on_it_is_not_power_cycled(tmp_path: Path) -> None:
    (tmp_path / "racadm").symlink_to(ROOT / "tests" / "standin" / "racadm")
    guest = tmp_path / "qemu-system-x86_64"
    shutil.copy(shutil.which("sleep") or "", guest)
    allowed = {"slice_apply": True, "slice_allow_reboot": True}
    code, result = play(tmp_path, beside=f"{guest} 600 &", **allowed)
    assert (code, result["ok"]) == (2, False)
    assert result["error"]["code"] == "host_in_use"
    assert "qemu-system-x86_64" in result["error"]["found"]
    calls = json.loads((tmp_path / "racadm-state.json").read_text())["calls"]
    assert not [call for call in calls if call[0] == "set" or "create" in call]
