"""Boot order of a host whose tenants write boot loaders on their disks."""

from __future__ import annotations

import struct
import uuid
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _checks_boot
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import (
    _efi_variables,
    _firmware_inventory,
)

pytestmark = pytest.mark.covers("HOST-9", "HOST-10")

OWN, TENANT = "5e000000000000ff", "5e0000000000a000"
ESP = str(uuid.uuid4())
# A boot entry that EDK2 wrote on the lab host, with a shorter description, for its OS disk.
RECORDED = (
    "010000002c005500450046004900200051004500"
    "4d00550020004c0041004200000002010c00d041030a0000000001010600000101010600000003171000010000005e"
    "000000000000ff7fff04004eac0881119f594d850ee21a522c59b2"
)


def disk(eui: str, name: str) -> _block.Disk:
    by_id = f"/dev/disk/by-id/nvme-eui.{eui}"
    return _block.Disk(f"eui.{eui}", by_id, name, "S", eui, "", 4 << 30, "M", "259:1")


# Nodes of a network card and of IPv4, as the UEFI specification lays them out.
NETWORK = "030b2500" + "0200000000fe" + 26 * "00" + "01" + "030c1b00" + 23 * "00"


def entry(namespace: str = "", partition: str = "", network: str = "", *, active: int = 1) -> bytes:
    nodes = bytes.fromhex(network)
    if namespace:
        nodes += struct.pack("<BBHI", 3, 23, 16, 1) + bytes.fromhex(namespace)
    if partition:
        body = struct.pack("<IQQ", 1, 2048, 9) + uuid.UUID(partition).bytes_le + b"\2\2"
        nodes += struct.pack("<BBH", 4, 1, 4 + len(body)) + body
    nodes += b"\x7f\xff\4\0"
    return struct.pack("<IH", active, len(nodes)) + "disk\0".encode("utf-16-le") + nodes


class Boot:
    """The host's disk and a tenant's; tests change entries, partitions and signatures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data: dict[str, bytes] = {"Boot0001": entry(OWN), "Boot0002": entry(TENANT)}
        self.esp, self.guids = ESP, {(1, str(uuid.uuid4()))}
        self.slots = [{"nvme_device": f"/dev/disk/by-id/nvme-eui.{TENANT}"}]
        self.disks = [disk(OWN, "nvme0n1"), disk(TENANT, "nvme1n1")]
        self.signatures: dict[str, list[str]] = {}
        patch = monkeypatch.setattr
        patch(_efi_variables, "variables", lambda: (self.data, {}))
        patch(_firmware_inventory, "own_partition", lambda: self.esp)
        patch(_firmware_inventory, "partition_guids", lambda *_disk: self.guids)

    def usage(self, disk: _block.Disk) -> _block.Usage:
        marks = self.signatures.get(disk.kernel_name, [])
        return _block.Usage(os_disk=disk.eui == OWN, signatures=marks)

    def order(self, *numbers: int, following: int | None = None) -> Any:
        self.data["BootOrder"] = struct.pack(f"<{len(numbers)}H", *numbers)
        if following is not None:
            self.data["BootNext"] = struct.pack("<H", following)
        return _checks_boot.boot_order(self)  # type: ignore[arg-type]


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Boot:
    return Boot(monkeypatch)


def test_the_entry_of_a_real_firmware_is_understood() -> None:
    option = _efi_variables.load_option(bytes.fromhex(RECORDED))
    assert option is not None and option.namespace == OWN
    assert (option.active, option.description) == (True, "UEFI QEMU LAB")


def test_an_approved_disk_before_the_hosts_own_entry_fails(boot: Boot) -> None:
    assert boot.order(1).status == "PASS"
    later = boot.order(1, 2)
    assert (later.status, later.detail) == ("WARN", f"Boot0002 ('disk') starts eui.{TENANT}")
    assert boot.order(2, 1).status == "FAIL"
    # The host's partition counts as its own too; a missing entry is ignored.
    boot.data["Boot0001"] = entry(partition=ESP)
    assert boot.order(7, 1, 2).status == "WARN"
    assert boot.order(1, following=2).status == "FAIL"
    boot.esp = ""
    assert boot.order(1, 2).status == "FAIL"


def test_an_entry_that_is_not_active_starts_nothing_unless_it_is_next(boot: Boot) -> None:
    boot.data["Boot0001"] = entry(OWN, active=0)
    assert boot.order(1, 2).status == "FAIL"
    boot.data |= {"Boot0001": entry(OWN), "Boot0002": entry(TENANT, active=0)}
    assert boot.order(2, 1).status == "PASS"
    assert boot.order(1, following=2).status == "FAIL"


def test_a_network_before_the_hosts_own_entry_is_named(boot: Boot) -> None:
    """MAAS leaves the network first, and starts the first disk on which it finds a boot loader."""
    boot.data["Boot0003"] = entry(network=NETWORK)
    first = boot.order(3, 1)
    assert first.status == "WARN"
    assert first.detail == "Boot0003 ('disk') starts from the network first"
    assert boot.order(1, 3).status == "PASS"


def test_what_a_tenant_copies_is_named_and_takes_nothing_off_sale(boot: Boot) -> None:
    boot.data["Boot0001"] = entry(partition=ESP)
    boot.guids.add((7, ESP))
    boot.signatures = {
        "nvme0n1": ["ext4@1080#aa11", "gpt@512#bb22", "raw_data@9"],
        "nvme1n1": ["ext4@2097208#aa11", "vfat@54#00000000"],
    }
    result = boot.order(1)
    assert result.status == "WARN"
    assert result.detail.split("; ") == [
        f"ext4 on eui.{TENANT} has the identifier of one of nvme0n1",
        f"a partition of eui.{TENANT} has the GUID of Boot0001",
    ]


def test_a_machine_without_uefi_is_not_taken_for_safe(
    boot: Boot, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(
        "ansible_collections.gpuaas.slice.plugins.module_utils.core._host.ROOT", machine.root
    )
    result = boot.order(1)
    assert (result.status, result.detail) == ("WARN", "the machine was not started by UEFI")
    boot.slots = []
    assert boot.order(1).status == "PASS"
