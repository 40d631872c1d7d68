"""Holdings of a host for tests: nothing, or everything of a tenant."""

from __future__ import annotations

from typing import Any

from reconciler.model.bundle import Bundle

PARTS = (
    "domains",
    "processes",
    "leases",
    "reservations",
    "addresses",
    "ports",
    "guards",
    "files",
    "limits",
    "ingress",
    "devices",
)
Holdings = dict[str, Any]


def nothing() -> Holdings:
    return {name: {"known": True, "detail": "", "found": []} for name in PARTS}


def put(holdings: Holdings, part: str, **item: Any) -> None:
    holdings[part]["found"].append(item)


def unknown(holdings: Holdings, part: str) -> None:
    """That part could not be looked at."""
    holdings[part] = {"known": False, "detail": "unknown: late", "found": []}


def drop(holdings: Holdings, *parts: str) -> None:
    for part in parts:
        holdings[part]["found"].clear()


def tenant(holdings: Holdings, key: str, slots: dict[str, Bundle]) -> None:
    """Everything that an allocation has on its host; slots: by id, the boot slot first."""
    digits = key.replace("-", "")
    parts = [
        part for row in slots.values() for part in (row.gpu_pci_address, row.fabric_vf_pci_address)
    ]
    put(
        holdings,
        "domains",
        name=f"gpuaas-slice-{digits}",
        allocation_id=key,
        state="running",
        active=True,
        devices=parts,
        disks=[slot.nvme_device for slot in slots.values()],
    )
    put(holdings, "processes", pid=7, allocation_id=key)
    for slot_id, slot in slots.items():
        lease = {"slot_id": slot_id, "allocation_id": key, "fence": 1, "disk": slot.identity}
        put(holdings, "leases", **lease, dirty=True)
    boot = next(iter(slots.values()))
    address = {"mac": boot.management_mac, "ip": boot.private_ip}
    put(holdings, "reservations", allocation_id=key, **address)
    put(holdings, "addresses", **address)
    put(holdings, "ports", port=f"gs{digits[:12]}", owner=digits[:12])
    put(holdings, "guards", cookie=f"0x{int(digits[:16], 16):x}", owner=digits[:16])
    put(holdings, "files", allocation_id=key, path=f"/seeds/{key}")


def off(holdings: Holdings) -> None:
    """The guests have shut themselves down: libvirt takes their ports away with them."""
    for domain in holdings["domains"]["found"]:
        domain |= {"state": "shut off", "active": False}
    drop(holdings, "processes", "ports", "guards")
