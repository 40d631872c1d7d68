#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""Hold of an allocation on approved slots of this host, with its CPUs and memory."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_lease
short_description: Lease approved slots of this host to an allocation, or return them
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Compares each slot bundle with the host before anything is created. PCI functions are there,
    bound to vfio-pci, answering and alone in their IOMMU group; each disk is the approved one by
    the identity that it reports, clean in the host's ledger with a wipe proof that stands, and
    unused; no other domain names any of them; the bridge, CPUs and memory are there.
  - Then writes the holds with their fences into the ledger. A fence lower than the highest seen
    is refused.
  - CPUs are chosen on the NUMA node of the slots, whole cores at a time, and recorded with the
    memory. Slots of several NUMA nodes get their part of both on each of them.
  - One plan is made at a time on a host, so that two never share a CPU or the same memory, also
    while the first VM does not exist yet.
  - Acts only under the boot for which parity was proven (O(boot_id)), and only in slice mode. The
    conversion to bare metal first ends slice mode.
  - While a bare-metal allocation has the machine, no slot of it is leased.
  - Refuses with C(boot_changed), C(not_slice_mode), C(machine_leased), C(bundle_incomplete),
    C(stale_fence), C(slot_leased), C(lease_missing), C(disk_dirty), C(not_clean),
    C(identity_mismatch), C(duplicate_identity), C(disk_in_use), C(os_disk), C(device_missing),
    C(not_bound), C(device_not_answering), C(group_not_viable), C(device_in_use), C(bridge_missing),
    C(cpus_unavailable), C(memory_unavailable), C(hugepages_unavailable), C(domain_present), and
    as the Fabric Manager does.
options:
  allocation_id:
    description: The allocation, a UUID with dashes.
    type: str
    required: true
  slots:
    description: >-
      Approved slot bundles, each with C(slot_id) and C(fence); with O(state=released) nothing
      more is needed.
    type: list
    elements: dict
    required: true
  state:
    description: >-
      Whether the allocation holds the slots. Giving them back needs the domain to be gone.
      C(kept) is C(held) for slots that the allocation already holds under the same fence, and takes
      no other. C(fenced) only raises the fence, so that a late run of an older claim is refused,
      and ends the power fence, so that no run of power of this claim acts any more; it is refused
      itself for slots that another allocation holds.
    type: str
    choices: [held, kept, fenced, released]
    default: held
  boot_id:
    description: >-
      The boot under which this host passed parity, as C(/proc/sys/kernel/random/boot_id) showed
      then. The reconciler passes it; by hand it is C(identity.boot_id) of the parity
      report. Under another boot nothing is leased. Required with O(state=held)
      and O(state=kept).
    type: str
  power_fence:
    description: >-
      Number of a run of power, as in M(gpuaas.slice.slice_vm). One that has a successor is refused
      with O(state=kept).
    type: int
  requirements:
    description: Requirements of the slice VM as a whole. Required as O(boot_id) is.
    type: dict
    suboptions:
      vcpus:
        description: Virtual CPUs; each gets a hardware thread of its own.
        type: int
        required: true
      memory_mib:
        description: Guest memory.
        type: int
        required: true
      hugepages:
        description: Whether the memory comes from 1 GiB pages.
        type: bool
        default: false
      bridge:
        description: The Open vSwitch bridge that the VM is connected to.
        type: str
        default: ovsbr0
      host_cpus:
        description: >-
          CPUs that each NUMA node keeps for the host, the switch and QEMU's own threads, as whole
          cores from the first one on.
        type: int
        default: 0
      shared_cpus:
        description: >-
          Let virtual CPUs float over the host instead of giving each a hardware thread.
        type: bool
        default: false
      nvlink_partition:
        description: >-
          NVLink partition that the start of the VM will activate, as in M(gpuaas.slice.slice_vm).
          The Fabric Manager is asked for it with O(state=held), because a launch that it refuses
          after the clone leaves a blocked slot.
        type: dict
        suboptions:
          modules:
            description: Module of each GPU on the board.
            type: list
            elements: int
            required: true
          address: {description: IPv4 address of the Fabric Manager., type: str}
          socket: {description: Its Unix socket on this host instead., type: str}
