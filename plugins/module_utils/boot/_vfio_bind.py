"""Binding of approved PCI functions to vfio-pci, and its removal.

Devices are always bound by address through `driver_override`. Binding by id would take every card
of a model, including the host's own. A device in use is never taken from its driver.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_service,
    _change,
    _command,
    _host,
    _host_mode,
    _ledger,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _tenancy

SETTINGS = "/etc/gpuaas/vfio-binding.json"
_DRIVER = "/sys/bus/pci/drivers/vfio-pci"
# Classes of storage and of network ports.
_OF_HOST = ("01", "02")

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """Inputs of binding.

    devices: by address, the requested and recorded devices, all members of their groups, and the
    physical functions behind virtual functions. users: current users of the devices that would
    change drivers.
    """

    slice_mode: bool
    recorded: Mapping[str, str]
    devices: Mapping[str, _pci.Device]
    users: Mapping[str, tuple[str, ...]]
    leased: Mapping[str, str] = field(default_factory=dict)


def recorded() -> dict[str, str]:
    """Address to `vendor:device` of the devices bound at every boot."""
    again = "run bind_topology again with all approved slots of the node"
    kept = _host.document(SETTINGS, code="binding_record_unreadable", remedy=again) or {}
    devices = kept.get("devices", {})
    if not isinstance(devices, dict):
        raise Refusal(
            "binding_record_unreadable",
            expected=f"JSON with devices in {SETTINGS}",
            found=f"devices {devices!r}"[:200],
            remedy=again,
        )
    return {str(address): str(id_) for address, id_ in devices.items()}


def _recorded_or_new(params: Params) -> dict[str, str]:
    """Recorded devices. A damaged record is overwritten if the caller gives the new content."""
    try:
        return recorded()
    except Refusal:
        if params.get("addresses") and params.get("state", "bound") == "bound":
            return {}
        raise


def observe(params: Params) -> State:
    kept = _recorded_or_new(params)
    addresses = sorted({*params.get("addresses", []), *params.get("devices", {}), *kept})
    there = [address for address in addresses if _pci.present(address)]
    devices = {member.address: member for address in there for member in _pci.group(address)}
    devices.update({a: _pci.read(a) for a in there if a not in devices})
    parents = {d.physfn for d in devices.values() if d.physfn} - set(devices)
    devices.update({a: _pci.read(a) for a in parents if _pci.present(a)})
    state = State(
        slice_mode=_host_mode.is_slice(),
        recorded=kept,
        devices=devices,
        users={},
    )
    # At boot nothing is released, and a damaged entry of one slot takes no device from the others.
    leased = _ledger.leased_gpus() if to_release(params, state) else {}
    return replace(state, users=_all_users(params, state), leased=leased)


def _all_users(params: Params, state: State) -> dict[str, tuple[str, ...]]:
    """Users of the devices that would change drivers; the scan of all processes is expensive."""
    bind = [a for a in to_bind(params, state) if not _is_bound(state.devices.get(a))]
    devices = [state.devices[a] for a in (*bind, *to_release(params, state)) if a in state.devices]
    driven = [device for device in devices if device.driver]
    held = _open_files() if driven else {}
    return {device.address: tuple(_users(device, held)) for device in driven}


def to_bind(params: Params, state: State) -> list[str]:
    """Every address that must end on vfio-pci: requested functions and the other functions of their
    cards.
    """
    if params.get("state", "bound") != "bound":
        return []
    requested = set(params.get("addresses", [])) or set(params.get("devices", {}))
    return sorted(requested | {a for address in requested for a in companions(address, state)})


def companions(address: str, state: State) -> list[str]:
    """The card's other functions in the group: a GPU's audio function goes with the GPU. Ports and
    disks do not, nor the card of a virtual function: they are the host's.
    """
    device = state.devices.get(address)
    if device is None or device.physfn:
        return []
    return [
        other.address
        for other in _members(device, state)
        if other.slot == device.slot
        and other != device
        and not other.is_bridge
        and not other.class_code.startswith(_OF_HOST)
    ]


def _members(device: _pci.Device, state: State) -> list[_pci.Device]:
    """The functions of the device's IOMMU group, itself included; [] without a group."""
    number = device.iommu_group
    return [d for d in state.devices.values() if number is not None and d.iommu_group == number]


