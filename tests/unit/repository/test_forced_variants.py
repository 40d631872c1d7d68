"""No forced variant of a destructive command exists in the repository (I8)."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import standalone
from tests.unit.repository import commands, sources

pytestmark = pytest.mark.covers("I8")

# This file has to contain forced variants.
SELF = Path(__file__).resolve()

FORCED = [
    "wipefs -f /dev/nvme0n1",
    "wipefs -af /dev/nvme0n1",
    "wipefs --all --force /dev/nvme0n1",
    "wipefs --fo -a /dev/nvme0n1",
    "blkdiscard -f /dev/nvme0n1",
    "/sbin/blkdiscard -zf /dev/nvme0n1",
    "mkfs.ext4 -F /dev/nvme0n1",
    "mkfs -t ext4 -qF /dev/nvme0n1",
    "mke2fs -FF /dev/nvme0n1",
    "mkfs.xfs -f /dev/nvme0n1",
    "mkfs.btrfs --force /dev/nvme0n1",
    "mkfs.ntfs -F /dev/nvme0n1",
    "mkfs.vfat -F 32 -I /dev/nvme0n1",
    "mkfs.{{ kind }} -f {{ device }}",
    "mkfs.${kind} -f $device",
    "mkswap -f /dev/nvme0n1",
    "nvme format /dev/nvme0n1 --ses=1 --force",
    "sudo -n nvme sanitize --force /dev/nvme0",
    "sfdisk --force /dev/nvme0n1",
    "sfdisk -qf /dev/nvme0n1 < table",
    "parted ---pretend-input-tty /dev/nvme0n1 mklabel gpt",
    "parted -s --fix /dev/nvme0n1 print",
    "sgdisk --force --zap-all /dev/nvme0n1",
    "vgremove -ff data",
    "vgremove -yff data",
    "pvremove --force --force /dev/nvme0n1",
    "pvcreate -ff /dev/nvme0n1",
    "lvremove -f data/one",
    "mdadm --create /dev/md0 --force --level=1 /dev/nvme0n1",
    "mdadm --zero-superblock -f /dev/nvme0n1",
    "cryptsetup luksFormat --batch-mode /dev/nvme0n1",
    "cryptsetup -q erase /dev/nvme0n1",
    "dmsetup remove -f one",
    "zpool create -f tank /dev/nvme0n1",
    "hdparm --yes-i-know-what-i-am-doing --trim-sector-ranges 0:1 /dev/sda",
    "umount -l /share0",
    "umount --force /share0",
    "fuser -km /share0",
    "yes | mkfs.ext4 /dev/nvme0n1",
    "true; yes y | sudo pvcreate /dev/nvme0n1",
    "ssh host 'wipefs -a -f /dev/nvme0n1'",
    "for d in a b; do blkdiscard --force /dev/$d; done",
    "test -b $d && wipefs \\\n  --all \\\n  --force $d",
    "echo $(wipefs -f $d)",
    "find /dev -name 'nvme*' -exec wipefs -f {} +",
]
PLAIN = [
    "wipefs -a /dev/nvme0n1",
    "wipefs -t f2fs -a /dev/nvme0n1",
    "wipefs -tf2fs /dev/nvme0n1",
    "wipefs -a -- -f",
    "blkdiscard /dev/nvme0n1; rm -f done",
    "blkdiscard /dev/nvme0n1 && curl --fail -f url",
    "mkfs.ext4 -q -Ldefault /dev/nvme0n1",
    "mkfs.vfat -F 16 -n UEFI esp",
    "mkswap -q -L force /dev/nvme0n1",
    "nvme format /dev/nvme0n1 --namespace-id=1 --ses=1",
    "nvme connect -t tcp -a 127.0.0.1 -s 4420 -n name -k 120",
    "sfdisk -q disk.raw",
    "mdadm --stop /dev/md0",
    "mdadm /dev/md0 --fail /dev/sdb1",
    "umount -- /share0",
    "dmsetup remove -- mapped",
    "vgs --noheadings; test -f /etc/lvm/lvm.conf",
    "the forced variants of wipefs and blkdiscard are nowhere (-f)",
]


@pytest.mark.parametrize("text", FORCED)
def test_a_forced_variant_is_found(text: str) -> None:
    assert list(commands.in_text(text)), text


@pytest.mark.parametrize("text", PLAIN)
def test_a_plain_command_is_none(text: str) -> None:
    assert list(commands.in_text(text)) == []


PYTHON = [
    'run(["wipefs", "--all", "--force", "--", device])',
    'run([\n    "sudo",\n    "/usr/sbin/mkfs.ext4",\n    "-F",\n    device,\n])',
    'run("blkdiscard", "-f", device)',
    'COMMAND = ("vgremove", "-ff", name)',
    'run(["mkfs.xfs", *(["-f"] if again else []), device])',
    'run(["mkswap"] + ["-f", device])',
    'run(f"wipefs -f {device}", shell=True)',
    'run([f"mkfs.{kind}", "-F", device])',
    'run(["sh", "-c", "blkdiscard --force " + device])',
    'SCRIPT = """\nset -e\nnvme format --force $1\n"""',
    'match step:\n    case "x":\n        run(["pvremove", "-ff", step.subject])',
]
YAML = [
    "- ansible.builtin.command: wipefs -f {{ device }}",
    "- ansible.builtin.command:\n    argv:\n      - mkfs.ext4\n      - -F\n      - '{{ device }}'",
    "- ansible.builtin.command: {argv: [blkdiscard, --force, '{{ device }}']}",
    "- ansible.builtin.shell:\n    cmd: |\n      set -eu\n      vgremove -ff {{ name }}",
    "- block:\n    - ansible.builtin.shell: >-\n        mkswap\n        -f {{ device }}",
    "- community.general.filesystem: {dev: /dev/nvme0n1, fstype: ext4, force: true}",
    "- community.general.lvg: {vg: data, pvs: /dev/nvme0n1, force: 'yes'}",
    "a: !unsafe wipefs -f {{ device }}\nb: !vault |\n  x",
]


@pytest.mark.parametrize("text", PYTHON)
def test_one_in_python_is_found(tmp_path: Path, text: str) -> None:
    assert sources.forced(_file(tmp_path / "a.py", text)), text
    # The same inside a script that `scripts/standalone.py` generates.
    carried = f"#!/bin/sh\nexec python3 <<'END'\nSOURCES[\"_x\"] = r'''{text}\n'''\nEND\n"
    if '"""' not in text:
        assert sources.forced(_file(tmp_path / "a.sh", carried)), text


