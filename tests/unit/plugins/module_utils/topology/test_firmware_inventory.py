"""Firmware of a machine, from the files and programs of a recorded host."""

from __future__ import annotations

import json
import struct
import uuid
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import (
    _efi_variables,
    _firmware_inventory,
)

pytestmark = pytest.mark.covers("CTRL-15")

PROFILE: dict[str, Any] = {"gpu": {"ids": ["1234:11e8"]}}
H200: dict[str, Any] = {"gpu": {"ids": ["10de:2335"]}}
GLOBAL = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
DATABASE = "d719b2cb-3d3a-4596-a3bc-dad00e67656f"
ESP = uuid.UUID("11111111-2222-4333-8444-555555555555")


def node(kind: int, sub: int, body: bytes) -> bytes:
    return struct.pack("<BBH", kind, sub, 4 + len(body)) + body


def partition(guid: uuid.UUID, start: int = 2048) -> bytes:
    return node(4, 1, struct.pack("<IQQ", 1, start, 204800) + guid.bytes_le + b"\x02\x02")


def file(path: str) -> bytes:
    return node(4, 4, path.encode("utf-16-le") + b"\0\0")


def option(description: str, *nodes: bytes, active: int = 1, data: bytes = b"") -> bytes:
    path = b"".join(nodes) + node(0x7F, 0xFF, b"")
    text = description.encode("utf-16-le") + b"\0\0"
    return struct.pack("<IH", active, len(path)) + text + path + data


def put(machine: Any, name: str, data: bytes, guid: str = GLOBAL) -> None:
    place = machine.folder(_efi_variables.FOLDER) / f"{name}-{guid}"
    place.write_bytes(struct.pack("<I", 7) + data)


def esp(machine: Any, guid: uuid.UUID) -> None:
    """Mount a partition with this GUID at /boot/efi."""
    table = bytearray(64 << 10)
    table[512:604] = b"EFI PART" + bytes(64) + struct.pack("<QIII", 2, 128, 128, 0)
    table[1024:1152] = uuid.uuid4().bytes + guid.bytes_le + struct.pack("<QQ", 40, 80) + bytes(80)
    machine.file("/dev/nvme9n1").write_bytes(table)
    machine.file("/dev/nvme9n1p1")
    whole = machine.folder("/sys/devices/x/nvme9n1")
    (whole / "size").write_text("128\n")
    part = machine.folder("/sys/devices/x/nvme9n1/nvme9n1p1")
    (part / "partition").write_text("1\n")
    for path in (whole, part):
        if not (machine.root / "sys/class/block" / path.name).is_symlink():
            machine.link(f"/sys/class/block/{path.name}", path)
    row = "30 1 259:1 / /boot/efi rw - vfat /dev/nvme9n1p1 rw\n"
    machine.file("/proc/self/mountinfo", row)


@pytest.fixture
def host(machine: Any) -> Any:
    for name, text in (("bios_vendor", "Dell Inc."), ("bios_version", "2.5.4")):
        machine.file(f"/sys/class/dmi/id/{name}", f"{text}\n")
    for name, text in (("serial", "S6"), ("model", "PM1743"), ("firmware_rev", "OPPA4B5Q")):
        machine.file(f"/sys/class/nvme/nvme0/{name}", f"{text}\n")
    machine.file("/proc/self/mountinfo", "")
    put(machine, "SecureBoot", b"\x01")
    return machine


def test_variables_that_matter_are_read_and_large_ones_by_digest(host: Any) -> None:
    put(host, "db", bytes(3000), DATABASE)
    put(host, "BootOrder", b"\x01\x00\x0a\x00")
    put(host, "BootCurrent", b"\x01\x00")
    put(host, "dbx", b"\x01" * 9, "ffffffff-0000-4000-8000-000000000000")
    put(host, "Boot000A", option("shell", file("\\EFI\\x.efi"), active=0))
    section = _firmware_inventory.take(PROFILE)["sections"]["uefi"]
    assert section["SecureBoot"] == "01"
    assert section["BootOrder"] == "0001,000A"
    assert section["db"].startswith("sha256:") and len(section["db"]) == 71
    assert section["Boot000A"].startswith("inactive 'shell' File(\\EFI\\x.efi) ")
    # A vendor's variable of the same name does not hide the UEFI variable.
    assert "dbx" not in section and "dbx-ffffffff-0000-4000-8000-000000000000" in section
    assert "BootCurrent" not in section


