"""Parity checks of the machine: management path, firmware, kernel, boot, IOMMU and bindings."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _gpu_services,
    _grub_menu,
    _kernel_arguments,
    _ssh_certificate,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_units,
    _file_edits,
    _host,
    _host_mode,
    _ledger,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _api_names
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._check import (
    Verdict,
    failed,
    passed,
    verdict,
    warned,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._host_facts import Facts, kept
from ansible_collections.gpuaas.slice.plugins.module_utils.topology import (
    _pci_functions,
)

ENROLMENT = "/etc/gpuaas/enrolment.env"
HOST_KEY = "/etc/ssh/ssh_host_ed25519_key.pub"
# Report of the first boot's preflight. The enrolment writes it once per installation.
FIRST_BOOT = "/var/log/gpuaas-slice-firmware.log"
CERTIFICATE = "/etc/ssh/ssh_host_ed25519_key-cert.pub"
_TAGS = {"slice": "gpuaas-profile-slice-vm", "baremetal": "gpuaas-profile-baremetal"}
# A Fabric Manager on this host holds the NVSwitches alone.
_GPU = re.compile(r"/dev/nvidia(?!-nvswitch)")
_KVM_GET_API_VERSION, _KVM_CREATE_VM = 0xAE00, 0xAE01


def node_agent(facts: Facts) -> Verdict:
    """Management path: the host is enrolled, and sshd offers a valid certificate for its current
    key.
    """
    if not facts.enrolment:
        return failed(f"not enrolled: {ENROLMENT} is missing")
    text = _host.kept(CERTIFICATE)
    if text is None:
        return failed(f"no host certificate in {CERTIFICATE}")
    certificate = _ssh_certificate.parse(text)
    until, problems = _iso(certificate.valid_before), []
    if certificate.valid_before <= time.time():
        problems.append(f"local certificate expired at {until}")
    if certificate.valid_after > time.time():
        problems.append(f"local certificate not valid before {_iso(certificate.valid_after)}")
    if certificate.key != _ssh_certificate.key_parts(_host.read(HOST_KEY) or ""):
        problems.append("local certificate is for another host key")
    if not _offered():
        problems.append("sshd does not offer the certificate: no HostCertificate in its settings")
    return verdict(problems, f"node certificate enrolled, valid until {until}")


def name_resolution(facts: Facts) -> Verdict:
    """Every API name resolves to an address that answers; a refusal counts as an answer."""
    names = _expected_names(facts)
    if not names:
        return failed(f"{ENROLMENT} names no API")
    problems, shown = [], []
    for name, port in names.items():
        answers = [name] if _is_address(name) else _api_names.addresses(name)
        if not answers:
            problems.append(f"{name}: Name or service not known")
            continue
        silent = [_api_names.unreachable(answer, port) for answer in answers] if port else [""]
        if all(silent):
            problems.append(f"{name}: {'; '.join(silent)}")
        shown.append(f"{name} is {'an address' if _is_address(name) else answers[0]}")
    return verdict(problems, ", ".join(shown))


def maas_intent(facts: Facts) -> Verdict:
    """The machine has the tag of this intent and no other. Two tags would leave the next deployment
    to chance.
    """
    tags, expected = facts.request.maas_tags, _TAGS[facts.request.intent]
    if tags is None:
        return warned("the MAAS tags of this machine are not known here")
    if [tag for tag in tags if tag in _TAGS.values()] == [expected]:
        return passed(expected)
    return failed(f"tags are {', '.join(tags) or 'none'}, not {expected}")


def firmware_virtualization(_facts: object) -> Verdict:
    for row in (_host.read("/proc/cpuinfo") or "").splitlines():
        if row.startswith("flags"):
            flags = {"vmx", "svm"} & set(row.split())
            return passed(flags.pop()) if flags else failed("no vmx or svm: off in the firmware")
    return failed("/proc/cpuinfo shows no flags")


def firmware(facts: Facts) -> Verdict:
    """The processor's current flags decide. The first boot's preflight result is only added to the
    detail, because its failures may have been repaired since.
    """
    virtualization = firmware_virtualization(facts)
    return Verdict(virtualization.status, f"{virtualization.detail}; {_first_boot()}")


def kvm(_facts: object) -> Verdict:
    """KVM can create a virtual machine; the existence of the device file is not enough."""
    descriptor = os.open(_host.path("/dev/kvm"), os.O_RDWR | os.O_CLOEXEC)
    try:
        version = fcntl.ioctl(descriptor, _KVM_GET_API_VERSION)
        os.close(fcntl.ioctl(descriptor, _KVM_CREATE_VM))
    finally:
        os.close(descriptor)
    return verdict([] if version == 12 else [f"KVM API {version}, not 12"], "a VM can be created")


def kernel_cmdline(facts: Facts) -> Verdict:
    """The required kernel arguments are active now and in the boot menu for the next boot."""
    arguments = facts.kernel.arguments
    problems = [f"{word} is not in /proc/cmdline" for word, there in arguments.items() if not there]
    problems += _menu_problems(facts.boot)
    doubts = _settings_doubts(facts.boot_params, facts.boot)
    return verdict(problems, " ".join(arguments), doubts)


def iommu_groups(facts: Facts) -> Verdict:
    """IOMMU groups exist, and the groups of approved devices contain no other active device."""
    count = facts.kernel.iommu_groups
    if not count:
        return failed("the kernel has made no IOMMU group")
    devices = list(facts.devices.values())
    problems = [
        blocker["detail"]
        for address in facts.passthrough
        if address in facts.devices
        for blocker in _pci_functions.group_blockers(facts.devices[address], devices)
    ]
    return verdict(problems, f"{count} groups")


def vfio_modules(facts: Facts) -> Verdict:
    """The VFIO modules are loaded now, and at the next boot they load before the GPU drivers."""
    problems = [f"{name} is not loaded" for name in facts.kernel.missing_modules]
    problems += _module_problems(facts.boot_params, facts.boot)
    return verdict(problems, " ".join(_kernel_arguments.MODULES))


def vfio_binding(facts: Facts) -> Verdict:
    """Every approved device is on vfio-pci, stays there after the next boot, and answers on its
    configuration space.
    """
    if not facts.passthrough:
        return warned("no approved slot: nothing is to be bound yet")
    problems = []
    if not _host_mode.is_slice():
        problems.append("the host is not in slice mode: nothing would be bound at boot")
    spared = [address for address in facts.passthrough if address in facts.spared]
    for address in facts.passthrough:
        if address in spared:
            continue
        device = facts.devices.get(address)
        if device is None:
            problems.append(f"{address} is not there")
        elif device.driver != _pci.VFIO:
            problems.append(f"{address} is on {device.driver or 'no driver'}")
        elif address in facts.silent:
            problems.append(f"{address} does not answer")
    problems += facts.not_at_boot(_boot_units.BINDING) + facts.not_at_boot(_boot_units.CLAIM)
    path = _boot_units.BINDING.settings_path
    try:
        recorded = kept(path).get("devices") or {}
    except Refusal as refusal:
        return failed("; ".join([*problems, f"{refusal.code}: {refusal.found}"]))
    problems += [
        f"{address} is not in {path}" for address in facts.passthrough if address not in recorded
    ]
    problems += [
        f"{address} is {recorded[address]} in {path}, and {facts.devices[address].id} on the host"
        for address in facts.passthrough
        if address in recorded
        and address in facts.devices
        and recorded[address] != facts.devices[address].id
    ]
    # The other functions of a card are bound with it. Devices that are no longer approved can wait
    # for the next binding.
    cards = {_card(address) for address in facts.passthrough}
    doubts = [f"{address} is missing or silent: its slot is blocked" for address in spared]
    doubts += [
        f"{gpu} was not reset since its last use: its slot is blocked" for gpu in _used(facts)
    ]
    doubts += [
        f"{address} of {path} is of no approved slot, and would be bound at boot"
        for address in sorted(recorded)
        if _card(address) not in cards
    ]
    claim = facts.unit(_boot_units.CLAIM.service)
    if claim.load == "loaded" and claim.active != "active":
        # The claim service failed, so the binding took these devices from the drivers that had
        # claimed them.
        doubts.append(f"{_boot_units.CLAIM.service} is {claim.active or 'unknown'}")
    return verdict(problems, f"{len(facts.passthrough)} devices on {_pci.VFIO}", doubts)


def _used(facts: Facts) -> list[str]:
    """GPUs that no tenant has and that were not reset since their last use."""
    proven = (*facts.reset_gpus, *facts.dead_gpus)
    return [
        gpu
        for slot in facts.slots
        if (gpu := str(slot.get("gpu_pci_address") or "")) not in proven
        and not _ledger.load(str(slot["slot_id"])).allocation_id
    ]


def gpu_services_quiesced(facts: Facts) -> Verdict:
    services = facts.profile.get("gpu_services", [])
    problems = []
    for name in services:
        unit = facts.unit(name)
        service = _gpu_services.service(name, unit.active, unit.file)
        problems += [f"{name} is {word}" for word in service.words]
    problems += _nvidia_holders()
    return verdict(problems, f"{len(services)} services quiet")


def reboot_required(facts: Facts) -> Verdict:
    return verdict(facts.kernel.reboot_reasons, "the running kernel is what was set up")


def api_topology(facts: Facts) -> Verdict:
    evidence = facts.request.api_topology
    if not evidence:
        return warned("not proven: no topology evidence was given (API token and node id)")
    blockers = ", ".join(map(str, evidence.get("blockers", [])))
    if not evidence.get("completed"):
        why = f" ({blockers})" if blockers else ""
        return failed(f"the reconciler has no completed discovery of this node{why}")
    seen, now = evidence.get("boot_id"), _host.identity()["boot_id"]
    if seen and seen != now:
        return failed(f"the reconciler's discovery is of boot {seen}, this is {now}")
    if blockers:
        return failed(f"candidate_summary.blockers: {blockers}")
    return passed("completed with no candidate_summary.blockers")


def _card(address: str) -> str:
    """PCI address without the function number, which all functions of a card share."""
    return address.rpartition(".")[0]


def _first_boot() -> str:
    """Short summary of the preflight report that the enrolment left."""
    text = _host.read(FIRST_BOOT)
    if text is None:
        return "no report of the first boot"
    failed_checks = re.findall(r"^GPUAAS_SLICE_FIRMWARE status=FAIL check=([a-z_]+) ", text, re.M)
    ended = re.search(r"^GPUAAS_SLICE_FIRMWARE_SUMMARY status=([A-Z]+) ", text, re.M)
    if ended is None:
        return f"first boot: no summary in {FIRST_BOOT}"
    failing = f" ({', '.join(failed_checks)})" if failed_checks else ""
    return f"first boot: {ended[1]}{failing}, see {FIRST_BOOT}"


def _expected_names(facts: Facts) -> dict[str, int]:
    """Port by host name; 0 if the enrolment gives no port."""
    names: dict[str, int] = {}
    for key, value in facts.enrolment.items():
        if "API" not in key or not value:
            continue
        # Either https://name:port/path or the bare name.
        url = urlsplit(value if "://" in value else f"//{value}")
        if url.hostname:
            port = url.port or {"http": 80, "https": 443}.get(url.scheme, 0)
            names[url.hostname] = names.get(url.hostname) or port
    return names


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def _offered() -> bool:
    folder = _host.path("/etc/ssh/sshd_config.d")
    files = [_host.path("/etc/ssh/sshd_config")]
    files += [folder / name for name in _host.matching("/etc/ssh/sshd_config.d", "*.conf")]
    return any(
        row.split()[:2] == ["HostCertificate", CERTIFICATE]
        for file in files
        if file.is_file()
        for row in file.read_text(errors="replace").splitlines()
    )


def _nvidia_holders() -> list[str]:
    """Processes that hold an NVIDIA device and so block the change to vfio-pci."""
    if not _host.matching("/dev", "nvidia*"):
        return []
    holders = sorted({pid for pid, name in _host.open_files() if _GPU.match(name)})
    return [f"process {pid} ({_host.read(f'/proc/{pid}/comm')}) holds a GPU" for pid in holders]


def _iso(seconds: int) -> str:
    # OpenSSH encodes "for ever" as the largest 64-bit number, which no calendar can represent.
    if seconds > 253402300799:
        return "for ever"
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _menu_problems(state: _kernel_arguments.State) -> list[str]:
    """Kernel arguments missing from the menu entry that the next boot takes."""
    entry = _grub_menu.next_boot()
    if entry is None:
        return [f"{_grub_menu.MENU} is missing: no boot menu to look at"]
    where = f"entry {entry.title!r} of {_grub_menu.MENU}"
    if not entry.kernels:
        return [f"the next boot takes {where}, which starts no kernel of this host"]
    lost = [
        word
        for kernel in entry.kernels
        for word in _kernel_arguments.lacking(state.arguments, kernel)
    ]
    return [f"the next boot would lose {word}: {where}" for word in dict.fromkeys(lost)]


def _settings_doubts(params: Mapping[str, Any], state: _kernel_arguments.State) -> list[str]:
    """Problems in the files from which the boot menu is generated.

    These are warnings as long as the menu itself is correct: the arguments are lost only at the
    next `update-grub`.
    """
    expected = _kernel_arguments.desired_files(params, state)[_kernel_arguments.DROP_IN]
    doubts = _file_edits.unlike(_kernel_arguments.DROP_IN, expected)
    lost = _kernel_arguments.lacking(state.arguments, _kernel_arguments.all_given())
    return [*doubts, *([f"the next update-grub would lose {' '.join(lost)}"] if lost else [])]


def _module_problems(params: Mapping[str, Any], state: _kernel_arguments.State) -> list[str]:
    """Problems with keeping GPU drivers away early in the boot, before this collection's services
    run.
    """
    files = _kernel_arguments.desired_files(params, state)
    whole = (_kernel_arguments.MODULES_LOAD, _kernel_arguments.SOFT_DEPENDENCIES)
    problems = [problem for path in whole for problem in _file_edits.unlike(path, files[path])]
    # The site may add modules to this list. The next build includes them beside this collection's.
    if _kernel_arguments.BLOCK not in (state.files[_kernel_arguments.INITRAMFS_MODULES] or ""):
        problems.append(f"{_kernel_arguments.INITRAMFS_MODULES} lacks our modules")
    if state.initramfs in ("", _kernel_arguments.DUE):
        problems.append("the initramfs was not built with our modules")
    return problems
