"""Bundle of a slot: the devices and addresses that make a sellable unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


def disk_identity(hexadecimal: str) -> str:
    """Canonical spelling of a disk's identity: eui.<16 or 32 lowercase hex digits>."""
    return f"eui.{hexadecimal.lower()}"


@dataclass(frozen=True)
class Bundle:
    """Devices and addresses of a slot. Empty text and zero size mean "unknown"."""

    slot_index: int
    gpu_pci_address: str = ""
    nvme_device: str = ""
    nvme_serial: str = ""
    nvme_eui: str = ""
    nvme_size_bytes: int = 0
    management_mac: str = ""
    private_ip: str = ""
    fabric_vf_pci_address: str = ""
    numa_node: int = -1

    @classmethod
    def of(cls, document: Mapping[str, object]) -> Bundle:
        """Bundle from a slot's record or a request. Ignores other keys; lower-cases addresses."""

        def text(name: str) -> str:
            return str(document.get(name) or "")

        def number(name: str, unknown: int) -> int:
            value = document.get(name)
            return value if isinstance(value, int) else unknown

        return cls(
            slot_index=number("slot_index", 0),
            gpu_pci_address=text("gpu_pci_address").lower(),
            nvme_device=text("nvme_device"),
            nvme_serial=text("nvme_serial"),
            nvme_eui=text("nvme_eui").lower(),
            nvme_size_bytes=number("nvme_size_bytes", 0),
            management_mac=text("management_mac").lower(),
            private_ip=text("private_ip"),
            fabric_vf_pci_address=text("fabric_vf_pci_address").lower(),
            numa_node=number("numa_node", -1),
        )

    def missing(self) -> tuple[str, ...]:
        """Required fields without a value. The NUMA node is optional: some hosts have only 1."""
        return tuple(name for name in REQUIRED if not getattr(self, name))

    @property
    def identity(self) -> str:
        """Disk identity in the spelling of ledger, proofs and claims."""
        return disk_identity(self.nvme_eui)

    def document(self) -> dict[str, object]:
        """Form of the run contract, without slot id and fence."""
        # All values are plain, so the recursion of dataclasses.asdict is not needed.
        return {name: getattr(self, name) for name in BUNDLE_FIELDS}


# The fields in the order in which slots and claims store them.
BUNDLE_FIELDS = tuple(field.name for field in fields(Bundle))


def run_bundle(record: Mapping[str, Any], *, fence: bool) -> dict[str, Any]:
    """Bundle of a slot's or a claim's record in the form of the run contract."""
    document = {"slot_id": record.get("slot_id") or record["id"], **Bundle.of(record).document()}
    return {**document, "fence": record["fence"]} if fence else document


# Fields without which a slot cannot be sold. The NUMA node is not among them.
REQUIRED = (
    "gpu_pci_address",
    "nvme_device",
    "nvme_serial",
    "nvme_eui",
    "nvme_size_bytes",
    "management_mac",
    "private_ip",
    "fabric_vf_pci_address",
)
