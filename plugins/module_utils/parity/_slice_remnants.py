"""Remnants of slice mode on a host, compared item by item.

The list has three readers: the conversion to bare metal ends with it, parity of a bare-metal host
reports it by check, and the reconciler reads it later. Some file names are repeated here because
the modules that write the files take long to load on a host. A test keeps both equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import (
    _gpu_services,
    _grub_menu,
    _host_tuning,
    _kernel_arguments,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _accounts,
    _boot_files,
    _boot_units,
    _host,
    _host_mode,
    _host_snapshot,
    _ledger,
    _managed_block,
    _module_importer,
    _object_names,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _disk,
    _fstab_entries,
    _slice_disks,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import (
    _ipoib_address,
    _virtual_functions,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _host_filter,
    _slice_network,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity._host_facts import (
    OLD_BASELINE,
    Facts,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import _traces

# Kinds of traces that the functions below report, by parity check. The others need programs that a
# bare-metal host may not run: domains are read from libvirt's files, and ports, flows and ingress
# end with the bridge.
TRACES = {
    "libvirt": ("qemu_process",),
    "slice_reservations": ("reservation",),
    "slice_files": (*_traces.FILES, "relay"),
    "slice_limits": ("qos",),
}
# Package source of RACADM. Firmware is read on every machine, so it is no part of slice mode.
RACADM_SOURCE = "/etc/apt/sources.list.d/dell-openmanage.sources"
_MARKER = "# Written by the gpuaas.slice collection"
# Load states that systemd reports for a unit that it does not know.
_ABSENT = ("not-found", "")


@dataclass(frozen=True)
class Item:
    """One comparison. check: the parity check that it belongs to, or a name of its own."""

    check: str
    name: str
    expected: str
    found: str
    ok: bool

    def document(self) -> dict[str, Any]:
        return asdict(self)


Look = Callable[[Facts], Iterator[Item]]


def compare(facts: Facts, *, scope: str = "host") -> list[Item]:
    """Every item. scope `slices`: only traces of slices, not the settings of slice mode.

    An item that cannot be read is not ok, because unknown does not mean absent.
    """
    looks = SLICES if scope == "slices" else {**SLICES, **MODE}
    return [item for check, look in looks.items() for item in _tried(check, look, facts)]


def of(facts: Facts, *checks: str) -> list[Item]:
    """The items of the given checks. Raises if an item cannot be read."""
    looks = {**SLICES, **MODE}
    return [item for check in checks for item in looks[check](facts)]


def kept(facts: Facts) -> dict[str, Any]:
    """Settings that stay on purpose, for the record of a conversion."""
    entries = _ledger.entries()
    return {
        "ledger": [entry.slot_id for entry in entries],
        "disks_gone": sorted(
            {entry.disk_identity for entry in entries if _gone_dirty(entry, facts)}
        ),
        "fstab_disabled": _fstab_entries.disabled(),
        "images": _host.matching(f"{_host.STATE_DIRECTORY}/images", "*.raw"),
        "packages": sorted(_host_snapshot.recall(_host_snapshot.PACKAGES) or {}),
        "apt_sources": [RACADM_SOURCE] if _host.path(RACADM_SOURCE).exists() else [],
    }


def _tried(check: str, look: Look, facts: Facts) -> list[Item]:
    try:
        return list(look(facts))
    except Refusal as refusal:
        why = f"{refusal.code}: {refusal.found}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        why = f"{type(problem).__name__}: {problem}"
    return [Item(check, "the look itself", "an answer", f"unknown: {why}", ok=False)]


def _domains(facts: Facts) -> Iterator[Item]:
    """Domains from libvirt's files. libvirt need not be installed, and a query must not
    start it.
    """
    names = [
        name
        for folder in ("/etc/libvirt/qemu", "/run/libvirt/qemu")
        for name in _host.matching(folder, f"{_object_names.PREFIX}*.xml")
    ]
    defined = {name.removesuffix(".xml") for name in names}
    yield _none("libvirt", "domains of slices", sorted(defined))
    running = [f"process {trace.row['pid']}" for trace in _traces_of("libvirt", facts)]
    yield _none("libvirt", "QEMU of slices", running)


def _leases(facts: Facts) -> Iterator[Item]:
    """A hold that waits for the wipe of a missing disk would wait for ever. It is therefore ok
    while the disk is absent, and a remnant again when the disk returns.
    """
    entries = _ledger.entries()
    for entry in entries:
        name, expected = f"slot {entry.slot_id}", "free and clean"
        if _gone_dirty(entry, facts):
            state = f"free, and {entry.disk_identity}, which was not wiped, is gone"
            yield Item("nvme_ownership", name, expected, state, ok=True)
            continue
        left = [f"is leased by {entry.allocation_id}"] if entry.allocation_id else []
        left += [f"waits for the wipe of {entry.disk_identity}"] if entry.dirty else []
        yield _none("nvme_ownership", name, left, expected)
    if not entries:
        yield _none("nvme_ownership", "slots in the ledger", [])


def _gone_dirty(entry: _ledger.Entry, facts: Facts) -> bool:
    """Whether a dirty mark without a holder belongs to a disk that this host does not have.

    False unless every namespace identifies itself, because a silent namespace may be that disk.
    """
    if entry.allocation_id or not (entry.dirty and entry.disk_identity):
        return False
    names = _host.listed("/sys/block")
    present = {disk.kernel_name for disk in facts.disks}
    if any(_disk.WHOLE.fullmatch(name) and name not in present for name in names):
        return False
    return not any(disk.is_known_as(entry.disk_identity) for disk in facts.disks)


def _reservations(facts: Facts) -> Iterator[Item]:
    owners = [trace.owner for trace in _traces_of("slice_reservations", facts)]
    yield _none("slice_reservations", "reservations of slices", owners)


def _slice_files(facts: Facts) -> Iterator[Item]:
    paths = [trace.text for trace in _traces_of("slice_files", facts)]
    yield _none("slice_files", "seeds, NVRAM and console logs of slices", paths)


def _limits(facts: Facts) -> Iterator[Item]:
    """QoS rows outlive their bridge. They cannot be read while Open vSwitch does not run."""
    there = _traces_of("slice_limits", facts) if _slice_network.switch_runs() else []
    yield _none("slice_limits", "rate limits of slices", [trace.text for trace in there])


def _traces_of(check: str, facts: Facts) -> list[_traces.Trace]:
    looks = _traces.looks(facts.network["bridge"])
    return [trace for kind in TRACES[check] for trace in looks[kind]()]


def _mode(_facts: Facts) -> Iterator[Item]:
    marker = _host_mode.MARKER
    state = "the host is still in slice mode" if _host_mode.is_slice() else _file(marker)
    yield Item("slice_mode", marker, "absent", state, ok=state == "absent")


def _binding(facts: Facts) -> Iterator[Item]:
    fabric = set(facts.profile["fabric"]["pf_ids"])
    for device in facts.devices.values():
        parent = facts.devices.get(device.physfn)
        ours = device.id in facts.profile["gpu"]["ids"] or (parent and parent.id in fabric)
        if not ours:
            continue
        on = _pci.VFIO in (device.driver, device.driver_override)
        state = f"is on {_pci.VFIO}" if on else f"driver {device.driver or 'none'}"
        yield Item("vfio_binding", device.address, f"not on {_pci.VFIO}", state, ok=not on)
    path = _boot_units.BINDING.settings_path
    record = json.loads(_host.kept(path) or "{}").get("devices", {})
    bound = [f"{address} would be bound at boot" for address in sorted(record)]
    there = [] if bound or _file(path) == "absent" else ["is there, without a device"]
    yield _none("vfio_binding", path, bound + there)
    for unit in (_boot_units.BINDING, _boot_units.CLAIM):
        yield from _service(facts, "vfio_binding", unit.service)


def _disks(_facts: Facts) -> Iterator[Item]:
    """udev, LVM and mdadm act on the disks of slices again."""
    yield _gone("slice_disks", _slice_disks.RULES)
    yield _gone("slice_disks", _slice_disks.GRUB)
    for path in (_slice_disks.LVM, _slice_disks.MDADM, _slice_disks.OTHER_MDADM):
        block = _managed_block.block_of(_host.kept(path) or "")
        yield _none("slice_disks", path, ["a block of ours"] if block else [])


def _kernel(facts: Facts) -> Iterator[Item]:
    """The next boot has none of this collection's arguments. `reboot_required` covers the current
    boot.
    """
    yield _gone("kernel_cmdline", _kernel_arguments.DROP_IN)
    stray = [f"{word}, which no file of the host asks for" for word in facts.boot.stray]
    yield _none("kernel_cmdline", _grub_menu.MENU, stray, "no argument of ours")


def _modules(facts: Facts) -> Iterator[Item]:
    """Nothing of this collection keeps GPUs from the host's own drivers at the next boot."""
    yield _gone("vfio_modules", _kernel_arguments.MODULES_LOAD)
    yield _gone("vfio_modules", _kernel_arguments.SOFT_DEPENDENCIES)
    block = _kernel_arguments.has_block(_host.kept(_kernel_arguments.INITRAMFS_MODULES))
    blocks = ["a block of ours"] if block else []
    yield _none("vfio_modules", _kernel_arguments.INITRAMFS_MODULES, blocks, "no block of ours")
    built = ["built with modules of ours"] if facts.boot.initramfs else []
    yield _none("vfio_modules", "initramfs", built, "built without modules of ours")


