"""Fake PCI tree of a host, with a kernel behind it: writes into sysfs have their effect."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _errors, _pci


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that a busy machine reads late is not dead. All workers of a test session share the
    name under which a function's reads wait for each other.
    """
    monkeypatch.setattr(_pci, "ANSWER_S", 60.0)


class FakePci:
    """PCI tree filled with `add`; sysfs looks as on a host, symbolic links included."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.natural: dict[str, str] = {}
        self.stubborn: set[str] = set()

    def add(
        self,
        address: str,
        id_: str = "10de:2335",
        *,
        class_code: str = "030200",
        driver: str = "",
        group: int | None = None,
        numa: int = 0,
        physfn: str = "",
        totalvfs: int | None = None,
        interface: str = "",
    ) -> FakePci:
        folder = self.root / "sys/devices/pci0000:00" / address
        (folder / "net").mkdir(parents=True)
        link = self.root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../devices/pci0000:00/{address}")
        vendor, _, device = id_.partition(":")
        values = {
            "vendor": f"0x{vendor}", "device": f"0x{device}", "class": f"0x{class_code}",
            "numa_node": str(numa), "driver_override": "(null)",
        }  # fmt: skip
        if totalvfs is not None:
            values |= {
                "sriov_totalvfs": str(totalvfs),
                "sriov_numvfs": "0",
                "sriov_drivers_autoprobe": "1",
            }
        for name, value in values.items():
            (folder / name).write_text(f"{value}\n")
        (folder / "config").write_bytes(b"\xde\x10")
        if group is not None:
            self._join(folder, address, group)
        if physfn:
            (folder / "physfn").symlink_to(f"../{physfn}")
        if interface:
            self.interface(interface, address)
        self.natural[address] = driver
        if driver:
            self._bind(address, driver)
        return self

    def interface(self, name: str, address: str = "", *, kind: str = "1") -> Path:
        """Add a network interface that is down, with or without a PCI function."""
        link = self.root / "sys/class/net" / name
        link.mkdir(parents=True, exist_ok=True)
        (link / "address").write_text("52:54:00:00:fa:01\n")
        (link / "type").write_text(f"{kind}\n")
        self.set_flags(name, "0x1002")
        if address:
            (self.folder(address) / "net" / name).mkdir(exist_ok=True)
        return link

    def set_flags(self, name: str, flags: str) -> None:
        (self.root / "sys/class/net" / name / "flags").write_text(f"{flags}\n")

    def folder(self, address: str) -> Path:
        return self.root / "sys/devices/pci0000:00" / address

    def driver(self, address: str) -> str:
        return _pci.read(address).driver

    def store(self, absolute: str, value: str) -> None:
        """Act on a write as the kernel does."""
        path, text = Path(absolute), value.strip()
        if path.name == "drivers_probe":
            self._probe(text)
        elif path.name == "unbind":
            (self.folder(path.parent.parent.name) / "driver").unlink()
        elif path.name == "driver_override":
            (self.folder(path.parent.name) / path.name).write_text(f"{text or '(null)'}\n")
        elif path.name == "sriov_numvfs":
            self._functions(path.parent.name, int(text))
        else:
            (self.root / absolute.lstrip("/")).write_text(f"{text}\n")

    def _probe(self, address: str) -> None:
        override = _pci.read(address).driver_override
        driver = override or self.natural[address]
        if driver and address not in self.stubborn:
            self._bind(address, driver)

    def _bind(self, address: str, driver: str) -> None:
        target = self.root / "sys/bus/pci/drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (self.folder(address) / "driver").unlink()
        (self.folder(address) / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")

    def _join(self, folder: Path, address: str, group: int) -> None:
        members = self.root / "sys/kernel/iommu_groups" / str(group) / "devices"
        members.mkdir(parents=True, exist_ok=True)
        (members / address).symlink_to(f"../../../../devices/pci0000:00/{address}")
        (folder / "iommu_group").symlink_to(f"../../../kernel/iommu_groups/{group}")

    def _functions(self, address: str, count: int) -> None:
        folder, device = self.folder(address), _pci.read(address)
        if device.sriov_numvfs and count:
            raise _errors.Refusal("kernel_refused", expected="0 first", found="EBUSY", remedy="")
        for link in folder.glob("virtfn*"):
            target = self.folder(link.readlink().name)
            group = self.root / "sys/kernel/iommu_groups" / str(_pci.read(target.name).iommu_group)
            (group / "devices" / target.name).unlink()
            for entry in target.iterdir():
                entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            target.rmdir()
            (self.root / "sys/bus/pci/devices" / target.name).unlink()
            link.unlink()
        for index in range(count):
            name = f"{device.slot.rpartition(':')[0]}:10.{index}"
            self.add(name, "8086:10ca", class_code="020000", group=100 + index, physfn=address)
            (folder / f"virtfn{index}").symlink_to(f"../{name}")
        (folder / "sriov_numvfs").write_text(f"{count}\n")


@pytest.fixture
def pci(tree: Path, monkeypatch: pytest.MonkeyPatch) -> FakePci:
    """The PCI tree of the host; writes to sysfs act as in the kernel."""
    fake = FakePci(tree)
    monkeypatch.setattr(_pci, "store", fake.store)
    return fake
