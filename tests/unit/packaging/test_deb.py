"""The Debian package on a machine with systemd: installed, installed again, purged."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.packaging.machine import ROOT, Machine, booted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a machine of its own needs root"),
    pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs the release's Python"),
]
SETTINGS = "/etc/gpuaas/gpuaas.env"
PUBLIC_KEY = "/var/lib/gpuaas/trust/host_ca.pub"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deb")
    words = [str(ROOT / "scripts" / "deb"), str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("gpuaas_*.deb")
    return built


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, package: Path) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("machine")
    (folder / "machine").mkdir()
    with booted(folder / "machine", {package.parent: "/opt/package"}) as machine:
        # A container image forbids packages to start services; a server does not.
        machine.run("rm", "-f", "/usr/sbin/policy-rc.d")
        # It shows this machine's files, on which modules of the collection may have run.
        machine.run("rm", "-rf", "/var/lib/gpuaas", "/etc/gpuaas", "/run/gpuaas")
        yield machine


@pytest.fixture
def installed(machine: Machine, package: Path) -> None:
    """The package is on the machine. The preceding test has installed it, unless pytest-xdist plays
    the two tests in different processes, or this process has purged it.
    """
    if machine.try_("test", "-e", "/usr/bin/gpuaas").returncode:
        _install(machine, package)


def test_an_installation_ends_in_a_working_doctor(machine: Machine, package: Path) -> None:
    printed = _install(machine, package)
    assert " 0 failures" in printed, printed
    findings = json.loads(_gpuaas(machine, "doctor", "--output", "json"))["findings"]
    # It listens on loopback until its operator names an address, which hosts need.
    open_points = {row["check"] for row in findings if row["status"] != "ok"}
    assert open_points <= {"public_url", "disk_space"}, findings
    assert {"collection", "profiles", "processes", "ssh_ca"} <= {row["check"] for row in findings}
    assert machine.run("systemctl", "is-enabled", "gpuaas.service").strip() == "enabled"
    # The saved token is an administrator's.
    added = ("nodes", "add", "n1", "--address", "192.0.2.7", "--profile", "xe9680l-h200")
    assert "n1" in _gpuaas(machine, *added)
    modes = machine.run("stat", "-c", "%a %U %G", "/etc/gpuaas", SETTINGS, "/var/lib/gpuaas")
    assert modes.splitlines() == ["750 root gpuaas", "640 root gpuaas", "700 gpuaas gpuaas"]
    # The shipped model is in an ONNX file.
    machine.run("/opt/gpuaas/bin/python", "-c", "import onnxruntime")
    # The service's user can change nothing of the program.
    theirs = machine.run(
        "find", "/opt/gpuaas", "!", "-user", "root", "-o", "!", "-type", "l", "-perm", "/022"
    )
    assert theirs == ""


@pytest.mark.usefixtures("installed")
def test_a_second_installation_keeps_settings_and_records(machine: Machine, package: Path) -> None:
    added = ("nodes", "add", "n2", "--address", "192.0.2.8", "--profile", "xe9680l-h200")
    _gpuaas(machine, *added)
    machine.run("sed", "-i", "$a GPUAAS_PUBLIC_URL=http://127.0.0.1:8080", SETTINGS)
    key = machine.run("cat", PUBLIC_KEY)
    assert " 0 failures" in _install(machine, package)
    assert "GPUAAS_PUBLIC_URL=http://127.0.0.1:8080" in machine.run("cat", SETTINGS)
    assert machine.run("cat", PUBLIC_KEY) == key
    # A site without the file of settings upgrades, too.
    machine.run("mv", SETTINGS, "/root/kept")
    _install(machine, package)
    assert machine.try_("test", "-e", SETTINGS).returncode == 1
    machine.run("mv", "/root/kept", SETTINGS)
    machine.run("systemctl", "restart", "gpuaas.service")
    nodes = json.loads(_gpuaas(machine, "nodes", "list", "--output", "json"))
    assert "n2" in [row["id"] for row in nodes]


@pytest.mark.usefixtures("installed")
def test_an_upgrade_that_is_given_up_leaves_the_service_running(machine: Machine) -> None:
    """dpkg calls both scripts when it cannot unpack the newer package."""
    scripts = "/var/lib/dpkg/info/gpuaas"
    machine.run(f"{scripts}.prerm", "upgrade", "9.9")
    assert machine.try_("systemctl", "is-active", "gpuaas.service").stdout.strip() == "inactive"
    machine.run(f"{scripts}.postinst", "abort-upgrade", "9.9")
    assert machine.run("systemctl", "is-active", "gpuaas.service").strip() == "active"


@pytest.mark.usefixtures("installed")
def test_a_purge_leaves_the_records_only(machine: Machine) -> None:
    machine.run("dpkg", "--purge", "gpuaas")
    assert machine.try_("systemctl", "is-active", "gpuaas.service").stdout.strip() == "inactive"
    places = "/etc/gpuaas /opt/gpuaas /usr/bin/gpuaas /usr/lib/systemd/system/gpuaas*"
    assert machine.run("sh", "-c", f"ls -d {places} 2> /dev/null || true") == ""
    assert machine.run("cat", PUBLIC_KEY).startswith("ssh-ed25519 ")


def test_another_python_than_a_supported_one_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho 3.14\n")
    python.chmod(0o755)
    refused = subprocess.run(
        [str(ROOT / "scripts" / "deb"), str(tmp_path / "out")],
        env={**os.environ, "GPUAAS_DEB_PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert refused.returncode == 1
    assert "expected Python 3.11, 3.12 or 3.13; found 3.14; build on a supported" in refused.stderr
    assert not (tmp_path / "out").exists()


def _install(machine: Machine, package: Path) -> str:
    # Omit the fsync of each of 10,000 files.
    return machine.run("dpkg", "--force-unsafe-io", "-i", f"/opt/package/{package.name}")


def _gpuaas(machine: Machine, *words: str) -> str:
    return machine.run("runuser", "-u", "gpuaas", "--", "gpuaas", *words)
