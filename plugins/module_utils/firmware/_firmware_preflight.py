"""Firmware preflight of a future slice host: BIOS settings and their effect, GPUs, fabric, disks.

Read-only. It works in MAAS commissioning, before the first use of the collection on the machine,
and on a slice host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _kernel_arguments
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _pci
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.core._report_line import (
    quoted,
    report_line,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _signature, _usage
from ansible_collections.gpuaas.slice.plugins.module_utils.firmware import _racadm_bios
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _check, _checks_platform
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._check import (
    Check,
    Remedy,
    Verdict,
    failed,
    passed,
    verdict,
    warned,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import (
    _nvme_disks,
    _pci_functions,
)

# Dell XE9680L: H200 SXM, and InfiniBand of a BlueField-3. A profile can override both.
GPU_IDS = ("10de:2335",)
FABRIC_IDS = ("15b3:a2dc",)
FABRIC_LINK = _pci.INFINIBAND

_FIRMWARE = "run playbook gpuaas.slice.firmware, approve its plan, power-cycle"
# ACPI tables that show an IOMMU: Intel's and AMD's.
_IOMMU_TABLES = ("/sys/firmware/acpi/tables/DMAR", "/sys/firmware/acpi/tables/IVRS")
# Blockers that make a disk permanently unusable for a slot. A storage transition removes all
# others.
_BROKEN = ("identity_missing", "duplicate_identity", "by_id_missing", "device_unreadable")

_GPU_KEYS = "address id numa_node iommu_group driver"
_FABRIC_KEYS = "address id link netdev rdma numa_node driver sriov_totalvfs sriov_numvfs"


@dataclass(frozen=True)
class Request:
    """bios: parameters of the module racadm_bios. expected_gpus: 0 when it is not known.

    refused: failure of a prerequisite for reading the BIOS settings.
    """

    bios: Mapping[str, Any]
    gpu_ids: Sequence[str] = GPU_IDS
    fabric_ids: Sequence[str] = FABRIC_IDS
    fabric_link: str = FABRIC_LINK
    expected_gpus: int = 0
    exclude_models: Sequence[str] = ()
    not_applicable: Sequence[str] = field(default_factory=tuple)
    refused: Refusal | None = None


class Facts:
    """Facts of the machine; lazy, so that a check that does not apply costs nothing."""

    def __init__(self, request: Request) -> None:
        self.request = request

    @property
    def bios(self) -> dict[str, Any]:
        """BIOS settings from a single read. Raises the same Refusal at every access if that read
        failed.
        """
        if isinstance(self._bios, Refusal):
            raise self._bios
        return self._bios

    @property
    def bios_known(self) -> dict[str, Any]:
        """{} when the settings could not be read or are not requested."""
        if "bios_settings" in self.request.not_applicable or isinstance(self._bios, Refusal):
            return {}
        return self._bios

    @cached_property
    def _bios(self) -> dict[str, Any] | Refusal:
        if self.request.refused is not None:
            return self.request.refused
        try:
            return _racadm_bios.facts(self.request.bios, _racadm_bios.observe(self.request.bios))
        except Refusal as refusal:
            return refusal

    @cached_property
    def devices(self) -> list[_pci.Device]:
        return _pci.devices()

    @cached_property
    def gpus(self) -> list[dict[str, Any]]:
        return _pci_functions.gpus(self.devices, self.request.gpu_ids)

    @cached_property
    def fabric(self) -> list[dict[str, Any]]:
        """Devices with a fabric id, including those with another link than the fabric's."""
        request = self.request
        return _pci_functions.fabric(self.devices, request.fabric_ids, request.fabric_link)

    @property
    def cards(self) -> list[dict[str, Any]]:
        return [card for card in self.fabric if _pci_functions.is_of_fabric(card)]

    @cached_property
    def iommu_groups(self) -> int:
        folder = _host.path(_pci.GROUPS)
        return sum(1 for _group in folder.iterdir()) if folder.is_dir() else 0

    @cached_property
    def disks(self) -> list[dict[str, Any]]:
        """Disks as in the discovery document, with every signature and its offset."""
        by_name = {disk.kernel_name: disk for disk in _block.disks()}
        entries = _nvme_disks.disks(self.request.exclude_models)
        for entry in entries:
            disk = by_name.get(entry["kernel_name"])
            entry["signatures"] = _signatures(disk) if disk is not None else []
        return entries