seealso:
  - module: gpuaas.slice.slice_lease_info
  - module: gpuaas.slice.baremetal_lease
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Take one slot for an allocation
  gpuaas.slice.slice_lease:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    slots: "{{ slice_slots }}"
    boot_id: 0b0f3b4e-4f0e-4d6a-8f0c-2f6d1f1f7a51
    requirements: {vcpus: 24, memory_mib: 65536, bridge: ovsbr0}
  register: lease

- name: Give it back
  gpuaas.slice.slice_lease:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    slots: "{{ slice_slots }}"
    state: released
"""

RETURN = r"""
bundle:
  description: Resources of the allocation, fully resolved; the boot slot comes first.
  returned: with O(state=held) and O(state=kept)
  type: dict
  sample:
    domain: gpuaas-slice-23bd713b60734ef78a512897e902365d
    port: gs23bd713b6073
    numa_node: 0
    cpus: [2, 3]
    cells:
      - {numa_node: 0, vcpus: 2, cpus: [2, 3], memory_mib: 65536,
         devices: ["0000:43:00.0", "0000:61:10.1"]}
    layout: {threads: 2, topoext: false, emulator_cpus: [0, 1], switches: [], disk_io: io_uring}
    memory_mib: 65536
    hugepages: false
    mac: "52:54:00:64:00:0a"
    ip: 10.100.0.10
    gpus: ["0000:43:00.0"]
    fabric_vfs: ["0000:61:10.1"]
    disks: [/dev/disk/by-id/nvme-eui.5e0000000000a000]
    slots: []
ledger:
  description: The ledger entries of the slots after the run.
  returned: always
  type: list
  elements: dict
domain:
  description: The state of the VM, C(absent) without one.
  returned: always
  type: dict
  sample: {state: running}
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _host_mode,
    _ledger,
    _object_names,
    _pci,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block, _proof
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _nvlink, _slice_network
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _domain,
    _libvirt,
    _pinning,
    _slots,
)

_HOLDING = ("held", "kept")
STATES = [*_HOLDING, "fenced", "released"]


@dataclass(frozen=True)
class State:
    """problems: reasons against the claim. given: resources of the allocation, held or planned."""

    entries: dict[str, _ledger.Entry]
    active: bool
    life: _libvirt.State | None
    recorded: dict[str, Any] | None = None
    disks: dict[str, _block.Disk] = field(default_factory=dict)
    problems: tuple[Refusal, ...] = ()
    given: dict[str, Any] = field(default_factory=dict)


def observe(params: _change.Params) -> State:
    allocation = params["allocation_id"]
    name = _object_names.domain_name(allocation)
    held = params["state"] in _HOLDING
    if held:
        _slots.require_boot(params["boot_id"])
    needed = {} if held else {"needed": ("slot_id", "fence")}
    slots = _slots.checked(params["slots"], **needed)
    if params.get("power_fence") is not None:
        _ledger.check_each({**slot, "power_fence": params["power_fence"]} for slot in slots)
    everyone = _libvirt.states() if held else {}
    domain = everyone.get(name) if held else _libvirt.state(name)
    pids = list(_libvirt.processes(name))
    entries = {str(slot["slot_id"]): _ledger.load(str(slot["slot_id"])) for slot in slots}
    state = State(
        entries=entries,
        active=bool(domain and domain.active) or bool(pids),
        life=domain,
        recorded=_pinning.recorded(allocation),
    )
    if not held:
        return state
    names = [other for other in everyone if other != name]
    others = {o: _domain.parse(xml) for o, xml in _libvirt.definitions(names).items()}
    disks: dict[str, _block.Disk] = {}
    problems = _not_for_slices(allocation)
    partition = params["requirements"].get("nvlink_partition")
    if partition and params["state"] == "held":
        problems += _nvlink.refusals(partition)
    for slot in slots:
        entry = entries[str(slot["slot_id"])]
        disk, trouble = _block.judged(slot, own_pids=pids)
        if disk is not None:
            disks[entry.slot_id] = disk
            trouble += _unproven(entry, disk)
        passed = _slots.passthrough(_slots.addresses(slot), own_pids=pids)
        rest = [*entry.refusals(allocation, int(slot["fence"])), *_claimed(slot, others)]
        problems += [*rest, *trouble, *passed]
    pins = [pin for other in others.values() for pin in other["pins"]]
    taken = {cpu for pin in pins for cpu in _host.numbers(pin)}
    given, lacking = _given(params, slots, taken, state)
    return State(
        entries=entries,
        active=state.active,
        life=state.life,
        recorded=state.recorded,
        disks=disks,
        problems=(*problems, *lacking),
        given=given,
    )


