"""The service and the account of telemetry: installed once, and taken back without a trace."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _telemetry_service
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_files,
    _boot_units,
    _change,
    _command,
    _host,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _telemetry

from tests.unit.plugins.module_utils.core.test_boot_service import SHOW, block

pytestmark = pytest.mark.covers("SLICE-11")

UNIT = _boot_units.TELEMETRY
NAME = _telemetry_service.ACCOUNT
ROOT = "root:x:0:0:root:/root:/bin/bash"
ADD = (
    *("useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"),
    *("--shell", "/bin/sh", "--password", "*", "--", NAME),
)


def drive(**params: str) -> list[str]:
    return _change.drive(_telemetry_service.SUBJECT, params, check_mode=False).done


def test_installed_once_and_taken_back(
    tree: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"active": "inactive", "enabled": ""}
    passwd = [ROOT]
    run = script.run

    def act(argv: list[str], **options: Any) -> Any:
        """Effects of the programs on the host, beside their answers."""
        if argv[0] == "useradd":
            passwd.append(f"{NAME}:x:998:998::/nonexistent:/bin/sh")
        elif argv[0] == "userdel":
            passwd.pop()
        elif argv[:2] == ["systemctl", "enable"]:
            state["enabled"] = "enabled"
        elif argv[:2] == ["systemctl", "restart"]:
            state["active"] = "active"
        elif argv[:2] == ["systemctl", "disable"]:
            state.update(active="inactive", enabled="")
        _host.write("/etc/passwd", "\n".join(passwd) + "\n")
        script.answers[(*SHOW, UNIT.service)] = []
        script.on(*SHOW, UNIT.service, out=block(state["active"], state["enabled"]))
        return run(argv, **options)

    monkeypatch.setattr(_command, "run", act)
    for argv in (
        ADD, ("userdel", "--", NAME), ("systemctl", "daemon-reload"),
        *(("systemctl", *words, UNIT.service) for words in (
            ("enable", "--no-reload"), ("restart",), ("disable", "--now", "--no-reload"))),
    ):  # fmt: skip
        script.on(*argv)
    _host.write("/etc/passwd", f"{ROOT}\n")
    _host.write(_telemetry_service.PRINCIPALS + "-other", "theirs\n")
    before = sorted(path for path in tree.rglob("*") if path.is_file())
    assert drive() == ["add_account", "write_file", "install_service", "start_service"]
    assert drive() == []
    assert _boot_files.edited(UNIT) == []
    # With a login shell, the account could run more than its forced command.
    line = _host.read(_telemetry_service.PRINCIPALS) or ""
    assert line.startswith("restrict,command=") and line.endswith(NAME)
    _host.write(_telemetry_service.PRINCIPALS, f"{NAME}\n")
    assert drive() == ["write_file"]
    # The network's settings are borrowed and stay.
    _host.write(UNIT.settings_path, "{}")
    assert drive(state="absent") == ["remove_service", "remove_file", "remove_account"]
    assert drive(state="absent") == []
    _host.remove(UNIT.settings_path)
    assert sorted(path for path in tree.rglob("*") if path.is_file()) == before


@pytest.mark.parametrize(("age_s", "printed"), [(30, "{}"), (300, ""), (-300, ""), (-4e8, "")])
def test_only_a_recent_snapshot_is_printed(tmp_path: Path, age_s: float, printed: str) -> None:
    """A future time is left by a service that stopped before the clock was set back."""
    snapshot = tmp_path / "snapshot.json"
    snapshot.write_text("{}")
    os.utime(snapshot, (time.time() - age_s,) * 2)
    command = _telemetry_service.COMMAND.replace(_telemetry.SNAPSHOT, str(snapshot))
    done = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (printed, "")