def report(request: Request) -> dict[str, Any]:
    """The report: checks, counts, and `lines`, a line per setting, job, device and check."""
    facts = Facts(request)
    outcomes = _check.evaluate(CHECKS, facts, intent="slice", not_applicable=request.not_applicable)
    failures = sum(outcome["status"] == _check.FAIL for outcome in outcomes)
    warnings = sum(outcome["status"] == _check.WARN for outcome in outcomes)
    status = _check.FAIL if failures else _check.WARN if warnings else _check.PASS
    counts = {"checks": len(outcomes), "failures": failures, "warnings": warnings}
    summary = line("FIRMWARE_SUMMARY", status=status, **counts)
    checks = [_check_line(outcome) for outcome in outcomes]
    return {
        "failures": failures,
        "warnings": warnings,
        "checks": [{k: outcome[k] for k in ("check", "status", "detail", "remediation")}
                   for outcome in outcomes],
        "bios": facts.bios_known,
        "lines": [*_bios_lines(facts), *_device_lines(facts), *checks, summary],
        "summary": summary,
    }  # fmt: skip


def line(name: str, **fields: Any) -> str:
    """`GPUAAS_SLICE_<name> key=value …`: a single line; each value is one quoted shell word."""
    return report_line(
        f"GPUAAS_SLICE_{name}", **{key: _text(value) for key, value in fields.items()}
    )


def job_line(job: Mapping[str, Any]) -> str:
    return line("BIOS_JOB", **{key: job[key] for key in ("id", "status", "percent", "message")})


def bios_settings(facts: Facts) -> Verdict:
    """Every requested value is current, and no job could change it."""
    bios = facts.bios
    problems = [
        f"{attribute['name']} is {attribute['current'] or 'not there'}, not {attribute['wanted']}"
        + (
            f" ({attribute['status']})"
            if attribute["status"] in ("pending", "would_be_lost")
            else ""
        )
        for attribute in bios["attributes"]
        if attribute["status"] != "right"
    ]
    if not problems and not bios["settled"]:
        problems = ["a BIOS job is open: what it brings is not known before its end"]
    return verdict(problems, ", ".join(f"{n['name']}={n['current']}" for n in bios["attributes"]))


def iommu(facts: Facts) -> Verdict:
    """IOMMU groups exist if the kernel uses the IOMMU. On a machine before bootstrap, the firmware
    must at least report it.
    """
    if facts.iommu_groups:
        return passed(f"{facts.iommu_groups} IOMMU groups")
    tables = [path.rpartition("/")[2] for path in _IOMMU_TABLES if _host.path(path).exists()]
    if not tables:
        return failed("no IOMMU group, and the firmware shows no IOMMU (no DMAR or IVRS table)")
    finding = f"no IOMMU group; the firmware shows {', '.join(tables)}, the kernel"
    off = [word for word in _kernel_arguments.running() if word.endswith("iommu=off")]
    if off:
        return warned(f"{finding} is told {off[0]}")
    # The kernel uses AMD's IOMMU by default.
    requested = "IVRS" in tables or "intel_iommu=on" in _kernel_arguments.running()
    return warned(f"{finding} {'asks' if requested else 'does not ask'} for it")


def gpus(facts: Facts) -> Verdict:
    count, expected = len(facts.gpus), facts.request.expected_gpus
    if not count:
        return failed(f"no GPU ({', '.join(facts.request.gpu_ids)}) on the PCI bus")
    if expected and count != expected:
        return failed(f"{count} GPUs, not {expected}")
    return passed(f"{count} GPUs")


def fabric(facts: Facts) -> Verdict:
    names = ", ".join(card["address"] for card in facts.cards)
    if names:
        return passed(names)
    others = [_pci.unlike_link(card["address"], facts.request.fabric_link) for card in facts.fabric]
    return failed("; ".join([f"no card ({', '.join(facts.request.fabric_ids)})", *others]))


def sriov(facts: Facts) -> Verdict:
    """Virtual functions can be created. Bootstrap checks their number."""
    if not facts.cards:
        return failed("no fabric card that could offer virtual functions")
    without = [card["address"] for card in facts.cards if not card["sriov_totalvfs"]]
    fine = ", ".join(f"{card['address']} offers {card['sriov_totalvfs']}" for card in facts.cards)
    return verdict([f"{address} offers no virtual function" for address in without], fine)


