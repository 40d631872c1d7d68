"""Repairs by the real roles, on a copy of this machine's folders with stand-ins for its programs.

See tests/data/deployed_machine: writes, interfaces and Ansible are real.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.deployed_machine import NEEDS_ROOT, ROOT, play

pytestmark = [pytest.mark.covers("HOST-4", "HOST-10"), NEEDS_ROOT]

STORY = """
gpuaas host parity --profile lab --remediate 2>&1
echo ---; gpuaas host prepare --profile lab 2>&1
echo '{"mode": "slice"}' > /etc/gpuaas/slice-mode.json
touch /etc/dnsmasq.d/gpuaas-gpuaas-slice-old.conf
iptables -t nat -F POSTROUTING; chmod 700 /var/lib/libvirt
echo ---; gpuaas host prepare --profile lab >/dev/null 2>&1; echo "code $?"
ls /etc/dnsmasq.d; iptables -t nat -S POSTROUTING | tail -n 1; stat -c %a /var/lib/libvirt
"""


@pytest.mark.long
def test_drift_is_repaired_by_parity_and_by_prepare(tmp_path: Path) -> None:
    """A failure beyond repair (a reboot, an enrolment) stays a failed check with its reason."""
    profile = yaml.safe_load((ROOT / "profiles" / "lab.yml").read_text())
    profile["fabric"] |= {"pf_ids": [], "vfs_per_pf": 0}
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "lab.yml").write_text(yaml.safe_dump(profile))
    environment = {
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
        "GPUAAS_PROFILES_DIR": f"{tmp_path}/profiles",
        "LC_ALL": "C.UTF-8",
    }
    done = play(STORY, tmp_path / "scratch", environment=environment, limit_s=180)
    assert (done.returncode, done.stderr) == (0, "")
    parity, refused, left = done.stdout.split("---\n")
    assert [line for line in parity.splitlines() if "repaired: " in line] == [
        "repaired: slice_packages",
        "repaired: libvirt_host",
        "repaired: fabric_functions",
        "repaired: slice_network",
        "not repaired: boot_configuration (reboot_required)",
    ]
    assert " status=PASS check=nat detail=-A\\ POSTROUTING\\ -s\\ 10.100.0.0/24" in parity
    for name in ("ovs_bridge", "ip_forwarding", "network_service", "vfio_modules"):
        assert f" status=PASS check={name} " in parity
    assert " status=PASS check=libvirt_directory detail=0755" in parity
    for name in ("reboot_required", "node_agent"):
        assert f" status=FAIL check={name} " in parity
    assert "not in slice mode" in refused
    assert left.split() == [
        *("code", "0", "gpuaas-slice.conf"),
        *["-A", "POSTROUTING", "-s", "10.100.0.0/24", "-j", "MASQUERADE"],
        "755",
    ]
