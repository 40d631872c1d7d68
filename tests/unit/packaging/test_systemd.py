"""The units: accepted by systemd itself, hardened, and runs survive a restart of the service."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from reconciler.cli.main import app
from reconciler.gateway.sessions import Limits
from reconciler.service.configuration import PAGE, page
from reconciler.settings import PREFIX, Settings

PACKAGING = Path(__file__).resolve().parents[3] / "packaging"
UNITS = sorted((PACKAGING / "systemd").glob("*.service"))
# Of 10. The rights to connect to hosts and start processes, which the service needs, make 2.
EXPOSED = 2.5


def parsed(unit: Path) -> configparser.ConfigParser:
    """A unit's sections; of a repeated name, the last."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return parser


def test_there_is_one_process_or_two_and_a_gateway() -> None:
    names = ["gpuaas-api", "gpuaas-gateway", "gpuaas-worker", "gpuaas"]
    assert [unit.stem for unit in UNITS] == names


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_that_exists(unit: Path) -> None:
    service = parsed(unit)["Service"]
    program, command, *options = service["ExecStart"].split()
    assert program == "/opt/gpuaas/bin/gpuaas"
    gpuaas: Any = get_command(app)
    assert command in gpuaas.commands
    assert options == (["--api-only"] if unit.stem == "gpuaas-api" else [])
    # A run outlives the service that started it, so systemd must not end it.
    assert ("KillMode" in service) == (unit.stem in ("gpuaas", "gpuaas-worker"))
    assert service["User"] == "gpuaas" and service["StateDirectoryMode"] == "0700"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_it_and_calls_it_hardened(unit: Path, tmp_path: Path) -> None:
    copy = installed(unit, tmp_path)
    verified = _analyze("verify", str(copy))
    assert (verified.returncode, verified.stderr) == (0, "")
    output = _analyze("security", "--offline=true", "--no-pager", str(copy)).stdout
    (level,) = re.findall(r"exposure level for \S+: ([0-9.]+)", output)
    assert float(level) <= EXPOSED, output


def test_processes_for_tenants_may_open_what_their_limits_allow() -> None:
    """A single tenant of a whole machine could otherwise use up systemd's default limit."""
    limits = Limits()
    most = limits.connections * (1 + limits.channels) + limits.strangers
    for name in ("gpuaas", "gpuaas-api", "gpuaas-gateway"):
        service = parsed(PACKAGING / "systemd" / f"{name}.service")["Service"]
        assert int(service.get("LimitNOFILE", "1024")) > most, name


@pytest.mark.parametrize("unit", ["gpuaas", "gpuaas-worker"])
def test_a_machine_of_pools_delegates_memory_and_opens_gpus_only(unit: str, tmp_path: Path) -> None:
    text = (PACKAGING / "systemd" / "pools.conf").read_text()
    copy = installed(PACKAGING / "systemd" / f"{unit}.service", tmp_path)
    # Not known to the systemd of Debian 12, which says so and goes on.
    unknown = not re.search(r"^systemd (25[4-9]|2[6-9]\d|[3-9]\d\d)", _analyze("--version").stdout)
    section = re.sub(r"^DelegateSubgroup=.*\n", "", text, flags=re.M) if unknown else text
    copy.write_text(copy.read_text().replace("[Install]", f"{section}[Install]"))
    verified = _analyze("verify", str(copy))
    assert (verified.returncode, verified.stderr) == (0, "")
    output = _analyze("security", "--offline=true", "--no-pager", str(copy)).stdout
    assert re.search(r"✗ DeviceAllow=\s+Service has a device ACL with some special devices", output)


def test_the_file_of_settings_names_settings() -> None:
    names = re.findall(r"^#?(GPUAAS_\w+)=", (PACKAGING / "gpuaas.env").read_text(), flags=re.M)
    assert names
    assert {name.removeprefix(PREFIX).lower() for name in names} <= set(Settings.model_fields)


def test_every_setting_is_documented_as_it_is() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m reconciler.service.configuration"
    assert all(field.description for field in Settings.model_fields.values())


def installed(unit: Path, folder: Path) -> Path:
    """A copy for this machine, which has neither the installation's program nor its user."""
    text = unit.read_text().replace("/opt/gpuaas/bin/gpuaas", str(Path(sys.executable)))
    copy = folder / unit.name
    copy.write_text(re.sub(r"^(User|Group)=.*", r"\1=root", text, flags=re.M))
    return copy


def _analyze(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *words], capture_output=True, text=True, check=False, timeout=60
    )
