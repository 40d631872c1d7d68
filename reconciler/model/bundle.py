"""A slot's bundle: the devices and addresses that make one sellable unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from reconciler.model.identity import disk_identity


@dataclass(frozen=True)
class Bundle:
    """Empty text and zero size mean: not known."""

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
        """From a slot's record or a request; other keys are left alone, addresses in lower case."""

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
        """Fields without a value; the NUMA node may be unknown, as on a host with one."""
        return tuple(name for name in REQUIRED if not getattr(self, name))

    @property
    def identity(self) -> str:
        """The disk's identity as ledger, proofs and claims spell it."""
        return disk_identity(self.nvme_eui)

    def document(self) -> dict[str, object]:
        """As the run contract has it, without slot id and fence."""
        # All values are plain, so nothing needs the depth of dataclasses.asdict.
        return {name: getattr(self, name) for name in BUNDLE_FIELDS}


# The fields in their order, as slots and claims keep them.
BUNDLE_FIELDS = tuple(field.name for field in fields(Bundle))


def run_bundle(record: Mapping[str, Any], *, fence: bool) -> dict[str, Any]:
    """A slot's or a claim's record as the run contract has it."""
    document = {"slot_id": record.get("slot_id") or record["id"], **Bundle.of(record).document()}
    return {**document, "fence": record["fence"]} if fence else document


# What a slot cannot be sold without; the NUMA node may be unknown.
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
