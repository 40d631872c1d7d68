"""Hardware of a node: the shared profile, with the values of the node itself. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from reconciler.model import fabric as fabric_model
from reconciler.model.errors import Problem
from reconciler.model.scheduler.snapshot import Refusal, Want
from reconciler.model.states import CapacityShape

_MACHINE = ("vendor", "product", "serial")
# Serial numbers of firmware in which none was set, beside a single repeated character.
_NO_SERIALS = frozenset((
    "unknown", "none", "n/a", "na", "null", "not specified", "not available", "not applicable",
    "not provided", "empty", "oem", "to be filled by o.e.m.", "to be filled by oem", "undefined",
    "default string", "invalid", "serial number", "system serial number", "chassis serial number",
    "base board serial number", "0123456789", "123456789", "1234567890",
))  # fmt: skip
# Networks that guests reach if the profile allows them, and those that they never reach, as in
# `network/_baseline_files.py` of the collection.
PRIVATE = (
    *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"),
    *("192.0.0.0/24", "192.0.2.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
)
NEVER = ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3")
# Remedy for a serial number that several hosts report.
TWICE = "find out which record is of this machine, and retire or correct the other"
# Field of the node's record to key of the profile's `fabric` section.
NODE_FIELDS = {"fabric_interface": "interface", "fabric_address": "site_address"}
# Keys of the profile with the price of a GPU hour, by what is sold.
PRICES = {
    CapacityShape.GPU_SLICE: "gpu_hour_price",
    CapacityShape.BAREMETAL: "machine_gpu_hour_price",
}
_PRICE_FORM = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


def serial_number(text: object) -> str:
    """A machine's serial number in the form in which two are compared; "" if it is unknown."""
    serial = " ".join(text.split()).lower() if isinstance(text, str) else ""
    return "" if serial in _NO_SERIALS or len(set(serial)) < 2 else serial.upper()


def machine_of(document: Mapping[str, Any]) -> dict[str, str]:
    """The machine that a discovery describes; {} for a document that describes none."""
    machine = document.get("machine") or {}
    return {name: str(machine.get(name) or "")[:200] for name in _MACHINE if machine}


def learned(machine: dict[str, str], before: Mapping[str, str] | None) -> dict[str, str]:
    """The node's record of a machine that its host reports. `first_serial` is the serial number
    that its installation reported first, if it is another: a host may change its number and
    change it back.
    """
    first = _first_serial(before) or serial_of(machine)
    return machine if first == serial_of(machine) else {**machine, "first_serial": first}


def reinstalled(machine: Mapping[str, str]) -> dict[str, str]:
    """The record after a new installation, which may be on another machine: its next report is the
    first.
    """
    return {**machine, "first_serial": ""}


def _first_serial(hardware: Mapping[str, Any] | None) -> str:
    if hardware and "first_serial" in hardware:
        return serial_number(hardware["first_serial"])
    return serial_of(hardware)


def serial_of(hardware: Mapping[str, Any] | None) -> str:
    """Serial number of a node's machine; "" if its host reported none."""
    return serial_number((hardware or {}).get("serial"))


def bound_serial(maas: Mapping[str, Any] | None) -> str:
    """Serial number of the machine that is bound to a node in MAAS; "" if it is unknown."""
    return serial_number(((maas or {}).get("identity") or {}).get("serial"))


def own_serial(reported: str, recorded: str) -> str:
    """Serial number that a host reports, unless MAAS or NetBox has recorded another for its
    machine: it could report that of any other. "": unknown.
    """
    return reported if recorded in ("", reported) else ""


Hardware = Mapping[str, Any] | None


def by_serial(nodes: Iterable[tuple[str, Hardware]]) -> dict[str, dict[str, Hardware]]:
    """Nodes with their hardware, by the serial number that their hosts report."""
    result: dict[str, dict[str, Hardware]] = {}
    for id, hardware in nodes:
        if serial := serial_of(hardware):
            result.setdefault(serial, {})[id] = hardware
    return result


def owner_of(serial: str, same: Mapping[str, Hardware], recorded: Mapping[str, str]) -> str:
    """The node whose machine has a serial number by the site's own records; "" if they show none.

    The hosts of all nodes in `same` report the number, because a hostile host can report any.
    recorded: serial numbers in MAAS or NetBox, by node. A node whose number is unknown there counts
    as a second record of the machine, or as its true one. It does not if its host first reported
    another number and the owner's host first reported this one.
    """
    owners = [id for id in same if recorded.get(id) == serial]
    if len(owners) != 1:
        return ""
    (owner,) = owners
    first = {id: _first_serial(hardware) for id, hardware in same.items()}
    doubtful = [id for id in same if id != owner and not recorded.get(id)]
    later = first[owner] == serial and all(first[id] != serial for id in doubtful)
    return owner if later or not doubtful else ""