def _not_for_slices(allocation: str) -> list[Refusal]:
    """Refusals when the host is not for slices: converted, or leased as a whole."""
    outside = [] if _host_mode.is_slice() else [_host_mode.not_slice()]
    return [*outside, *_ledger.machine_taken(allocation)]


def _unproven(entry: _ledger.Entry, disk: _block.Disk) -> list[Refusal]:
    """Reasons why the slot's disk does not count as wiped (I5)."""
    # The entry's own refusals cover a dirty slot: it belongs to this claim, or is `disk_dirty`.
    if entry.dirty or _proof.standing(disk.disk_identity) is not None:
        return []
    return [
        Refusal(
            "not_clean",
            expected=f"a wipe proof of {disk.disk_identity} in slot {entry.slot_id}"
            " that still stands",
            found="no proof, or the disk was marked dirty since",
            remedy="wipe the slot's disk first (`gpuaas recover`, or nvme_wipe by hand)",
        )
    ]


def _claimed(slot: _slots.Slot, others: dict[str, _domain.Description]) -> list[Refusal]:
    """Parts of the slot that another domain's definition names."""
    parts = {*_slots.addresses(slot), str(slot["nvme_device"])}
    return [
        _slots.unfit("device_in_use", ", ".join(sorted(shared)), "free", f"in the domain {name}")
        for name, description in others.items()
        if (shared := parts.intersection([*description["hostdevs"], *description["disks"]]))
    ]


def _given(
    params: _change.Params, slots: list[_slots.Slot], taken: set[int], state: State
) -> tuple[dict[str, Any], list[Refusal]]:
    """CPUs, memory node and the other resolved values, and refusals for those that are lacking."""
    allocation, requirements = params["allocation_id"], params["requirements"]
    gpus = [str(slot["gpu_pci_address"]) for slot in slots]
    cells, lacking = _cells(params, slots, taken, state)
    layout = _layout(params, slots, cells)
    if requirements["hugepages"] and requirements["memory_mib"] % 1024:
        memory = f"{requirements['memory_mib']} MiB"
        lacking.append(_object_names.invalid("memory_mib", "whole pages of 1 GiB", memory))
    for cell in cells if not _has_memory(params, state) else ():
        pages, place = requirements["hugepages"], _place(cell)
        promised = _pinning.memory_promised_mib(place, hugepages=pages, except_for=allocation)
        free = _pinning.memory_free_mib(place, hugepages=pages)
        if free - promised < cell["memory_mib"]:
            what = "hugepages" if pages else "memory"
            text = f"{cell['memory_mib']} MiB free"
            shortage = f"{free} MiB, of which {promised} MiB are promised to other slices"
            lacking.append(_lacking(what, text, place, shortage))
    if requirements["bridge"] not in _slice_network.bridges():
        lacking.append(
            _lacking("bridge", f"the bridge {requirements['bridge']}", None, "no such bridge")
        )
    functions = [str(slot.get("fabric_vf_pci_address") or "") for slot in slots]
    functions = [address for address in functions if address]
    boot = slots[0]
    given = {
        "domain": _object_names.domain_name(allocation),
        "port": _object_names.port_name(allocation),
        "seed_path": _object_names.seed_path(allocation),
        "numa_node": cells[0]["numa_node"] if len(cells) == 1 else -1,
        "cpus": [cpu for cell in cells for cpu in cell["cpus"]],
        "cells": cells,
        "layout": layout,
        "memory_mib": requirements["memory_mib"],
        "hugepages": requirements["hugepages"],
        "mac": str(boot.get("management_mac", "")),
        "ip": str(boot.get("private_ip", "")),
        "gpus": gpus,
        "fabric_vfs": functions,
        "disks": [str(slot["nvme_device"]) for slot in slots],
    }
    return given, lacking