def test_a_new_installation_of_the_host_leaves_its_own_entry_the_same(host: Any) -> None:
    def entry(guid: uuid.UUID, path: str, data: bytes = b"") -> str:
        put(host, "Boot0001", option("debian", partition(guid), file(path), data=data))
        return str(_firmware_inventory.take(PROFILE)["sections"]["uefi"]["Boot0001"])

    esp(host, ESP)
    before = entry(ESP, "\\EFI\\debian\\shimx64.efi")
    other = uuid.uuid4()
    assert str(other) in entry(other, "\\EFI\\debian\\shimx64.efi")
    esp(host, other)
    assert entry(other, "\\EFI\\debian\\shimx64.efi") == before
    assert entry(other, "\\EFI\\debian\\evil.efi") != before
    assert entry(other, "\\EFI\\debian\\shimx64.efi", b"init=/bin/sh") != before


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 7, b"\1\0\0\0\xff\xff\0\0", bytes(9) * 999, b"\xff" * 70]
)
def test_an_entry_that_is_none_is_shown_by_its_bytes(host: Any, raw: bytes) -> None:
    put(host, "Boot0001", raw)
    text = _firmware_inventory.take(PROFILE)["sections"]["uefi"]["Boot0001"]
    assert len(text) <= _firmware_inventory.LONGEST


def test_what_cannot_be_read_is_named_with_its_reason(machine: Any, script: Any) -> None:
    machine.pci("0000:1b:00.0", "15b3:a2dc", driver="mlx5_core", **{"class": "0x020700"})
    script.on("devlink", "-j", "dev", "info", rc=1, err="kernel answers: no")
    report = _firmware_inventory.take(H200)
    assert report["unreadable"]["uefi"] == "the machine was not started by UEFI"
    assert report["unreadable"]["bios"] == "no bios_version in /sys/class/dmi/id"
    assert report["unreadable"]["bmc"] == "no /dev/ipmi0"
    assert set(report["unreadable"]) == {"uefi", "bios", "bmc", "adapters", "dpu", "gpu"}
    assert not set(report["sections"]) & set(report["unreadable"])
    machine.folder("/sys/firmware/efi/efivars")
    everything = [f"firmware_{name}" for name in ("bmc", "dpu", "gpu", "adapters")]
    report = _firmware_inventory.take(H200 | {"not_applicable": everything})
    assert report["unreadable"] == {
        "uefi": "no efivarfs is mounted",
        "bios": "no bios_version in /sys/class/dmi/id",
    }