def to_release(params: Params, state: State) -> list[str]:
    """Recorded addresses that return to the host's drivers."""
    if params.get("state", "bound") == "bound":
        keep = set(to_bind(params, state))
        return sorted(set(state.recorded) - keep) if params.get("exclusive") else []
    requested = params.get("addresses") or list(state.recorded)
    return sorted({*requested, *(c for a in requested for c in companions(a, state))})


def plan(params: Params, state: State) -> _change.Plan:
    """Plan of a run. A recorded GPU that has failed is a doubt, so that the others are bound."""
    gpu_ids = params.get("gpu_ids", [])
    dead = [a for a in _missing(params, state) if state.recorded.get(a) in gpu_ids]
    return _plan(params, state, dead)


def _plan_others(params: Params, state: State) -> _change.Plan:
    """Plan at boot while devices are waited for: bind those that are there and have no user."""
    used = [a for a in to_bind(params, state) if _busy(a, state)]
    return _plan(params, state, [*_missing(params, state), *used])


def _plan_present(params: Params, state: State) -> _change.Plan:
    """Plan at boot once every device had the time to appear: bind the devices that are present."""
    return _plan(params, state, _missing(params, state))


def _missing(params: Params, state: State) -> list[str]:
    """Devices to bind that the host does not have; [] if it has none of them."""
    bind = to_bind(params, state)
    missing = [address for address in bind if address not in state.devices]
    return missing if len(missing) < len(bind) else []


def _plan(params: Params, state: State, dead: Sequence[str]) -> _change.Plan:
    bind, release = to_bind(params, state), to_release(params, state)
    unfit = {a: _refusal(a, params, state, set(bind)) for a in bind}
    doubts = [refusal for a in dead if (refusal := unfit[a])]
    refusals = [refusal for a, refusal in unfit.items() if a not in dead]
    refusals += [_busy(a, state) for a in release if _is_ours(state.devices.get(a))]
    refusals += [_is_leased(a, state.leased[a]) for a in release if a in state.leased]
    blockers = [refusal for refusal in refusals if refusal is not None]
    if bind and not state.slice_mode:
        blockers.insert(0, _host_mode.not_slice())
    steps = [_binding(state.devices[a]) for a in bind if a in state.devices and a not in dead]
    steps += [_release(state.devices[a]) for a in release if a in state.devices]
    open_steps = tuple(step for step in steps if step.before != step.after)
    return _change.Plan(open_steps, tuple(blockers), tuple(doubts))


def apply(_params: Params, step: _change.Step) -> dict[str, Any]:
    address = step.subject
    if _pci.read(address).driver:
        # The host's driver has used the GPU, or is about to.
        _ledger.distrust_gpu(address)
    if step.name == "bind_device":
        if not _host.path(_DRIVER).is_dir():
            _command.run(["modprobe", "vfio-pci"])
        _pci.override(address, _pci.VFIO)
    else:
        _pci.override(address, "")
        _load_driver(address)
    _pci.unbind(address)
    _pci.probe(address)
    return {"driver": _pci.read(address).driver}


def _load_driver(address: str) -> None:
    """Load the device's driver. If all its devices were claimed at boot, the driver unloaded."""
    alias = _host.read(f"{_pci.DEVICES}/{address}/modalias")
    if alias:
        _command.run(["modprobe", "-q", "-b", "--", alias], ok=(0, 1))


def facts(params: Params, state: State) -> dict[str, Any]:
    return {
        "bound": [
            {
                "address": address,
                "id": state.devices[address].id,
                "driver": state.devices[address].driver,
                "iommu_group": state.devices[address].iommu_group,
                "answers": _pci.answers(address),
            }
            for address in to_bind(params, state)
            if address in state.devices
        ]
    }


# A boot service left by an earlier slice host must take no device from a whole-machine tenant.
LIVE, _OTHERS, _PRESENT = (
    _tenancy.guarded(
        _change.Subject(observe, planning, apply, facts),
        lambda _params, planned: bool(planned.steps),
    )
    for planning in (plan, _plan_others, _plan_present)
)