@pytest.mark.parametrize("text", YAML)
def test_one_in_yaml_is_found(tmp_path: Path, text: str) -> None:
    assert sources.forced(_file(tmp_path / "a.yml", text)), text


def test_one_in_a_template_or_a_script_without_a_suffix_is_found(tmp_path: Path) -> None:
    assert sources.forced(_file(tmp_path / "a.sh.j2", "{% if x %}\nwipefs -f {{ device }}\n"))
    assert sources.forced(_file(tmp_path / "wipe", "#!/bin/sh\nwipefs \\\n  -af $1\n"))
    assert not sources.forced(_file(tmp_path / "b.sh", "# never: wipefs -f $1\nwipefs -a $1\n"))


def test_the_scanner_reads_what_must_be_read() -> None:
    """A scanner without files would pass too."""
    names = {str(path.relative_to(sources.ROOT)) for path in sources.files()}
    assert {
        "plugins/module_utils/disk/_nvme_wipe.py",
        "plugins/modules/tenant_disks.py",
        "scripts/maas/commissioning/50-gpuaas-slice-firmware-preflight.sh",
        "scripts/ops/gpuaas_slice_host_deploy_bootstrap.sh",
        "scripts/lint",
        "playbooks/release_slice.yml",
        "molecule/slice_disk/side_effect.yml",
        "reconciler/trust/enrol.sh",
        "tests/bench/script.sh",
        "lab/disks.py",
        "Makefile",
    } <= names
    text = standalone.build(standalone.FIRMWARE)
    spoiled = text.replace('["env", "DEBIAN_FRONTEND=noninteractive"', '["wipefs", "-f"', 1)
    assert spoiled != text and list(sources.in_shell(spoiled))


def test_no_forced_variant_is_in_the_repository() -> None:
    variants = {
        str(path.relative_to(sources.ROOT)): forced
        for path in sources.files()
        if path != SELF and (forced := sources.forced(path))
    }
    assert variants == {}


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
