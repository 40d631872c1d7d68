"""Cloud-config of a guest's runtime: telemetry, readiness probes, NVIDIA's driver, RDMA, tuning."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _source_closure
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _guest_probes,
    _guest_telemetry,
)

PROGRAM = "/usr/local/lib/gpuaas/readiness.py"
UNIT = "gpuaas-readiness.service"
_INSTALLER = "/usr/local/lib/gpuaas/install-runtime"
# Both are in /run, so that the restart after the installation removes them.
_PENDING, _INSTALLED = "/run/gpuaas-runtime-pending", "/run/gpuaas-runtime-installed"

_SERVICE = f"""\
[Unit]
Description=Readiness probes for the host of this slice
# While the runtime is installed, the probes wait for the restart that ends the installation.
ConditionPathExists=!{_PENDING}

[Service]
ExecStart=/usr/bin/python3 -IS {PROGRAM} {_guest_probes.PORT}
Restart=on-failure
RestartSec=5

[Install]
WantedBy=multi-user.target
"""

_TELEMETRY = "/usr/local/lib/gpuaas/telemetry.py"
_TELEMETRY_UNIT = "gpuaas-telemetry.service"
_TELEMETRY_SERVICE = f"""\
[Unit]
Description=Telemetry of this machine for its project, by way of its host

[Service]
ExecStart=/usr/bin/python3 -IS {_TELEMETRY}
Nice=19
Restart=on-failure
RestartSec=30

[Install]
WantedBy=multi-user.target
"""

_RDMA_PACKAGES = "rdma-core ibverbs-utils infiniband-diags perftest"


def cloud_config(
    runtime: Mapping[str, Any], sysctl: Mapping[str, str], memlock: str
) -> dict[str, Any]:
    """Keys of cloud-config for `guest_runtime` of a hardware profile. Every slice has telemetry.

    sysctl, memlock: values of a guest that is tuned.
    """
    files = [
        _program(_TELEMETRY, _guest_telemetry),
        _file(_unit_path(_TELEMETRY_UNIT), _TELEMETRY_SERVICE),
    ]
    files += [_file(path, text) for path, text in _settings(runtime, sysctl, memlock).items()]
    commands = [["sysctl", "--system"]] if runtime.get("tuning") else []
    config: dict[str, Any] = {}
    probes, installs = bool(runtime.get("probes")), runtime.get("source") == "cloud_init"
    if probes:
        files += [
            _program(PROGRAM, _guest_probes),
            _file(_unit_path(UNIT), _SERVICE),
        ]
    if installs:
        files += [_file(_INSTALLER, _installer(runtime), "0700"), _file(_PENDING, "")]
        config["power_state"] = {"mode": "reboot", "condition": f"test -e {_INSTALLED}"}
        if repository := runtime.get("cuda_repository"):
            source = {
                "source": f"deb [signed-by=$KEY_FILE] {repository['url']} /",
                "keyid": repository["fingerprint"],
            }
            config["apt"] = {"sources": {"gpuaas-cuda": source}}
        # The installation takes minutes and may restart the guest, so telemetry starts before it.
        commands += [_enable(_TELEMETRY_UNIT, now=True), *([_enable(UNIT)] if probes else [])]
        commands += [[_INSTALLER], *([_enable(UNIT, now=True)] if probes else [])]
    else:
        # The host waits for the probes, so they start first.
        commands.append(_enable(*([UNIT] if probes else []), _TELEMETRY_UNIT, now=True))
    return {**config, "write_files": files, "runcmd": commands}


def _unit_path(name: str) -> str:
    return f"/etc/systemd/system/{name}"


def _enable(*units: str, now: bool = False) -> list[str]:
    """Enable the units, and with `now` start them, by one program. systemd reads units that it does
    not know when they start; a reload would read all again.
    """
    return ["systemctl", "--no-reload", *(["--no-block", "--now"] if now else []), "enable", *units]


def _settings(
    runtime: Mapping[str, Any], sysctl: Mapping[str, str], memlock: str
) -> dict[str, str]:
    """Configuration files by path."""
    files = {}
    if runtime.get("tuning"):
        rows = [f"{key} = {value}\n" for key, value in sysctl.items()]
        files["/etc/sysctl.d/60-gpuaas.conf"] = "".join(rows)
        rows = [f"{who} - memlock {memlock}\n" for who in ("*", "root")]
        files["/etc/security/limits.d/60-gpuaas.conf"] = "".join(rows)
    return files


def _installer(runtime: Mapping[str, Any]) -> str:
    """Script that installs the named versions. After a failure the guest is not restarted: its
    probes run at once and fail, and its console shows the reason.
    """
    packages = ["linux-headers-$(uname -r)"]
    if driver := runtime.get("driver"):
        packages += [f"nvidia-driver-{driver}"]
    if cuda := runtime.get("cuda"):
        packages += [f"cuda-toolkit-{cuda}"]
    if runtime.get("rdma"):
        packages += [_RDMA_PACKAGES]
    return f"""\
#!/bin/sh
set -eux
exec > /dev/console 2>&1
export DEBIAN_FRONTEND=noninteractive
trap 'test -e {_INSTALLED} || rm -f {_PENDING}' EXIT
# An apt of the system's own may hold the lists, and no option waits for it.
for _ in $(seq 20); do apt-get -q update && break; sleep 30; done
apt-get -q -y --no-install-recommends -o DPkg::Lock::Timeout=600 install {" ".join(packages)}
touch {_INSTALLED}
"""


def _program(path: str, program: ModuleType) -> dict[str, str]:
    """A program of the guest. Ansible sends it to the host because this file imports it.

    Packed, because cloud-init reads and writes the whole document several times before SSH starts,
    a character at a time.
    """
    text = _source_closure.source(program.__name__.removeprefix(f"{_source_closure.PACKAGE}."))
    # Without a time, so that the same program gives the same seed.
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    return {**_file(path, packed, "0755"), "encoding": "gz+b64"}


def _file(path: str, content: str, permissions: str = "0644") -> dict[str, str]:
    return {"path": path, "content": content, "permissions": permissions}
