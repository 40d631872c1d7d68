"""Packages of a slice host, installed by apt itself on systems that lack all of them.

The lab host's image has them already, because an emulated host unpacks them slowly. Some of them
are removed and installed there by tests/lab/test_missing_packages.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import small_debian
from tests.deployed_machine import ALONE, NEEDS_ROOT

ROOT = Path(__file__).resolve().parents[5]
MODULES = Path("c/ansible_collections/gpuaas/slice/plugins/module_utils")
# Played inside: installs bootstrap's packages, and prints the steps of a first and a second run.
STORY = """
import json, sys
sys.path.insert(0, "/c")
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _host_packages
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
params = {"packages": list(_host_packages.REQUIRED), "optional": ["gpuaas-no-such-package"]}
runs = [_change.drive(_host_packages.SUBJECT, params, check_mode=False) for _ in range(2)]
print(json.dumps([[run.done, str(run.failure or "")] for run in runs]))
"""
PROGRAMS = (
    *(
        "conntrack",
        "dhcp_release",
        "dnsmasq",
        "genisoimage",
        "gpg",
        "ip",
        "iptables",
        "nft",
        "nvme",
    ),
    *("ovs-ofctl", "ovs-vsctl", "qemu-img", "qemu-system-x86_64", "rdma", "virsh", "zstd"),
)


@pytest.fixture
def system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small Debian in a folder. Its services are not started."""
    root = tmp_path / "root"
    small_debian.make(request.param, root, "python3", "ca-certificates")
    policy = root / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    shutil.copytree(ROOT / "plugins/module_utils", root / MODULES)
    yield root
    shutil.rmtree(root)


@pytest.mark.long
@pytest.mark.covers("HOST-4")
@NEEDS_ROOT
@pytest.mark.parametrize("system", ["bookworm", "trixie"], indirect=True)
def test_a_system_without_the_packages_gets_all_of_them(system: Path) -> None:
    def inside(*words: str, stdin: str = "") -> str:
        done = subprocess.run(
            [*ALONE, "--root", str(system), *words],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    lacking = "for name; do command -v $name >/dev/null || echo $name; done"
    before = inside("sh", "-c", lacking, "sh", *PROGRAMS).split()
    assert {"nvme", "ovs-vsctl", "qemu-img", "virsh"} <= set(before)
    first, second = json.loads(inside("python3", "-I", "-", stdin=STORY).splitlines()[-1])
    assert first == [["install_packages", "install_optional"], ""]
    assert second == [[], ""]
    assert inside("sh", "-c", lacking, "sh", *PROGRAMS) == ""
    assert inside("dpkg", "--audit") == ""