def _functions(facts: Facts) -> Iterator[Item]:
    """Virtual functions of the site stay."""
    settings, unit = _boot_units.FABRIC.settings_path, facts.unit(_boot_units.FABRIC.service)
    kept = _file(settings) != "absent" or unit.load not in _ABSENT
    kept = kept or _host_snapshot.recall(_virtual_functions.RECORD) is not None
    for device in facts.devices.values():
        if device.id in facts.profile["fabric"]["pf_ids"] and not device.physfn:
            state, ok = _made(device, not_given_back=kept)
            expected = "no virtual functions of ours"
            yield Item("fabric_vfs", device.address, expected, state, ok=ok)
    yield _given_back("fabric_vfs", _virtual_functions.RECORD)
    yield _gone("fabric_vfs", settings)
    yield from _service(facts, "fabric_vfs", _boot_units.FABRIC.service)


def _made(device: _pci.Device, *, not_given_back: bool) -> tuple[str, bool]:
    """A card's virtual functions, and whether they are the site's. Their identities decide, because
    the record of the earlier state is deleted when they are given back.
    """
    count = device.sriov_numvfs
    if not count:
        return "no virtual functions", True
    if not_given_back:
        return f"{count} virtual functions, not given back", False
    card = _virtual_functions.card_at(device.address)
    if not card.identities:
        return f"{count} virtual functions, which nothing can name", False
    if card.ours({}):
        return f"{count} virtual functions with identities of ours", False
    return f"{count} virtual functions of the site's own", True


