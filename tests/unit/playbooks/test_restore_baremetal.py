"""There and back: the generated bootstrap, then the real playbook, on a copy of this machine.

See tests/data/deployed_machine: writes, interfaces and Ansible are real, programs that would act on
the machine are stand-ins that keep state. The first run may not reboot; then a boot is pretended.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import yaml

from scripts import standalone
from tests.deployed_machine import NEEDS_ROOT, ROOT, play
from tests.unit.playbooks.played import result

pytestmark = [
    pytest.mark.covers("HOST-15", "HOST-4"),
    NEEDS_ROOT,
]

BOOTSTRAP = "scripts/ops/gpuaas_slice_host_deploy_bootstrap.sh"
STORY = """
everything() {
  # useradd and userdel keep the file as it was before them, with a dash after its name.
  find /etc /usr/local /boot \\( -type f -o -type l \\) ! -path '/etc/*-' \\
    -exec md5sum {} + 2>/dev/null | sort
  # Services, rules, interfaces, forwarding; not the logs of calls.
  ls /run/machine | grep -vx -e calls -e watch; iptables -t nat -S POSTROUTING
  for bridge in $(ovs-vsctl list-br); do
    echo $bridge; ovs-vsctl --columns=fail_mode find Bridge name=$bridge
    ovs-ofctl dump-flows $bridge
  done
  nft --stateless list table inet gpuaas_slice 2>/dev/null
  ip -br address; cat /proc/sys/net/ipv4/ip_forward; stat -c %a /var/lib/libvirt
}
restore() {
  profile=$2
  shift 2
  ansible-playbook -i localhost, -c local playbooks/restore_baremetal.yml "$@" \
    -e "slice_profile_file=$profile" -e ansible_python_interpreter=/usr/bin/python3 2>&1
}
update-grub
mkdir -m 700 -p /var/lib/libvirt
rm -f /etc/gpuaas/enrolment.env
touch /run/machine/gpu.service.active /run/machine/gpu.service.enabled
touch /run/machine/idle.service.active
mkdir -p /usr/local/lib/systemd/system
touch /usr/local/lib/systemd/system/gpu.service /usr/local/lib/systemd/system/idle.service
everything > /run/machine-before
sh "$1" > /dev/null
everything > /run/machine-between
ls /run/machine
readlink /etc/systemd/system/gpu.service /etc/systemd/system/idle.service
ledger=/var/lib/gpuaas/ledger/slot-0.json
mkdir -p /var/lib/gpuaas/ledger
# Without a holder the mark would not count: this host has no disk eui.1.
cat > $ledger <<'end'
{"slot_id": "slot-0", "fence": 3, "dirty": true, "disk": "eui.1", "allocation_id": "alloc-1"}
end
echo ---; restore "$@"
echo '{"slot_id": "slot-0", "fence": 3}' > $ledger
echo ---; restore "$@" --check
everything | diff /run/machine-between -
# A disk died under its tenant. What the reconciler has written off does not keep the host.
cat > $ledger <<'end'
{"slot_id": "slot-0", "fence": 3, "dirty": true, "disk": "eui.1",
 "allocation_id": "23bd713b-6073-4ef7-8a51-2897e902365d"}
end
cat > /run/machine-written-off <<'end'
{"slice_written_off": [{"slot_id": "slot-0", "fence": 4, "reason": "no disk any more",
 "allocation_id": "23bd713b-6073-4ef7-8a51-2897e902365d"}]}
end
echo ---; restore "$@" --check -e @/run/machine-written-off
everything | diff /run/machine-between -
# An operator's own tuning goes with the rest, whatever a later release has named there.
echo '{"profiles": ["of-a-later-release"]}' > /etc/gpuaas/tuning.json
echo ---; restore "$@" -e @/run/machine-written-off
# A boot: what was built since the last one is what runs now.
sed -i 's/"boot_id": "[^"]*"/"boot_id": "earlier"/' /var/lib/gpuaas/initramfs.json
echo ---; restore "$@"
echo ---; restore "$@"
everything > /run/machine-after
echo ---; diff /run/machine-before /run/machine-after
echo ---; sh "$1" > /dev/null; everything | diff /run/machine-between -
echo ---; diff /run/machine-before /run/machine-between | grep -c '^[<>]'
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """The bootstrap as generated, and its profile: GPU services, and no fabric to be found here."""
    lab = yaml.safe_load((ROOT / "profiles" / "lab.yml").read_text())
    lab["fabric"]["pf_ids"] = []
    lab["gpu_services"] = ["gpu.service", "idle.service"]
    profile = tmp_path / "lab.yml"
    profile.write_text(yaml.safe_dump(lab))
    (entry,) = (entry for entry in standalone.SCRIPTS if entry.path == BOOTSTRAP)
    file = tmp_path / "bootstrap.sh"
    data = {**entry.data, "profiles/lab.yml": str(profile)}
    file.write_text(standalone.build(dataclasses.replace(entry, data=data)))
    return str(file), str(profile)


def _changed(text: str) -> str:
    match = re.search(r"changed=(\d+)", text)
    assert match, text
    return match[1]


@pytest.mark.long
def test_a_slice_host_becomes_what_it_was(files: tuple[str, str], tmp_path: Path) -> None:
    environment = {
        "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}",
        "GPUAAS_SLICE_PROFILE": "lab",
        "ANSIBLE_COLLECTIONS_PATH": f"{ROOT}/build/collections",
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_SHOW_CUSTOM_STATS": "1",
        "LC_ALL": "C.UTF-8",
    }
    done = play(STORY, tmp_path / "scratch", *files, environment=environment, limit_s=360)
    assert done.stderr == ""
    quiet, dirty, forecast, given, early, real, again, difference, forth, between = (
        done.stdout.split("---\n")
    )
    assert "gpu.service" not in quiet and "idle.service" not in quiet
    assert quiet.count("/dev/null\n") == 2

    refused = result(dirty)
    assert (refused["ok"], refused["error"]["code"]) == (False, "slices_present")
    assert "changed=0" in dirty and "waits for the wipe of eui.1" in refused["error"]["found"]

    # The forecast changes nothing, which `diff` would show, and says what is left to do.
    assert forecast.rstrip().endswith("}") and result(forecast)["evidence"]["remnants"] > 10
    # The GPU services come after the boot; it does not know of the lease, nor of the tuning yet.
    assert int(_changed(forecast)) + 1 == int(_changed(early))

    # A forecast gives up no lease, and goes on as if it had.
    assert given.rstrip().endswith("}") and result(given)["ok"]
    assert result(given)["evidence"]["written_off"] == []

    # Everything that needs no boot is done; the GPU services wait for the boot.
    first = result(early)
    assert (first["ok"], first["error"]["code"]) == (False, "reboot_required")
    assert first["evidence"]["written_off"] == ["slot-0"]
    second = result(real)
    assert (second["ok"], second["evidence"]["remnants"]) == (True, 0)
    assert second["evidence"]["kept"]["ledger"] == ["slot-0"]
    assert second["evidence"]["kept"]["disks_gone"] == ["eui.1"]
    assert all(row["ok"] for row in second["evidence"]["compared"])
    assert result(again)["ok"] and "changed=0" in again
    # As before it became a slice host; and as before this when it is made one again.
    assert (difference, forth) == ("", "")
    # The comparison sees what it must: there was a difference.
    assert int(between) > 20