def node_profile(profile: dict[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """Copy of the profile with the node's own values over it, and without what hosts need not know:
    a new price must not stop a run that has begun.
    """
    values = {name: node[field] for field, name in NODE_FIELDS.items() if node.get(field)}
    profile = {name: value for name, value in profile.items() if name not in PRICES.values()}
    return {**profile, "fabric": {**profile["fabric"], **values}} if values else profile


def limit_s(profile: Mapping[str, Any], parts: Iterable[str]) -> int:
    """Seconds that the profile allows for these consecutive parts of a run."""
    # Playbooks apply these limits twice: until the new boot begins, and until it answers; until the
    # host is back, and until the BIOS job has ended.
    twice = ("reboot", "firmware")
    allowed = {"firmware": 3600, **profile["deadlines"]}
    return sum(int(allowed[part]) * (1 + (part in twice)) for part in parts)


def maas_tags(tags: list[str] | None) -> dict[str, Any]:
    """Variable of a parity run. Omitted for unknown tags, because [] would fail the check."""
    return {} if tags is None else {"slice_maas_tags": tags}


@dataclass(frozen=True)
class Offer:
    """What a hardware profile sells: slices under an SKU, and whole machines under its own name.

    counts: allowed numbers of GPUs in a slice, () for any. nvlink: use of the board's NVSwitches by
    slices, "" for a board without them. spans_numa: whether a slice may span NUMA nodes.
    runtime: what an image must contain. price, machine_price: of a GPU hour in a slice and in a
    whole machine, None when nothing is asked.
    joined: GPUs that a partition of NVLink joins, by address; of no board without partitions.
    gpus: of a machine. vcpus, memory_mib: of a guest, for each GPU. allowed, denied: private
    networks that guests reach, and public ones that they do not.
    """

    sku: str = ""
    title: str = ""
    gpus: int = 1
    vcpus: int = 0
    counts: tuple[int, ...] = ()
    nvlink: str = ""
    spans_numa: bool = False
    ready_minimum_s: int = 0
    runtime: tuple[str, ...] = ()
    price: Decimal | None = None
    machine_price: Decimal | None = None
    memory_mib: int = 0
    joined: frozenset[frozenset[str]] = frozenset()
    allowed: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()

    @classmethod
    def of(cls, profile: Mapping[str, Any]) -> Offer:
        deadlines, gpu, vm = (profile.get(name) or {} for name in ("deadlines", "gpu", "vm"))
        sku = str(profile.get("sku") or "")
        return cls(
            sku=sku,
            title=str(profile.get("sku_title") or sku),
            gpus=int(gpu.get("expected") or 1),
            vcpus=int(vm.get("vcpus_per_gpu") or 0),
            counts=tuple(map(int, gpu.get("counts") or ())),
            nvlink=nvlink(profile),
            spans_numa=bool(vm.get("span_numa")),
            ready_minimum_s=int(deadlines.get("ready_minimum", deadlines.get("ready", 0))),
            runtime=baked_runtime(profile),
            price=_price(profile, CapacityShape.GPU_SLICE),
            machine_price=_price(profile, CapacityShape.BAREMETAL),
            memory_mib=int(vm.get("memory_mib_per_gpu") or 0),
            joined=_joined(profile),
            allowed=tuple((profile.get("network") or {}).get("allowed_networks") or ()),
            denied=tuple((profile.get("network") or {}).get("denied_networks") or ()),
        )

    def reaches(self, address: str) -> bool:
        """Whether guests reach an address, by the rules of the slice bridge."""
        try:
            target = IPv4Address(address)
        except ValueError:
            return False

        def within(networks: Iterable[str]) -> bool:
            return any(target in IPv4Network(network) for network in networks)

        if within(NEVER) or within(self.denied):
            return False
        return within(self.allowed) or not within(PRIVATE)

    def refusal(self, gpus: int) -> Refusal | None:
        """Why no slice with this number of GPUs is sold; None when it is."""
        if gpus > 1 and self.nvlink == NVLINK_UNSUPPORTED:
            return Refusal(
                "nvlink_unsupported",
                "one GPU in a slice: NVSwitches join the GPUs, and gpu.nvlink of the hardware"
                " profile is unsupported",
                "ask for one GPU, or have an operator set gpu.nvlink to isolated or partitions",
            )
        if self.counts and gpus not in self.counts:
            counts = ", ".join(map(str, sorted(self.counts)))
            return Refusal(
                "gpu_count_not_sold", f"{counts} GPUs in a slice", "ask for such a number"
            )
        return None

    def image_problem(
        self, image: str, runtime: Collection[str], gpus: int, *, further: Sequence[str] = ()
    ) -> Problem | None:
        """Why no slice with this number of GPUs is launched from an image; None when it is.

        image: its name and version. runtime: what it contains. further: what else it must contain.
        An image whose driver leaves NVLink alone would start CUDA on joined GPUs, so no probe of
        its guests would find it.
        """
        required = (*self.runtime, *further)
        if missing := [name for name in required if name not in runtime]:
            return Problem(
                "image_runtime_missing",
                expected=f"an image that contains {', '.join(required)}",
                found=f"{image}, whose record lacks {', '.join(missing)}",
                remedy="choose another image; an operator registers what an image contains",
            )
        if gpus > 1 and self.nvlink == NVLINK_PARTITIONS and WITHOUT_NVLINK in runtime:
            return Problem(
                "image_runtime_missing",
                expected="an image whose driver uses NVLink",
                found=f"{image}, whose record has {WITHOUT_NVLINK}",
                remedy="choose another image, or one GPU",
            )
        return None


def want(
    offers: Mapping[str, Offer],
    gpus: int,
    *,
    image: tuple[str, Collection[str]] | None = None,
    **fields: Any,
) -> Want:
    """The scheduler's request for a slice. offers: what each hardware profile sells. image: name
    and content of an image, for nodes whose profile takes it.
    """

    def refusal(offer: Offer) -> Refusal | None:
        problem = offer.image_problem(*image, gpus) if image else None
        if problem is None:
            return offer.refusal(gpus)
        texts = (problem.code, problem.expected, problem.remedy, problem.found)
        return offer.refusal(gpus) or Refusal(*texts, problem.status)

    refusals = {name: refusal(offer) for name, offer in sorted(offers.items())}
    return Want(
        gpus,
        **fields,
        barred=tuple((name, refusal) for name, refusal in refusals.items() if refusal),
        # A single GPU is on a single NUMA node.
        spanning=tuple(name for name in refusals if offers[name].spans_numa and gpus > 1),
    )


NVLINK_UNSUPPORTED, NVLINK_PARTITIONS = "unsupported", "partitions"
# What an image record calls a driver that leaves NVLink alone.
WITHOUT_NVLINK = "nvlink-disabled"


def nvlink(profile: Mapping[str, Any]) -> str:
    """Use of NVLink by slices; "" for a board without NVSwitches."""
    gpu = profile.get("gpu") or {}
    return str(gpu.get("nvlink") or (NVLINK_UNSUPPORTED if gpu.get("nvswitch_ids") else ""))


def leaves_nvlink_alone(profile: Mapping[str, Any]) -> bool:
    """Whether CUDA starts in a guest only when its driver does not use NVLink."""
    return nvlink(profile) not in ("", NVLINK_PARTITIONS)


def _joined(profile: Mapping[str, Any]) -> frozenset[frozenset[str]]:
    if nvlink(profile) != NVLINK_PARTITIONS:
        return frozenset()
    gpu = profile["gpu"]
    address = {module: address for address, module in gpu["module_ids"].items()}
    return frozenset(
        frozenset(address.get(module, "") for module in modules) for modules in gpu["nvlink_sets"]
    )


def nvlink_partition(
    profile: Mapping[str, Any], slots: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Part of the VM's shape: the partition of the GPUs of these slots, {} on other boards."""
    if nvlink(profile) != NVLINK_PARTITIONS:
        return {}
    gpu = profile["gpu"]
    addresses = [slot["gpu_pci_address"] for slot in slots]
    if unknown := [address for address in addresses if address not in gpu["module_ids"]]:
        raise Problem(
            "gpu_module_unknown",
            422,
            expected="the module of each GPU in gpu.module_ids of the hardware profile",
            found=f"none of {', '.join(unknown)}",
            remedy="add it to the profile, or sell the GPU under another profile",
        )
    modules = sorted(gpu["module_ids"][address] for address in addresses)
    return {"nvlink_partition": {"modules": modules, **gpu["fabric_manager"]}}


def _price(profile: Mapping[str, Any], shape: CapacityShape) -> Decimal | None:
    """Price of a GPU hour. Only text, because a number in YAML is binary and no sum of money.

    `gpuaas doctor` names a price of another form; nothing is calculated with it.
    """
    text = profile.get(PRICES[shape])
    if not isinstance(text, str) or not _PRICE_FORM.fullmatch(text):
        return None
    return Decimal(text)


def check(profile: Mapping[str, Any], name: str) -> None:
    """Problem for a valid value that no host supports yet, or that is unsafe.

    A tap instead of the requested attachment would send a guest's traffic by another path than was
    bought. GPUs without their partition would not start CUDA, and a guest that reaches the Fabric
    Manager, which asks for no password, would join its GPUs to those of others.
    """
    gpu = profile.get("gpu") or {}
    if nvlink(profile) == NVLINK_PARTITIONS:
        keys = ("fabric_manager", "module_ids", "nvlink_sets")
        if missing := [f"gpu.{key}" for key in keys if not gpu.get(key)]:
            raise Problem(
                "nvlink_partitions_incomplete",
                422,
                expected=f"gpu.nvlink partitions with gpu.{', gpu.'.join(keys)}",
                found=f"no {', '.join(missing)} in the hardware profile {name}",
                remedy="add them (docs/hosts.md, NVLink between the GPUs of a slice), or set"
                " gpu.nvlink to isolated",
            )
        address = str(gpu["fabric_manager"].get("address") or "")
        if Offer.of(profile).reaches(address):
            raise Problem(
                "fabric_manager_exposed",
                422,
                expected="an address of the Fabric Manager that guests do not reach",
                found=f"{address} in the hardware profile {name}",
                remedy="take it out of network.allowed_networks, or add it to"
                " network.denied_networks",
            )
    attachment = (profile.get("vm") or {}).get("mgmt_attachment", "tap")
    if attachment != "tap":
        raise Problem(
            "mgmt_attachment_unsupported",
            422,
            expected="vm.mgmt_attachment tap",
            found=f"{attachment} in the hardware profile {name}",
            remedy="set it to tap: the card's embedded switch mode is not supported yet",
        )


def baked_runtime(profile: Mapping[str, Any]) -> tuple[str, ...]:
    """What an image must contain for a guest on this hardware, as image records name it."""
    runtime = (profile.get("vm") or {}).get("guest_runtime") or {}
    if runtime.get("source") != "baked":
        return ()
    driver = runtime.get("driver", "edu")
    names = {
        f"driver-{driver}": driver != "edu",
        f"cuda-{runtime.get('cuda')}": runtime.get("cuda"),
        "rdma": runtime.get("rdma"),
        # The driver of an image loads before cloud-init could tell it.
        WITHOUT_NVLINK: driver != "edu" and leaves_nvlink_alone(profile),
    }
    return tuple(name for name, needed in names.items() if needed)


def check_new(profile: Mapping[str, Any], name: str) -> None:
    """Refuse a profile that a node is about to adopt; a node with an older profile may keep it.

    Problem `fabric_link_missing`: fabric cards of an unknown link type. `fabric_numbers_missing`:
    no numbers by which tenants are kept apart. `runtime_unproven`: guests install their runtime,
    and no probe shows it.
    """
    runtime = (profile.get("vm") or {}).get("guest_runtime") or {}
    installs = [part for part in ("driver", "cuda", "rdma") if runtime.get(part)]
    if runtime.get("source") == "cloud_init" and installs and not runtime.get("probes"):
        raise Problem(
            "runtime_unproven",
            422,
            expected="probes in guest_runtime, such as gpu_compute with its seconds",
            found=f"{', '.join(installs)} installed by cloud-init, and no probe, in the hardware"
            f" profile {name}",
            remedy="name the probes: without one a slice is active while its driver is installed,"
            " and its guest restarts under the tenant",
        )
    fabric = profile.get("fabric") or {}
    if fabric.get("pf_ids") and not fabric.get("link"):
        raise Problem(
            "fabric_link_missing",
            422,
            expected="fabric.link infiniband or ethernet beside fabric.pf_ids",
            found=f"no fabric.link in the hardware profile {name}",
            remedy="say in the profile what the fabric speaks: a vendor gives one id to both",
        )
    if fabric.get("pf_ids"):
        fabric_model.numbers(profile)


def tenant_disks(document: Mapping[str, Any], taken_over: Collection[str]) -> list[dict[str, Any]]:
    """Unused disks that were taken over by identity, in the order of their identity.

    A disk with any blocker stays with the operators: an OS disk, mounted, in an array, without an
    identity, of a model that the profile excludes, or with a filesystem. So does a disk that was
    not approved by its identity (taken_over). A disk without a signature need not be empty, and
    every disk in this list is wiped. The host checks each disk again.
    """
    disks = []
    for disk in sorted(document.get("nvme") or [], key=lambda disk: str(disk.get("identity"))):
        identity = str(disk.get("identity") or "")
        eui = identity.removeprefix("eui.")
        if disk.get("blockers") or not disk.get("by_id") or identity not in taken_over:
            continue
        disks.append(
            {
                "slot_id": f"disk-{eui}",
                "nvme_device": str(disk["by_id"]),
                "nvme_serial": str(disk["serial"]),
                "nvme_eui": eui,
                "nvme_size_bytes": int(disk["size_bytes"]),
            }
        )
    return disks