def _ipoib(_facts: Facts) -> Iterator[Item]:
    """The site may have its own file under this name."""
    path = _ipoib_address.FILE
    ours = (_host.kept(path) or "").startswith(_MARKER)
    yield _none("ipoib_netplan", path, ["a file of ours"] if ours else [], "no file of ours")
    yield _given_back("ipoib_netplan", "ipoib")


def _ovs_bridge(facts: Facts) -> Iterator[Item]:
    name = facts.network["bridge"]
    yield _none("ovs_bridge", f"bridge {name}", ["is there"] if name in facts.interfaces else [])


def _dnsmasq(_facts: Facts) -> Iterator[Item]:
    """The slice settings of dnsmasq are gone; a dnsmasq for other purposes may run."""
    yield _gone("dnsmasq", _baseline_files.DNSMASQ)
    yield _none("dnsmasq", "stale reservations", _slice_network.stale_reservations())
    yield _gone("dnsmasq", _baseline_files.RESERVATIONS)


def _nat(facts: Facts) -> Iterator[Item]:
    subnet = facts.network["subnet"]
    try:
        rules = [rule for rule in facts.nat_rules if subnet in rule.split()]
    except Refusal as refusal:
        if refusal.code != "command_missing":
            raise
        # iptables creates the NAT rule, so a machine without iptables cannot have it.
        rules = []
    yield _none("nat", f"rules for {subnet}", rules)
    yield _none("nat", "rules of the host's filter", _host_filter.installed())


def _forwarding(_facts: Facts) -> Iterator[Item]:
    yield _gone("ip_forwarding", _baseline_files.SYSCTL)


def _baseline(facts: Facts) -> Iterator[Item]:
    yield _gone("network_service", _baseline_files.SETTINGS)
    yield _given_back("network_service", "network")
    yield from _service(facts, "network_service", _boot_units.NETWORK.service)
    yield _gone("network_service", _boot_units.TELEMETRY.path)
    yield _gone("network_service", _accounts.principals(_accounts.TELEMETRY))


def _old_baseline(facts: Facts) -> Iterator[Item]:
    yield from _service(facts, "historical_network_service", OLD_BASELINE)