def _has_memory(params: _change.Params, state: State) -> bool:
    """Whether the guest that runs has the memory already. After a change of the profile its next
    start takes pages of another kind.
    """
    if not (state.active and state.life and state.life.active):
        return state.active
    live = _libvirt.definition(_object_names.domain_name(params["allocation_id"]), live=True)
    return bool(_domain.parse(live)["hugepages"] == params["requirements"]["hugepages"])


def _cells(
    params: _change.Params, slots: list[_slots.Slot], taken: set[int], state: State
) -> tuple[list[dict[str, Any]], list[Refusal]]:
    """The slice's part on each NUMA node of its GPUs, and refusals for CPUs that are lacking.

    With a GPU of an unknown node there is a single part, of the whole host.
    """
    requirements = params["requirements"]
    homes = [_numa_node(slot) for slot in slots]
    if -1 in homes:
        homes = [-1] * len(slots)
    nodes = list(dict.fromkeys(homes))
    weights = [homes.count(node) for node in nodes]
    # Pages of 1 GiB are not divided.
    unit = 1024 if requirements["hugepages"] else 1
    memory = _pinning.shares(requirements["memory_mib"] // unit, weights)
    vcpus = _pinning.shares(requirements["vcpus"], weights)
    earlier = {cell["numa_node"]: cell for cell in (state.recorded or {}).get("cells", ())}
    cells, lacking = [], []
    for node, count, part in zip(nodes, vcpus, memory, strict=True):
        devices = [
            a
            for s, home in zip(slots, homes, strict=True)
            if home == node
            for a in _slots.addresses(s)
        ]
        cell = {"numa_node": node, "vcpus": count, "memory_mib": part * unit, "devices": devices}
        cpus: list[int] = list(earlier.get(node, {}).get("cpus", ()))
        if requirements["shared_cpus"]:
            cpus = []
        elif len(cpus) != count:
            busy = taken | _pinning.taken(params["allocation_id"])
            _kept, usable = _pinning.reserve(
                _pinning.cores(_place(cell)), requirements["host_cpus"]
            )
            cpus = _pinning.choose(usable, busy, count)
            if not cpus:
                lacking.append(_lacking("cpus", f"{count} free CPUs", _place(cell), "fewer"))
        cells.append({**cell, "cpus": cpus})
    return cells, lacking


def _layout(
    params: _change.Params, slots: list[_slots.Slot], cells: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the guest is shown of the host: threads of a core, and devices below one switch.

    emulator_cpus: CPUs of the host for QEMU's own threads, none without CPUs kept for the host.
    """
    threads, emulator = set(), []
    for cell in cells:
        cores = _pinning.cores(_place(cell))
        threads.add(_pinning.threads(cores, cell["cpus"]))
        kept, _usable = _pinning.reserve(cores, params["requirements"]["host_cpus"])
        emulator += [cpu for core in kept for cpu in core]
    below: dict[str, list[str]] = {}
    for address in (address for slot in slots for address in _slots.addresses(slot)):
        # A root port, the upstream port of a switch, and more ports down to the device.
        path = _pci.path(address) if _pci.present(address) else []
        bridges = [step for step in path if _pci.is_address(step)]
        if len(bridges) > 2:
            below.setdefault(bridges[1], []).append(address)
    width = threads.pop() if len(threads) == 1 else 1
    return {
        "threads": width,
        # Only AMD's processors have this flag.
        "topoext": width > 1 and _domain.TOPOEXT in (_host.read("/proc/cpuinfo") or "").split(),
        "emulator_cpus": emulator if cells[0]["cpus"] else [],
        "switches": [devices for devices in below.values() if len(devices) > 1],
        "disk_io": _libvirt.disk_io(),
    }


def _numa_node(slot: _slots.Slot) -> int:
    address = str(slot["gpu_pci_address"])
    return _pci.read(address).numa_node if _pci.present(address) else -1


def _place(cell: dict[str, Any]) -> int | None:
    node: int = cell["numa_node"]
    return None if node < 0 else node


def plan(params: _change.Params, state: State) -> _change.Plan:
    if params["state"] == "released":
        return _plan_release(params, state)
    if params["state"] == "fenced":
        return _plan_fence(params, state)
    allocation = params["allocation_id"]
    steps = []
    if state.recorded != state.given:
        steps.append(_change.Step("record_plan", "host plan", state.recorded, state.given))
    for slot in params["slots"]:
        entry = state.entries[str(slot["slot_id"])]
        disk = state.disks.get(entry.slot_id)
        after = {"allocation_id": allocation, "fence": int(slot["fence"])}
        after["disk"] = disk.disk_identity if disk else ""
        before = {key: entry.document()[key] for key in after}
        if before != after:
            steps.append(_change.Step("hold_slot", entry.slot_id, before, after))
    missing = _not_kept(params, state) if params["state"] == "kept" else []
    return _change.Plan(tuple(steps), (*missing, *state.problems))


def _not_kept(params: _change.Params, state: State) -> list[Refusal]:
    """Refusals for slots without a lease of this claim: a release may have ended it."""
    blockers = []
    for slot in params["slots"]:
        entry = state.entries[str(slot["slot_id"])]
        if (entry.allocation_id, entry.fence) != (params["allocation_id"], int(slot["fence"])):
            blockers.append(
                Refusal(
                    "lease_missing",
                    expected=f"slot {entry.slot_id} leased to {params['allocation_id']} under"
                    f" fence {slot['fence']}",
                    found=f"{entry.allocation_id or 'no lease'}, fence {entry.fence}",
                    remedy="this run belongs to a claim that has ended: do not retry it",
                )
            )
    return blockers


def _plan_fence(params: _change.Params, state: State) -> _change.Plan:
    steps = []
    for slot in params["slots"]:
        entry, fence = state.entries[str(slot["slot_id"])], int(slot["fence"])
        powered = entry.allocation_id and entry.power_fence != _ledger.NO_POWER
        if entry.fence < fence or powered:
            steps.append(_change.Step("raise_fence", entry.slot_id, entry.fence, fence))
    # The records may be older than this host: what would be removed and wiped is another tenant's.
    others = [
        _ledger.not_its_holder(entry, params["allocation_id"])
        for entry in state.entries.values()
        if entry.allocation_id not in ("", params["allocation_id"])
    ]
    return _change.Plan(tuple(steps), (*_stale(params["slots"], state), *others))


def _plan_release(params: _change.Params, state: State) -> _change.Plan:
    allocation = params["allocation_id"]
    blockers = [*_stale(params["slots"], state)]
    mine = [entry for entry in state.entries.values() if entry.allocation_id == allocation]
    steps = [
        _change.Step("release_slot", entry.slot_id, {"allocation_id": allocation}, {})
        for entry in mine
    ]
    if state.recorded is not None:
        steps.append(_change.Step("forget_plan", "host plan", state.recorded, None))
    if steps and (state.life or state.active):
        blockers.append(
            Refusal(
                "domain_present",
                expected=f"no domain or QEMU of allocation {allocation}",
                found=_object_names.domain_name(allocation),
                remedy="remove the VM first (slice_vm with state=absent)",
            )
        )
    return _change.Plan(tuple(steps), tuple(blockers))


def _stale(slots: list[_slots.Slot], state: State) -> list[Refusal]:
    rows = ((state.entries[str(slot["slot_id"])], int(slot["fence"])) for slot in slots)
    return [refusal for entry, fence in rows for refusal in entry.stale(fence)]


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    allocation = params["allocation_id"]
    fences = {str(slot["slot_id"]): int(slot["fence"]) for slot in params["slots"]}
    if step.name == "record_plan":
        _pinning.record(allocation, step.after)
    elif step.name == "hold_slot":
        _ledger.hold(
            step.subject,
            fence=fences[step.subject],
            allocation_id=allocation,
            disk_identity=step.after["disk"],
        )
    elif step.name == "raise_fence":
        _ledger.end_power(step.subject, fence=fences[step.subject])
    elif step.name == "release_slot":
        _ledger.release(step.subject, fence=fences[step.subject])
    elif step.name == "forget_plan":
        _pinning.forget(allocation)
    return None


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    ledger = [entry.document() for entry in state.entries.values()]
    domain = {"state": state.life.name if state.life else "absent"}
    seen = {"ledger": ledger, "domain": domain}
    if params["state"] not in _HOLDING:
        return seen
    slots = [_resolved(slot, state) for slot in _slots.checked(params["slots"])]
    return {**seen, "bundle": {**state.given, "slots": slots}}


def _resolved(slot: _slots.Slot, state: State) -> dict[str, Any]:
    disk = state.disks.get(str(slot["slot_id"]))
    groups = {a: _pci.read(a).iommu_group for a in _slots.addresses(slot) if _pci.present(a)}
    return {
        **slot,
        "kernel_device": f"/dev/{disk.kernel_name}" if disk else "",
        "disk": disk.disk_identity if disk else "",
        "iommu_groups": groups,
    }


def exclusive(params: _change.Params) -> AbstractContextManager[None]:
    """Plans are made one at a time: resources that a plan takes are recorded before the next plan.
    A fence takes none, and must not wait for a plan that a dead disk holds up.
    """
    return nullcontext() if params["state"] == "fenced" else _pinning.locked()


SUBJECT = _change.Subject(observe, plan, apply, facts, exclusive=exclusive)


def _lacking(what: str, expected: str, node: int | None, found: str) -> Refusal:
    where = "" if node is None else f" on NUMA node {node}"
    code = "bridge_missing" if what == "bridge" else f"{what}_unavailable"
    return Refusal(
        code,
        expected=expected + where,
        found=found,
        remedy="read the node's parity report; choose other slots or a smaller profile",
    )


def main() -> None:
    requirements = {
        "vcpus": {"type": "int", "required": True},
        "memory_mib": {"type": "int", "required": True},
        "hugepages": {"type": "bool", "default": False},
        "bridge": {"type": "str", "default": "ovsbr0"},
        "host_cpus": {"type": "int", "default": 0},
        "shared_cpus": {"type": "bool", "default": False},
        "nvlink_partition": _nvlink.OPTION,
    }
    module = AnsibleModule(
        argument_spec={
            "allocation_id": {"type": "str", "required": True},
            "slots": {"type": "list", "elements": "dict", "required": True},
            "state": {"type": "str", "choices": STATES, "default": "held"},
            "boot_id": {"type": "str"},
            "power_fence": {"type": "int"},
            "requirements": {"type": "dict", "options": requirements},
        },
        required_if=[("state", state, ("boot_id", "requirements")) for state in _HOLDING],
        supports_check_mode=True,
    )
    _change.run(module, SUBJECT)


if __name__ == "__main__":
    main()