def test_cards_bmc_and_gpus_by_their_tools(host: Any, script: Any) -> None:
    """The GPU's answer is an H200's; the others have their tools' documented form."""
    host.pci("0000:1b:00.0", "15b3:a2dc", driver="mlx5_core", **{"class": "0x020700"})
    info = {
        "driver": "mlx5_core",
        "serial_number": "MT2413X00001",
        "versions": {"fixed": {"fw.psid": "DEL0000000034"}, "running": {"fw": "32.41.1000"}},
    }
    script.on("devlink", "-j", "dev", "info", out=json.dumps({"info": {"pci/0000:1b:00.0": info}}))
    settings = "  INTERNAL_CPU_MODEL    EMBEDDED_CPU(1)\n  NUM_OF_VFS   8\n"
    host.file("/usr/bin/mlxconfig")
    script.on("mlxconfig", "-d", "0000:1b:00.0", "query", out=settings)
    host.file("/dev/ipmi0")
    script.on("ipmitool", "mc", "info", out="Firmware Revision         : 7.10\nDevice ID : 32\n")
    users = "1,,true,false,false,NO ACCESS\n2,root,true,true,true,ADMINISTRATOR\n"
    script.on("ipmitool", "-c", "user", "list", "1", out=users)
    override = " Boot parameter data: 0000000000\n"
    script.on("ipmitool", "chassis", "bootparam", "get", "5", out=override)
    host.file("/proc/driver/nvidia/version")
    query = f"--query-gpu=pci.bus_id,{_firmware_inventory._GPU_FIELDS}"
    uuid = "GPU-0171b530-e8be-a28a-0ca8-a1407a74e5e9"
    row = f"00000000:00:06.0, {uuid}, 96.00.A5.00.1A, G520.0282.02.02, 7.16, Enabled, Disabled\n"
    script.on("nvidia-smi", query, "--format=csv,noheader", out=row)
    report = _firmware_inventory.take(H200)
    assert report["unreadable"] == {}
    sections = report["sections"]
    assert sections["adapters"] == {
        "0000:1b:00.0 serial_number": "MT2413X00001",
        "0000:1b:00.0 versions.fixed.fw.psid": "DEL0000000034",
        "0000:1b:00.0 versions.running.fw": "32.41.1000",
    }
    assert sections["dpu"] == {"0000:1b:00.0 INTERNAL_CPU_MODEL": "EMBEDDED_CPU(1)"}
    assert sections["bmc"]["user 2"] == "root,true,true,true,ADMINISTRATOR"
    assert sections["bmc"]["boot override"] == "0000000000"
    assert sections["gpu"]["00000000:00:06.0 vbios_version"] == "96.00.A5.00.1A"
    assert sections["nvme"] == {"S6": "PM1743 OPPA4B5Q"}


def test_an_unreadable_controller_or_card_hides_no_other(host: Any, script: Any) -> None:
    host.file("/sys/class/nvme/broken/model", "PM1743\n")
    script.on("devlink", "-j", "dev", "info")
    host.file("/usr/bin/mlxconfig")
    for address, out in (("0000:1b:00.0", ""), ("0000:2b:00.0", "  INTERNAL_CPU_MODEL   2\n")):
        host.pci(address, "15b3:a2dc", driver="mlx5_core", **{"class": "0x020700"})
        script.on("mlxconfig", "-d", address, "query", out=out)
    report = _firmware_inventory.take(H200)
    unreadable, sections = report["unreadable"], report["sections"]
    assert unreadable["nvme broken"] == "no serial number or firmware revision"
    assert sections["nvme"] == {"S6": "PM1743 OPPA4B5Q"}
    assert unreadable["dpu 0000:1b:00.0"] == "mlxconfig shows none of its settings"
    assert sections["dpu"] == {"0000:2b:00.0 INTERNAL_CPU_MODEL": "2"}


def test_a_machine_with_very_many_entries_is_bounded_and_says_so(host: Any) -> None:
    for number in range(300):
        put(host, f"Boot{number:04X}", option("x" * 400, file("\\a")))
    report = _firmware_inventory.take(PROFILE)
    assert len(report["sections"]["uefi"]) == _firmware_inventory.MOST
    assert report["unreadable"]["uefi"] == "45 more entries"
    assert max(map(len, report["sections"]["uefi"].values())) == _firmware_inventory.LONGEST
    put(host, "Boot0000", option("x" * 400, file("\\b")))
    changed = _firmware_inventory.take(PROFILE)["sections"]["uefi"]
    assert changed["Boot0000"] != report["sections"]["uefi"]["Boot0000"]


def test_this_machine_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that runs the tests: every section has values or a reason."""
    monkeypatch.setattr(_host, "ROOT", Path("/"))
    report = _firmware_inventory.take(PROFILE)
    named = {key.split(" ")[0] for key in report["unreadable"]}
    assert {*report["sections"], *named} == {
        "bios",
        "uefi",
        "nvme",
        "adapters",
        "dpu",
        "gpu",
        "bmc",
    }