def boot(settings_path: str) -> int:
    """Bind the recorded devices at boot. On a host without slice mode they stay unbound."""
    if not _host_mode.is_slice():
        return 0
    # Virtual functions and cards behind slow buses may not exist yet, and GPU monitoring holds a
    # device only briefly. Users that stay are reported when the time is over. Meanwhile the other
    # devices are bound, so that the loss of a GPU concerns its own slice only.
    wait_for = ("device_missing", "device_busy")
    failed = _boot_service.boot(LIVE, settings_path, wait_for=wait_for, meanwhile=_OTHERS)
    return failed and _boot_service.boot(_PRESENT, settings_path)


def claim(settings_path: str) -> int:
    """Claim the recorded devices that exist early at boot, so that no host driver takes them.

    A GPU driver that probes the cards first opens them, and must then be made to release them. The
    kernel may bind claimed devices as soon as vfio-pci is loaded; `boot` binds the rest and checks
    all of them.
    """
    return _boot_service.boot(_CLAIM, settings_path) if _host_mode.is_slice() else 0


def _unclaimed(_params: Params) -> list[str]:
    """Recorded devices without a driver_override. A device with a driver keeps it for now."""
    ids = {address: id_ for address, id_ in recorded().items() if _pci.is_address(address)}
    there = [_pci.read(address) for address in sorted(ids) if _pci.present(address)]
    return [
        device.address
        for device in there
        if device.id == ids[device.address]
        and not device.driver
        and device.driver_override != _pci.VFIO
    ]


def _plan_claim(_params: Params, unclaimed: list[str]) -> _change.Plan:
    step = _change.Step("claim_devices", SETTINGS, before=unclaimed, after=[])
    return _change.Plan((step,) if unclaimed else ())


def _apply_claim(_params: Params, step: _change.Step) -> None:
    """Claim every device that allows it, then raise the first refusal."""
    refused: list[Refusal] = []
    for address in step.before:
        try:
            _pci.override(address, _pci.VFIO)
        except Refusal as refusal:
            refused.append(refusal)
    if refused:
        raise refused[0]


# The guard for a whole-machine tenant works only where /var is mounted this early; the slice mode
# guard always works.
_CLAIM = _tenancy.guarded(
    _change.Subject(_unclaimed, _plan_claim, _apply_claim),
    lambda _params, planned: bool(planned.steps),
)


def _refusal(address: str, params: Params, state: State, bind: set[str]) -> Refusal | None:
    device = state.devices.get(address)
    if device is None:
        return _is_missing(address)
    return (
        _wrong_class(device, params, state)
        or _not_viable(device, state, bind)
        or (None if _is_bound(device) else _busy(address, state))
    )


def _is_missing(address: str) -> Refusal:
    return Refusal(
        "device_missing",
        expected=f"the approved PCI function {address}",
        found="no device at this address",
        remedy="rediscover the node; make the fabric functions (bootstrap) before binding",
    )


def _is_leased(address: str, allocation: str) -> Refusal:
    return Refusal(
        "slot_leased",
        expected=f"{address} to be free before it returns to the host's driver",
        found=f"leased by {allocation}, whose machine may be off",
        remedy="name all approved slots of the node, or release that allocation first",
    )


def _wrong_class(device: _pci.Device, params: Params, state: State) -> Refusal | None:
    """Refuse all but a GPU or a virtual function of the profile's fabric; at boot, compare with the
    record.
    """
    recorded_as = dict(params.get("devices", {})).get(device.address)
    requested = device.address in params.get("addresses", [])
    if recorded_as == device.id or not (requested or recorded_as):
        return None
    parent = state.devices.get(device.physfn)
    parent_id = parent.id if parent else ""
    allowed = device.id in params.get("gpu_ids", []) and not device.physfn
    if not device.is_bridge and (allowed or parent_id in params.get("pf_ids", [])):
        return None
    return Refusal(
        "wrong_class",
        expected=f"a GPU or fabric function of the hardware profile at {device.address}",
        found=f"{device.id}, class {device.class_code}"
        + (f", recorded as {recorded_as}" if recorded_as else ""),
        remedy="correct the slot's bundle or the profile's ids; the address may have moved",
    )


