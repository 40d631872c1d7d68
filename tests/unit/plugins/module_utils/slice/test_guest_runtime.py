"""Cloud-config of a guest's runtime, and a tenant's own document after it."""

from __future__ import annotations

import ast
import base64
import gzip
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _source_closure
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _guest_probes,
    _guest_runtime,
    _guest_telemetry,
)

pytestmark = pytest.mark.covers("SLICE-3")

BAKED = {"source": "baked", "driver": "570-server", "probes": {"gpu_compute": 600}}
INSTALLED = {
    "source": "cloud_init",
    "driver": "570-server",
    "cuda": "12-8",
    "rdma": True,
    "tuning": True,
    "cuda_repository": {"url": "https://mirror.example/cuda", "fingerprint": "A" * 40},
    "probes": {"gpu_compute": 600},
}


ENABLE_NOW = ["systemctl", "--no-reload", "--no-block", "--now", "enable"]


def config_of(runtime: dict[str, Any]) -> dict[str, Any]:
    return _guest_runtime.cloud_config(runtime, {"net.core.rmem_max": "268435456"}, "unlimited")


def files(runtime: dict[str, Any]) -> dict[str, str]:
    """Text of each file by path, as cloud-init writes it."""
    return {file["path"]: written(**file) for file in config_of(runtime)["write_files"]}


def written(content: str, encoding: str = "", **_more: str) -> str:
    return gzip.decompress(base64.b64decode(content)).decode() if encoding == "gz+b64" else content


def test_a_baked_runtime_brings_the_probes_only() -> None:
    config = config_of(BAKED)
    assert set(config) == {"write_files", "runcmd"}
    assert files(BAKED) == {
        **files({}),
        _guest_runtime.PROGRAM: Path(_guest_probes.__file__).read_text(),
        f"/etc/systemd/system/{_guest_runtime.UNIT}": _guest_runtime._SERVICE,
    }
    # By a single program, without a reload of systemd. The probes are first: the host waits for
    # them.
    (enable,) = config["runcmd"]
    assert enable == [*ENABLE_NOW, _guest_runtime.UNIT, _guest_runtime._TELEMETRY_UNIT]


@pytest.mark.covers("SLICE-11")
def test_every_slice_reports_its_telemetry() -> None:
    ((_path, program), (unit, service)) = files({}).items()
    assert program == Path(_guest_telemetry.__file__).read_text()
    assert f"ExecStart=/usr/bin/python3 -IS {_path}\n" in service
    assert config_of({})["runcmd"] == [[*ENABLE_NOW, Path(unit).name]]
    assert _guest_telemetry.PORT.endswith("/org.gpuaas.telemetry.0")


@pytest.mark.parametrize("program", [_guest_probes, _guest_telemetry])
def test_the_program_needs_the_standard_library_only(program: ModuleType) -> None:
    tree = ast.parse(Path(str(program.__file__)).read_text())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not [name for name in names if name and name.startswith("ansible")]
    # Ansible sends a module with the files that it imports, so that the source is on the host.
    sent = _source_closure.closure("slice._guest_runtime", _source_closure.source)
    assert f"slice.{Path(str(program.__file__)).stem}" in sent


def test_named_versions_are_installed_and_the_guest_restarts_once(tmp_path: Path) -> None:
    """The probes wait for the restart; a failed installation is followed by none."""
    config, written = config_of(INSTALLED), files(INSTALLED)
    script = written[_guest_runtime._INSTALLER]
    for package in (
        "linux-headers-$(uname -r)", "nvidia-driver-570-server", "cuda-toolkit-12-8",
        "rdma-core", "ibverbs-utils",
    ):  # fmt: skip
        assert f" {package}" in script
    # Telemetry starts before an installation that takes minutes, the probes after it, or after the
    # restart that ends it.
    assert config["runcmd"] == [
        ["sysctl", "--system"],
        *config_of({})["runcmd"],
        ["systemctl", "--no-reload", "enable", _guest_runtime.UNIT],
        [_guest_runtime._INSTALLER],
        [*ENABLE_NOW, _guest_runtime.UNIT],
    ]
    pending = _guest_runtime._PENDING
    assert pending in written
    service = written[f"/etc/systemd/system/{_guest_runtime.UNIT}"]
    assert f"ConditionPathExists=!{pending}\n" in service
    state = {"mode": "reboot", "condition": f"test -e {_guest_runtime._INSTALLED}"}
    assert config["power_state"] == state
    assert config["apt"]["sources"]["gpuaas-cuda"]["keyid"] == "A" * 40
    # The script itself, with an apt-get that fails, then with an apt-get that first has to wait.
    done, taken, waiting = (tmp_path / name for name in ("installed", "taken", "pending"))
    script = script.replace(_guest_runtime._INSTALLED, str(done)).replace(pending, str(waiting))
    script = script.replace("/dev/console", str(tmp_path / "console"))
    programs = {"apt-get": "exit 1", "sleep": f"rm -f {taken}"}
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for exists in (False, True):
        for name, body in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
            (tmp_path / name).chmod(0o755)
        waiting.touch()
        ran = subprocess.run(["/bin/sh", "-c", script], env=path, check=False)
        assert (ran.returncode == 0, done.exists()) == (exists, exists)
        # The probes of a guest without its runtime fail at once.
        assert waiting.exists() is exists
        taken.touch()
        programs["apt-get"] = f"test $2 != update || test ! -e {taken}"


def test_limits_of_the_guest() -> None:
    written = files(INSTALLED)
    assert "net.core.rmem_max = 268435456\n" in written["/etc/sysctl.d/60-gpuaas.conf"]
    assert written["/etc/security/limits.d/60-gpuaas.conf"].splitlines() == [
        "* - memlock unlimited",
        "root - memlock unlimited",
    ]