def nvme(facts: Facts) -> Verdict:
    """FAIL for a disk without a stable name, WARN for a disk in use.

    Excluded disks, such as a boot card, are listed but not judged, because they need no identity.
    """
    if not facts.disks:
        return failed("no NVMe namespace")
    excluded = "excluded_model"
    judged = [d for d in facts.disks if excluded not in {b["code"] for b in d["blockers"]}]
    if not judged:
        return failed("no NVMe namespace but those of excluded models")
    uses = [
        (disk["kernel_name"], blocker["code"]) for disk in judged for blocker in disk["blockers"]
    ]
    broken = [f"{name}: {code}" for name, code in uses if code in _BROKEN]
    if broken:
        return failed("; ".join(broken))
    used = [f"{name}: {code}" for name, code in uses]
    return warned("; ".join(used)) if used else passed(f"{len(judged)} raw disks")


CHECKS: tuple[Check[Facts], ...] = (
    Check("bios_settings", bios_settings, Remedy(_FIRMWARE)),
    Check(
        "firmware_virtualization",
        _checks_platform.firmware_virtualization,
        Remedy(_FIRMWARE),
    ),
    Check("kvm", _checks_platform.kvm, Remedy(_FIRMWARE)),
    Check(
        "iommu_groups",
        iommu,
        Remedy("turn the IOMMU on in the firmware; run playbook gpuaas.slice.bootstrap"),
    ),
    Check("gpu", gpus, Remedy("look at the machine's GPUs and their power; correct the profile")),
    Check("fabric", fabric, Remedy("look at the machine's fabric cards; correct the profile")),
    Check("sriov", sriov, Remedy(f"{_FIRMWARE}; turn SR-IOV on in the card's own firmware")),
    Check(
        "nvme",
        nvme,
        Remedy("replace disks without identity; run playbook gpuaas.slice.transition_storage"),
    ),
)


def _bios_lines(facts: Facts) -> list[str]:
    bios = facts.bios_known
    rows = [
        line(
            "BIOS",
            attribute=attribute["name"],
            current=attribute["current"],
            pending=attribute["pending"],
            wanted=attribute["wanted"],
            status=attribute["status"],
        )
        for attribute in bios.get("attributes", [])
    ]
    plan = [
        f"GPUAAS_SLICE_BIOS_PLAN {quoted(step['subject'])}={quoted(step['after']['pending'])}"
        for step in bios.get("differences", [])
        if step["name"] == "stage_attribute"
    ]
    return rows + plan + [job_line(job) for job in bios.get("jobs", [])]


def _device_lines(facts: Facts) -> list[str]:
    return [
        *_rows(lambda: [_picked("GPU", gpu, _GPU_KEYS) for gpu in facts.gpus]),
        *_rows(lambda: [_picked("FABRIC", card, _FABRIC_KEYS) for card in facts.fabric]),
        *_rows(lambda: [_disk_line(disk) for disk in facts.disks]),
    ]


def _rows(make: Callable[[], list[str]]) -> list[str]:
    """Lines of a device kind; [] if it cannot be read, because the check of the same name gives the
    reason.
    """
    try:
        return make()
    except (Refusal, OSError, ValueError):
        return []


def _disk_line(disk: Mapping[str, Any]) -> str:
    kinds = disk["filesystems"].items()
    keys = "by_id kernel_name serial model size_bytes numa_node os_disk"
    return line(
        "NVME",
        **{key: disk[key] for key in keys.split()},
        partitions=disk["children"],
        mountpoints=disk["mounts"],
        filesystems=[f"{name}:{kind}" for name, kind in kinds if kind not in _signature.TABLES],
        signatures=disk["signatures"],
        blockers=[blocker["code"] for blocker in disk["blockers"]],
    )


def _picked(name: str, entry: Mapping[str, Any], keys: str) -> str:
    return line(name, **{key: entry[key] for key in keys.split()})


def _check_line(outcome: Mapping[str, str]) -> str:
    keys = ["status", "check", "detail", *(["remediation"] if outcome["remediation"] else [])]
    return line("FIRMWARE", **{key: outcome[key] for key in keys})


def _signatures(disk: _block.Disk) -> list[str]:
    """`kernel name:type@byte`; an unreadable disk has a blocker instead."""
    try:
        by_place = _usage.marks(disk)
    except OSError:
        return []
    return [
        f"{name}:{sign.type}@{sign.offset}" for name, signs in by_place.items() for sign in signs
    ]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "" if value is None else str(value)
