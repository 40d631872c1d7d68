"""Discovery document of a node: look-up of a bundle's devices and of their blockers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from reconciler.model.bundle import Bundle

Document = Mapping[str, Any]

# Blockers about the use of a disk, not about the disk itself. A later wipe proof outdates them.
USE = frozenset(
    {
        "mounted",
        "mounted_child",
        "partitions_present",
        "unexpected_filesystem",
        "swap_in_use",
        "md_member",
        "lvm_member",
        "dm_member",
        "holder_present",
        "qemu_in_use",
    }
)


# More or fewer GPUs than the hardware profile says that its machines have.
GPU_COUNT = "gpu_count_mismatch"


@dataclass(frozen=True)
class Blocker:
    """A reason that keeps a plan from being applied or a slot from being sold."""

    code: str
    detail: str

    def document(self) -> dict[str, str]:
        """Form of the API."""
        return {"code": self.code, "detail": self.detail}


def section(document: Document, *names: str) -> Sequence[Document]:
    """The list of objects at a path in the document; empty when the path does not exist."""
    value: Any = document
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return cast("Sequence[Document]", value) if isinstance(value, list) else []


def blockers_of(device: Document) -> tuple[Blocker, ...]:
    """The blockers that the host reported for a device or section."""
    return tuple(
        Blocker(str(row.get("code", "")), str(row.get("detail", "")))
        for row in section(device, "blockers")
    )


def pcie_switch(gpu: Document) -> str:
    """The bridge or root complex that the GPU shares with its neighbours; "" when not reported.

    The last step of the path is the GPU's own port, so the shared bridge is the step before it.
    """
    steps = gpu.get("pci_path")
    path = [str(step) for step in steps] if isinstance(steps, list) else []
    return path[-2] if len(path) > 1 else "".join(path)


def cpu_count(text: str) -> int:
    """Number of CPUs in the kernel's list format: `0-3,8` has 5. Other text has none."""
    parts = re.findall(r"(?:^|,)(\d{1,6})(?:-(\d{1,6}))?(?=,|\s*$)", text)
    return sum(max(int(last or first) - int(first) + 1, 0) for first, last in parts)


def gpu_count(document: Document) -> int:
    """Number of GPUs that the host lists."""
    return len({row.get("address") for row in section(document, "gpu")})


def with_gpu_count(document: Document, expected: int) -> dict[str, Any]:
    """The document with the faults that an honest host reports when it lists more or fewer GPUs
    than its hardware profile has: more block the node, any difference degrades it. A hostile host
    leaves them out, and whole machines are paid for by the GPU. expected: 0 if it is unknown.
    """
    count, summary = gpu_count(document), document["candidate_summary"]
    if not expected or count == expected:
        return dict(document)
    codes = {blocker.code for blocker in degraded(document)}
    detail = f"{count} of {expected} GPUs are present"
    if count > expected:
        detail = f"the host lists {count} GPUs, gpu.expected of its hardware profile is {expected}"
        summary = {**summary, "blockers": sorted({*summary.get("blockers", ()), GPU_COUNT})}
    faults = [Blocker(GPU_COUNT, detail).document()] if GPU_COUNT not in codes else []
    summary = {**summary, "degraded": [*faults, *section(summary, "degraded")]}
    return {**document, "candidate_summary": summary}


def gpu(document: Document, address: str) -> Document | None:
    """The GPU at a PCI address."""
    return next((row for row in section(document, "gpu") if row.get("address") == address), None)


def disk(document: Document, path: str) -> Document | None:
    """The disk with this path among its names or the names of its partitions."""
    for row in section(document, "nvme"):
        names = [row.get("by_id"), *row.get("aliases", ()), *row.get("partition_aliases", ())]
        if path and path in names:
            return row
    return None


def disk_identities(document: Document) -> set[str]:
    """The identities of all disks that the host lists."""
    return {str(row.get("identity")) for row in section(document, "nvme")}


def disk_by_identity(document: Document, identity: str) -> Document | None:
    """The disk with an EUI or NGUID."""
    return next((row for row in section(document, "nvme") if row.get("identity") == identity), None)


def functions(document: Document) -> Iterator[Document]:
    """Every fabric virtual function."""
    for card in section(document, "fabric"):
        yield from section(card, "vfs")


def function(document: Document, address: str) -> Document | None:
    """The virtual function at a PCI address."""
    return next((row for row in functions(document) if row.get("address") == address), None)


def is_physical(document: Document, address: str) -> bool:
    """True when the address is a whole fabric card."""
    return any(card.get("address") == address for card in section(document, "fabric"))


def node_blockers(document: Document) -> tuple[Blocker, ...]:
    """Blockers that apply to every slot of the node."""
    details = {
        blocker.code: blocker
        for name in ("bootstrap", "slice_network")
        for blocker in blockers_of(document.get(name, {}))
    }
    codes = document.get("candidate_summary", {}).get("blockers", [])
    for code in codes:
        details.setdefault(str(code), Blocker(str(code), "reported for the whole node"))
    return tuple(details[code] for code in sorted(details))


def degraded(document: Document) -> tuple[Blocker, ...]:
    """Faults of single GPUs, which degrade the node and block only their own slots."""
    summary = document.get("candidate_summary", {})
    return tuple(
        Blocker(str(row.get("code", "")), str(row.get("detail", "")))
        for row in section(summary, "degraded")
    )


def group_blockers(
    document: Document, bundle: Bundle, others: Iterable[Bundle]
) -> tuple[Blocker, ...]:
    """Devices outside the bundle that share its IOMMU group, which only one guest can have.

    others: the other slots of the node. Such a device need not have a driver: an unsold GPU, or
    the GPU of a slot without a tenant yet, looks as free as an empty place.
    """
    used = (bundle.gpu_pci_address, bundle.fabric_vf_pci_address)
    whose = {str(row.get("address")): "no slot" for row in section(document, "gpu")}
    for other in others:
        for address in (other.gpu_pci_address, other.fabric_vf_pci_address):
            whose[address] = f"slot {other.slot_index}"
    details = {}
    for row in (gpu(document, used[0]), function(document, used[1])):
        for member in (row or {}).get("group_members", ()):
            if member in whose and member not in used:
                group = (row or {}).get("iommu_group", "")
                details[member] = f"{member} of {whose[member]} is in IOMMU group {group} too"
    return tuple(Blocker("group_shared", details[member]) for member in sorted(details))


def bundle_blockers(
    document: Document, bundle: Bundle, *, use: bool, others: Iterable[Bundle] = ()
) -> tuple[Blocker, ...]:
    """Blockers of a bundle beside the node's other slots.

    use=False leaves out blockers about the use of the disk at the time of the discovery.
    """
    blockers: list[Blocker] = []
    devices = {
        "gpu_not_found": (gpu(document, bundle.gpu_pci_address), bundle.gpu_pci_address),
        "disk_not_found": (disk_by_identity(document, bundle.identity), bundle.identity),
        "fabric_vf_not_found": (
            function(document, bundle.fabric_vf_pci_address),
            bundle.fabric_vf_pci_address,
        ),
    }
    for code, (device, name) in devices.items():
        if device is None:
            blockers.append(Blocker(code, f"{name} is not in the discovery"))
        else:
            blockers.extend(blockers_of(device))
    blockers.extend(group_blockers(document, bundle, others))
    return tuple(blocker for blocker in blockers if use or blocker.code not in USE)
