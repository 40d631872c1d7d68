"""Disks of a lab: created once, kept across `down` and `up`, recreated on request."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from lab import topology
from lab.command import LabError, run
from lab.qemu import Qemu

SHARED_START_MIB = 1


def ensure(machine: topology.Machine, qemu: Qemu, *, image: Path, variables: Path) -> None:
    """Create the missing disks; existing disks stay as they are."""
    machine.folder.mkdir(parents=True, exist_ok=True)
    if not machine.os_disk.exists():
        create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(image)]
        run([*qemu.img, *create, machine.os_disk], env=qemu.environment)
    # The variables are copied anew at each start. OVMF trusts boot entries that it wrote for other
    # PCI addresses, and ends in its shell if a device has moved since.
    shutil.copyfile(variables, machine.firmware_variables)
    for disk in topology.DATA_DISKS:
        if not machine.data_disk(disk).exists():
            _create_data_disk(machine.data_disk(disk), disk)


def backing_image(machine: topology.Machine, qemu: Qemu) -> Path | None:
    """Return the cached image under this lab's OS disk, or None if there is no disk yet."""
    if not machine.os_disk.exists():
        return None
    text = run([*qemu.img, "info", "-U", machine.os_disk], env=qemu.environment).decode()
    for line in text.splitlines():
        if line.startswith("backing file:"):
            return Path(line.split(":", 1)[1].split("(actual path")[0].strip())
    raise LabError(f"{machine.os_disk} has no backing image: start anew with `lab up --fresh`")


def remove(machine: topology.Machine, *, system: bool) -> None:
    """Delete the data disks and, with `system`, the OS disk and the UEFI variables."""
    files = [machine.data_disk(disk) for disk in topology.DATA_DISKS]
    if system:
        files += [machine.os_disk, machine.firmware_variables]
    for file in files:
        file.unlink(missing_ok=True)


def _create_data_disk(file: Path, disk: topology.DataDisk) -> None:
    half = file.with_suffix(".partial")
    half.unlink(missing_ok=True)
    run(["truncate", "-s", f"{topology.DATA_DISK_MIB}M", half])
    if disk.shared:
        size_mib = topology.DATA_DISK_MIB - 2 * SHARED_START_MIB
        table = f"label: gpt\nstart={SHARED_START_MIB}MiB, size={size_mib}MiB, type=linux\n"
        run(["sfdisk", "-q", half], stdin=table.encode())
        with tempfile.TemporaryDirectory(prefix="gpuaas-share.") as name:
            content = Path(name)
            content.chmod(0o755)
            (content / "README").write_text(f"somebody's files on {disk.serial}\n")
            options = f"offset={SHARED_START_MIB * 1024 * 1024},root_owner=0:0"
            # The host's fstab names these file systems by this identifier.
            run(["mke2fs", "-q", "-t", "ext4", "-L", f"share{disk.index}", "-U", _uuid(disk),
                 "-d", content, "-E", options, half, f"{size_mib}M"])  # fmt: skip
    half.rename(file)


def _uuid(disk: topology.DataDisk) -> str:
    return f"5e000000-0000-4000-8000-{disk.eui64 & 0xFFFF:012x}"