def _tmfifo(facts: Facts) -> Iterator[Item]:
    link, address = _slice_network.TMFIFO, _slice_network.TMFIFO_ADDRESS
    interface = facts.interfaces.get(link)
    there = bool(interface and address in interface.addresses)
    name = f"{address} on {link}"
    yield _none("tmfifo", name, ["is there"] if there else [])


def _tuned(_facts: Facts) -> Iterator[Item]:
    for path in _host_tuning.FILES:
        ours = (_host.kept(path) or "").startswith(_MARKER)
        yield _none("tuning", path, ["a file of ours"] if ours else [], "no file of ours")
    yield _gone("tuning", _host_tuning.OPTED_IN)
    yield _given_back("tuning", "tuning")


def _given_back(check: str, subject: str) -> Item:
    """The host state recorded before slice mode has been restored."""
    left = [] if _host_snapshot.recall(subject) is None else ["not given back"]
    return _none(check, f"{subject} as before", left, "given back")


def _compiled(_facts: Facts) -> Iterator[Item]:
    yield _gone("module_cache", _module_importer.LIBRARY)
    yield _gone("module_cache", str(_module_importer.FOLDER))


def _quiet(_facts: Facts) -> Iterator[Item]:
    yield _given_back("gpu_services_quiesced", "gpu-services")
    # A mask without a record may be the site's. Only this collection creates the drop-in.
    units = _boot_files.UNITS
    folders = _host.matching(units, "*.d")
    barred = [name for name in folders if _host.is_there(f"{units}/{name}/{_gpu_services.BAR}")]
    yield _none("gpu_services_quiesced", "barred services", barred)


def _libvirt_service(_facts: Facts) -> Iterator[Item]:
    yield _given_back("libvirt_service", "libvirt")


def _files(_facts: Facts) -> Iterator[Item]:
    """Every unit, `enable` link or program under this collection's names, whatever wrote it."""
    units, hooks = _boot_files.UNITS, str(PurePosixPath(_object_names.START_HOOK).parent)
    links = [f"{units}/{name}" for name in _host.matching(units, "*.wants")]
    for place, pattern, *more in (
        (units, "gpuaas-slice-*", *links),
        # Files that `systemctl set-property` adds.
        (f"{units}.control", "gpuaas-slice-*"),
        (_boot_files.PROGRAMS, "gpuaas-slice-*"),
        (hooks, "gpuaas-slice*"),
    ):
        left = [name for folder in (place, *more) for name in _host.matching(folder, pattern)]
        yield _none("boot_services", f"{place}/gpuaas-slice-*", sorted(left))
    yield _gone("boot_services", _boot_files.LIBRARY)
    yield _gone("boot_services", _boot_files.RECORD)


def _reboot(facts: Facts) -> Iterator[Item]:
    reasons = list(facts.kernel.reboot_reasons)
    yield _none("reboot_required", "the running kernel", reasons, "as the next boot's")


SLICES: dict[str, Look] = {
    "libvirt": _domains,
    "nvme_ownership": _leases,
    "slice_reservations": _reservations,
    "slice_files": _slice_files,
    "slice_limits": _limits,
}
MODE: dict[str, Look] = {
    "slice_mode": _mode,
    "vfio_binding": _binding,
    "slice_disks": _disks,
    "fabric_vfs": _functions,
    "ipoib_netplan": _ipoib,
    "ovs_bridge": _ovs_bridge,
    "dnsmasq": _dnsmasq,
    "nat": _nat,
    "ip_forwarding": _forwarding,
    "network_service": _baseline,
    "historical_network_service": _old_baseline,
    "tmfifo": _tmfifo,
    "tuning": _tuned,
    "kernel_cmdline": _kernel,
    "vfio_modules": _modules,
    "boot_services": _files,
    "module_cache": _compiled,
    "gpu_services_quiesced": _quiet,
    "libvirt_service": _libvirt_service,
    "reboot_required": _reboot,
}


def _none(check: str, name: str, left: list[str], expected: str = "none") -> Item:
    return Item(check, name, expected, ", ".join(left) or expected, ok=not left)


def _gone(check: str, path: str) -> Item:
    state = _file(path)
    return Item(check, path, "absent", state, ok=state == "absent")


def _file(path: str) -> str:
    return "is there" if _host.is_there(path) else "absent"


def _service(facts: Facts, check: str, name: str) -> Iterator[Item]:
    unit = facts.unit(name)
    there = unit.load not in _ABSENT
    yield Item(check, name, "absent", f"is {unit.active}" if there else "absent", ok=not there)