def _not_viable(device: _pci.Device, state: State, bind: set[str]) -> Refusal | None:
    members = _members(device, state)
    strangers = [
        f"{m.address} ({m.id}, driver {m.driver})"
        for m in members
        if m.address not in bind and not m.is_bridge and m.driver not in ("", _pci.VFIO)
    ]
    if members and not strangers:
        return None
    text = f"shared with {', '.join(strangers)}" if strangers else "no IOMMU group"
    return Refusal(
        "group_not_viable",
        expected=f"the IOMMU group of {device.address} free of devices that the host drives",
        found=text,
        remedy="enable the IOMMU and ACS in firmware, or take the others from their drivers",
    )


def _busy(address: str, state: State) -> Refusal | None:
    users = state.users.get(address, ())
    if not users:
        return None
    return Refusal(
        "device_busy",
        expected=f"{address} not in use",
        found=", ".join(users),
        remedy="stop its user: a slice VM, a GPU service, a configured interface",
    )


def _binding(device: _pci.Device) -> _change.Step:
    after = {"driver": _pci.VFIO, "driver_override": _pci.VFIO}
    return _change.Step("bind_device", device.address, _now(device), after)


def _release(device: _pci.Device) -> _change.Step:
    before = _now(device)
    if not _is_ours(device):
        return _change.Step("release_device", device.address, before, before)
    after = {"driver": "", "driver_override": ""}
    return _change.Step("release_device", device.address, before, after)


def _now(device: _pci.Device) -> dict[str, str]:
    return {"driver": device.driver, "driver_override": device.driver_override}


def _is_bound(device: _pci.Device | None) -> bool:
    return device is not None and device.driver == _pci.VFIO and device.driver_override == _pci.VFIO


def _is_ours(device: _pci.Device | None) -> bool:
    return device is not None and _pci.VFIO in (device.driver, device.driver_override)


def _users(device: _pci.Device, held: Mapping[str, list[str]]) -> list[str]:
    """Users that would lose the device if its driver released it now."""
    if device.driver == _pci.VFIO:
        return held.get(f"/dev/vfio/{device.iommu_group}", [])
    if device.driver.startswith("nvidia"):
        nvidia = [names for path, names in held.items() if path.startswith("/dev/nvidia")]
        return [who for names in nvidia for who in names]
    cards = _host.path(f"{_pci.DEVICES}/{device.address}/drm")
    nodes = [f"/dev/dri/{entry.name}" for entry in cards.iterdir()] if cards.is_dir() else []
    users = [who for node in nodes for who in held.get(node, [])]
    return users + [u for name in _pci.interfaces(device.address) for u in _interface_users(name)]


def _interface_users(name: str) -> list[str]:
    """Users of a network interface: an address, a master or a VLAN on it means host traffic."""
    folder = f"/sys/class/net/{name}"
    if _host.path(f"{folder}/master").exists():
        return [f"interface {name} belongs to a bridge or bond"]
    if above := [name.removeprefix("upper_") for name in _host.matching(folder, "upper_*")]:
        return [f"interface {name} carries {', '.join(above)}"]
    shown = json.loads(_command.run(["ip", "-j", "address", "show", "dev", name]).out or "[]")
    addresses = [
        f"{info.get('local')}/{info.get('prefixlen')}"
        for link in shown
        for info in link.get("addr_info", [])
        if info.get("scope") == "global"
    ]
    return [f"interface {name} has {', '.join(addresses)}"] if addresses else []


def _open_files() -> dict[str, list[str]]:
    """Open VFIO groups and GPU nodes: path to the processes that hold them."""
    nodes = ("/dev/vfio/", "/dev/nvidia", "/dev/dri/")
    held: dict[str, list[str]] = {}
    for pid, path in sorted({row for row in _host.open_files() if row[1].startswith(nodes)}):
        name = _host.read(f"/proc/{pid}/comm") or "?"
        held.setdefault(path, []).append(f"process {pid} ({name})")
    return held
