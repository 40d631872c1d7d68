"""Generated bootstrap, run for real on a copy of this machine's folders, in namespaces.

Real: the file as it ships, its writes, the network interfaces, the boot service that it installs.
Stand-ins: programs that would act on the machine itself (tests/data/deployed_machine/program).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows

from scripts import standalone
from tests.deployed_machine import NEEDS_ROOT, ROOT, play

pytestmark = [pytest.mark.covers("HOST-4", "HOST-6"), NEEDS_ROOT]

SCRIPT = "scripts/ops/gpuaas_slice_host_deploy_bootstrap.sh"
TWICE = """
sh "$1"; echo "code $?"
echo ---; sh "$1"; echo "code $?"
cp "$(command -v sleep)" /run/machine/qemu-system-x86_64
/run/machine/qemu-system-x86_64 600 & guest=$!
echo ---; GPUAAS_SLICE_REBOOT_IF_REQUIRED=1 sh "$1"; echo "code $?"
{ kill $guest; wait $guest; } 2>/dev/null
echo ---; GPUAAS_SLICE_REBOOT_IF_REQUIRED=1 sh "$1"; echo "code $?"
echo ---; cat /etc/gpuaas/slice-mode.json; iptables -t nat -S POSTROUTING | tail -n 1
cat /run/machine-gpuaas-slice-network-baseline.service.log
ovs-vsctl --columns=fail_mode find Bridge name=ovsbr0
ovs-ofctl dump-flows ovsbr0 | grep -c cookie=0x2
nft --stateless list table inet gpuaas_slice | head -n 1
cat /proc/sys/net/ipv4/ip_forward; ip -4 -br address show dev ovsbr0; grep reboot /run/machine/calls
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The generated file, with a profile whose fabric does not matter here."""
    lab = yaml.safe_load((ROOT / "profiles" / "lab.yml").read_text())
    lab["fabric"]["pf_ids"] = []
    profile = tmp_path / "lab.yml"
    profile.write_text(yaml.safe_dump(lab))
    (entry,) = (entry for entry in standalone.SCRIPTS if entry.path == SCRIPT)
    file = tmp_path / "bootstrap.sh"
    data = {**entry.data, "profiles/lab.yml": str(profile)}
    file.write_text(standalone.build(dataclasses.replace(entry, data=data)))
    return file


def test_a_deployed_machine_becomes_a_slice_host_by_one_file(script: Path, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "GPUAAS_SLICE_PROFILE": "lab"}
    done = play(TWICE, tmp_path / "scratch", str(script), environment=environment, limit_s=120)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, guarded, third, left = (part.split("\n") for part in done.stdout.split("---\n"))
    assert _words(first) == [
        "CHANGED module_cache",
        "PASS packages",
        "PASS tuning",
        "PASS gpu_services",
        "CHANGED kernel",
        "CHANGED libvirt",
        "CHANGED network",
        "CHANGED telemetry",
        "CHANGED slice_mode",
        "WARN reboot",
        "code 3",
    ]
    parts = [word.split()[1] for word in _words(first)[:9]]
    unchanged = [f"PASS {part}" for part in parts]
    assert _words(second) == [*unchanged, "WARN reboot", "code 3"]
    assert _words(guarded) == [*unchanged, "FAIL reboot", "code 1"]
    assert _words(third) == [*unchanged, "CHANGED reboot", "code 0"]
    assert left[:4] == [
        '{"mode": "slice", "profile": "lab"}',
        "-A POSTROUTING -s 10.100.0.0/24 -j MASQUERADE",
        # The boot service, run from the installed files.
        "done: nothing to do",
        '{"data": [["secure"]], "headings": ["fail_mode"]}',
    ]
    assert left[4:7] == [str(len(_flows.BASE)), "table inet gpuaas_slice {", "1"]
    assert left[7].split()[::2] == ["ovsbr0", "10.100.0.1/24"]
    # The boot service, which is a guardian afterwards, calls programs all the time.
    assert left[8:] == ["systemctl --no-block reboot", ""]
    assert not Path("/etc/gpuaas/slice-mode.json").exists()


def _words(lines: list[str]) -> list[str]:
    """Return `status step` of each step line, and other lines unchanged."""
    printed = []
    for line in filter(None, lines):
        words = dict(word.partition("=")[::2] for word in line.split())
        status = words.get("status", "")
        printed.append(f"{status} {words.get('step')}" if status else line)
    return printed
