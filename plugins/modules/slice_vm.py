#!/usr/bin/python
# Copyright: the gpuaas.slice authors; Apache-2.0 (see LICENSE)
"""The virtual machine of one allocation: running behind a guarded port, stopped, or gone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: slice_vm
short_description: The virtual machine of one allocation behind its guarded port
version_added: "0.1.0"
author: The gpuaas.slice authors (@gpuaas)
description:
  - Defines the libvirt domain, starts it paused, guards its Open vSwitch port with flows, and
    only then lets it run.
  - The guard is kept in C(/var/lib/gpuaas/guards) and restored after a restart of the switch.
  - The guard lets the guest use its own MAC and IPv4 address only. A guest serves no DHCP, sends
    no IPv6, reaches no other slice, and of the host only DHCP, DNS and ping. The host reaches the
    guest by SSH.
  - The port's limits (O(spec.mgmt_qos)) are set before the guest runs too, read back from the
    switch's database, and gone with the VM.
  - Stopping asks the guest first and takes the power away after O(shutdown_deadline).
  - Removing leaves no definition, NVRAM, console log, port or flow behind. The disk is not
    touched.
  - Refuses with C(spec_invalid), C(lease_missing), C(stale_fence), C(domain_differs),
    C(domain_paused), C(domain_crashed), C(domain_busy), C(port_missing), C(qemu_orphan),
    C(domain_not_stopped), C(mgmt_attachment_unsupported).
options:
  allocation_id:
    description: The allocation, a UUID with dashes. Domain and port are named after it.
    type: str
    required: true
  state:
    description: Requested state of the VM. A VM that is C(stopped) keeps its definition.
    type: str
    choices: [running, stopped, absent]
    default: running
  slots:
    description: >-
      The slots with C(slot_id) and C(fence); a fence older than the highest that the host has seen
      is refused.
    type: list
    elements: dict
    default: []
  bridge:
    description: The Open vSwitch bridge.
    type: str
    default: ovsbr0
  bridge_address:
    description: The bridge's own address with prefix length. Required with O(state=running).
    type: str
  ip:
    description: The guest's IPv4 address. Required with O(state=running).
    type: str
  shutdown_deadline:
    description: Seconds that the guest gets to power off by itself.
    type: int
    default: 60
  spec:
    description: Resources of the VM. Required with O(state=running).
    type: dict
    suboptions:
      vcpus: {description: Virtual CPUs., type: int, required: true}
      memory_mib: {description: Memory., type: int, required: true}
      cpus:
        description: Host CPUs, one for each virtual CPU; none lets them float.
        type: list
        elements: int
        default: []
      numa_node:
        description: Where all memory comes from; -1 for anywhere.
        type: int
        default: -1
      firmware: {description: Firmware., type: str, choices: [bios, uefi], default: bios}
      hugepages: {description: Memory from 1 GiB pages., type: bool, default: false}
      nested:
        description: Whether the guest may itself run virtual machines.
        type: bool
        default: false
      gpus: {description: PCI addresses of the GPUs., type: list, elements: str, required: true}
      fabric_vfs:
        description: PCI addresses of the fabric virtual functions.
        type: list
        elements: str
        default: []
      disks:
        description: Paths in /dev/disk/by-id; the first one boots.
        type: list
        elements: str
        required: true
      mac: {description: MAC of the management interface., type: str, required: true}
      mgmt_attachment:
        description: >-
          How the management interface reaches the bridge. V(vf_representor) is refused until the
          embedded switch mode exists.
        type: str
        choices: [tap, vf_representor]
        default: tap
      mgmt_qos:
        description: Rate limit of the management interface in both directions; none is no limit.
        type: dict
        suboptions:
          rate_kbps: {description: 1000 bits a second each way., type: int, required: true}
          burst_kb: {description: 1000 bits that may be sent at once., type: int, required: true}
      seed_path: {description: The cloud-init seed., type: str, default: ""}
      qemu_arguments:
        description: Further QEMU arguments of the hardware profile, never of a tenant.
        type: list
        elements: str
        default: []
extends_documentation_fragment: [gpuaas.slice.change]
"""

EXAMPLES = r"""
- name: Run the VM
  gpuaas.slice.slice_vm:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    slots: "{{ slice_slots }}"
    bridge_address: 10.100.0.1/24
    ip: 10.100.0.10
    spec:
      vcpus: 24
      memory_mib: 65536
      cpus: "{{ lease.bundle.cpus }}"
      numa_node: "{{ lease.bundle.numa_node }}"
      firmware: uefi
      gpus: ["0000:43:00.0"]
      fabric_vfs: ["0000:61:10.1"]
      disks: [/dev/disk/by-id/nvme-eui.5e0000000000a000]
      mac: "52:54:00:64:00:0a"
      seed_path: "{{ lease.bundle.seed_path }}"

- name: Stop and remove it
  gpuaas.slice.slice_vm:
    allocation_id: 23bd713b-6073-4ef7-8a51-2897e902365d
    state: absent
    shutdown_deadline: 120
  register: removed
  # removed.evidence.stop_domain.shutdown is graceful or hard; without that step there was none.
"""

RETURN = r"""
domain:
  description: The domain after the run.
  returned: always
  type: dict
  sample:
    name: gpuaas-slice-23bd713b60734ef78a512897e902365d
    state: running
    port: gs23bd713b6073
    ofport: 3
    flows: 24
    qos: {rate_kbps: 1000000, burst_kb: 100000, shaper: linux-htb, shaped_bps: 1000000000, rows: 1}
    pid: 4711
"""

import re
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows, _guards
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _domain,
    _libvirt,
    _qos,
    _slots,
)

_STUCK = {
    "crashed": ("domain_crashed", "remove the VM (state=absent) after reading its QEMU log"),
    "in shutdown": ("domain_busy", "wait until the guest is off"),
    "suspended": ("domain_busy", "wake the guest, or stop the VM"),
    "no state": ("domain_busy", "look at libvirtd"),
    "paused": ("domain_paused", "read the QEMU log: QEMU stops a guest on disk errors"),
}


@dataclass(frozen=True)
class State:
    """definition: None without a domain. port: number on the bridge, None without one.
    wanted_flows: expected guard of that port. qos: limit of the port. left: files that outlived the
    VM. kept: the guard that the host restores after a restart of the switch.
    """

    life: _libvirt.State | None
    definition: _domain.Description | None
    pids: tuple[int, ...]
    port: int | None
    flows: frozenset[_flows.Flow]
    wanted_flows: frozenset[_flows.Flow]
    held: frozenset[str]
    fences: dict[str, int]
    left: tuple[str, ...]
    qos: _qos.State = _qos.UNLIMITED
    kept: _flows.Guard | None = None

    @property
    def active(self) -> bool:
        return self.life is not None and self.life.active


def observe(params: _change.Params) -> State:
    allocation = params["allocation_id"]
    name = _object_names.domain_name(allocation)
    slots = _slots.checked(params["slots"], needed=("slot_id", "fence"))
    life = _libvirt.states().get(name)
    active = life is not None and life.active
    port = _flows.port_number(_object_names.port_name(allocation))
    flows: frozenset[_flows.Flow] = frozenset()
    held: frozenset[str] = frozenset()
    if params["state"] == "running":
        guard = _guard(params)
        held = frozenset(
            e.disk_identity for e in _ledger.entries() if e.allocation_id == allocation
        )
        if active and port:
            flows = _guard_flows(guard, port)
    files = [
        *(_object_names.nvram_path(allocation), _object_names.guard_path(allocation)),
        *_object_names.console_files(allocation),
    ]
    return State(
        life=life,
        definition=_domain.parse(_libvirt.definition(name)) if life else None,
        pids=tuple(_libvirt.processes(name)),
        port=port,
        flows=_flows.installed(params["bridge"], _object_names.cookie(allocation)),
        wanted_flows=flows,
        held=held,
        fences={str(s["slot_id"]): _ledger.load(str(s["slot_id"])).fence for s in slots},
        left=tuple(path for path in files if _host.path(path).exists()),
        qos=_qos.observe(allocation),
        kept=_guards.saved(allocation),
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    stale = [
        _refuse(
            "stale_fence",
            f"a fence of at least {seen}",
            f"{slot['fence']} for {name}",
            "this run belongs to an older claim: do not retry it",
        )
        for slot in params["slots"]
        if int(slot["fence"]) < (seen := state.fences.get(name := str(slot["slot_id"]), 0))
    ]
    if params["state"] == "running":
        planned = _plan_running(params, state)
    else:
        planned = _plan_off(params, state)
    return _change.Plan(planned.steps, (*stale, *planned.blockers))


def _plan_running(params: _change.Params, state: State) -> _change.Plan:
    domain = _spec(params)
    want = _domain.describe(domain)
    if state.active and state.definition and not state.definition["seed"]:
        # The seed is detached as soon as the guest has read it.
        want["seed"] = ""
    different = _domain.differences(want, state.definition) if state.definition else None
    blockers = [*_unsupported(params), *_obstacles(domain, state, different)]
    steps = []
    if different is None or different:
        before = {key: pair[1] for key, pair in (different or {}).items()} or None
        after = {key: pair[0] for key, pair in (different or {}).items()} or want
        steps.append(_change.Step("define_domain", domain.name, before, after))
    if not state.active:
        steps.append(_change.Step("start_domain", f"{domain.name} power", "off", "paused"))
    unguarded = state.flows != state.wanted_flows or state.kept != _guard(params)
    if not state.active or unguarded:
        before_flows = sorted(flow.text() for flow in state.flows)
        after_flows: Any = sorted(flow.text() for flow in state.wanted_flows)
        after_flows = after_flows or "the guard of the port that it gets"
        steps.append(_change.Step("guard_port", domain.port, before_flows, after_flows))
    limit = _qos.limit(params["spec"].get("mgmt_qos"))
    # A start makes a new port, which has no limit.
    if not state.qos.holds(limit) or (limit and not state.active):
        after_limit = limit.document() if limit else {}
        steps.append(
            _change.Step("limit_port", f"{domain.port} QoS", state.qos.document(), after_limit)
        )
    if not state.active or (state.life and state.life.name == "paused"):
        steps.append(_change.Step("resume_domain", f"{domain.name} CPUs", "stopped", "running"))
    return _change.Plan(tuple(steps), tuple(blockers))


def _unsupported(params: _change.Params) -> list[Refusal]:
    attachment = params["spec"].get("mgmt_attachment") or "tap"
    if attachment == "tap":
        return []
    return [
        _refuse(
            "mgmt_attachment_unsupported",
            "mgmt_attachment tap",
            f"{attachment}, which needs the card's embedded switch mode",
            "set vm.mgmt_attachment of the hardware profile to tap",
        )
    ]


def _obstacles(
    domain: _domain.Domain, state: State, different: dict[str, tuple[Any, Any]] | None
) -> list[Refusal]:
    blockers = []
    if len(state.held) < len(domain.disks):
        text = f"leases of {len(state.held)} disks"
        expected = f"leases of this allocation on {len(domain.disks)} disks"
        blockers.append(
            _refuse("lease_missing", expected, text, "take the slots with slice_lease first")
        )
    life = state.life
    if life is None and state.pids:
        blockers.append(_orphan(domain.name, state.pids))
    if life is None or life.name in ("running", "blocked", "shut off"):
        pass
    elif life.name != "paused" or life.reason not in _libvirt.PAUSED_ON_PURPOSE:
        code, remedy = _STUCK.get(life.name, _STUCK["no state"])
        text = f"{life.name}, reason {life.reason}"
        blockers.append(_refuse(code, f"{domain.name} running or off", text, remedy))
    if state.active and different:
        text = "; ".join(f"{key}: {pair[1]!r}" for key, pair in different.items())
        wish = "; ".join(f"{key}: {pair[0]!r}" for key, pair in different.items())
        blockers.append(_refuse("domain_differs", wish, text, "stop the VM before it is changed"))
    if state.active and not state.port:
        text = "no such port on the bridge"
        blockers.append(
            _refuse("port_missing", f"port {domain.port}", text, "stop and start the VM")
        )
    return blockers


def _plan_off(params: _change.Params, state: State) -> _change.Plan:
    name = _object_names.domain_name(params["allocation_id"])
    port = _object_names.port_name(params["allocation_id"])
    steps, blockers = [], []
    if state.active and state.life:
        steps.append(_change.Step("stop_domain", f"{name} power", state.life.name, "off"))
    elif state.pids:
        blockers.append(_orphan(name, state.pids))
    # It outlives the port and would limit a later VM of this allocation.
    if state.qos.rows:
        steps.append(_change.Step("remove_limit", f"{port} QoS", state.qos.document(), {}))
    if state.port is not None:
        steps.append(_change.Step("remove_port", port, state.port, None))
    # After the port, because the guard of a port that is there would be restored.
    if state.flows:
        flows = sorted(flow.text() for flow in state.flows)
        steps.append(_change.Step("remove_flows", f"{port} flows", flows, []))
    if params["state"] == "absent":
        if state.definition is not None:
            steps.append(_change.Step("undefine_domain", name, state.definition, None))
        if state.left or state.definition is not None:
            steps.append(_change.Step("remove_files", f"{name} files", list(state.left), []))
    return _change.Plan(tuple(steps), tuple(blockers))


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    allocation = params["allocation_id"]
    name, port = _object_names.domain_name(allocation), _object_names.port_name(allocation)
    for slot in params["slots"]:
        _ledger.check(str(slot["slot_id"]), int(slot["fence"]))
    if step.name == "define_domain":
        _libvirt.define(_domain.render(_spec(params)))
    elif step.name == "start_domain":
        # Memory is pinned before the first instruction: the limit grows with the memory to pin.
        spec = params["spec"]
        _mark_dirty(params["slots"])
        _libvirt.start_paused(name, timeout=180 + spec["memory_mib"] / 256 + 60 * len(spec["gpus"]))
    elif step.name == "guard_port":
        number = _flows.await_port(port)
        guard = _guard(params)
        _guards.save(guard)
        _guards.reload_firewall()
        if not _flows.installed(guard.bridge, guard.cookie):
            _flows.forget_connections(number)
        rule = _guards.egress_of(_guards.recorded(), guard)
        count = _flows.install(guard, number, _flows.local_addresses(), rule)
        return {"ofport": number, "flows": count}
    elif step.name == "limit_port":
        _qos.install(allocation, _qos.limit(params["spec"].get("mgmt_qos")))
        return _qos.observe(allocation).document()
    elif step.name == "resume_domain":
        _libvirt.resume(name)
    elif step.name == "stop_domain":
        return _stop(name, step.before, params["shutdown_deadline"])
    else:
        _remove(params, step.name, step.before)
    return None


def _remove(params: _change.Params, name: str, before: Any) -> None:
    """One step of removing the traces of a VM that is off."""
    allocation, bridge = params["allocation_id"], params["bridge"]
    if name == "remove_flows":
        _flows.remove(bridge, _object_names.cookie(allocation))
        for number in sorted({int(n) for n in re.findall(r"in_port=([0-9]+)", str(before))}):
            _flows.forget_connections(number)
    elif name == "remove_limit":
        _qos.install(allocation, None)
    elif name == "remove_port":
        _flows.remove_port(bridge, _object_names.port_name(allocation))
    elif name == "undefine_domain":
        _undefine(_object_names.domain_name(allocation))
    elif name == "remove_files":
        _guards.forget(allocation)
        _guards.reload_firewall()
        _host.remove(_object_names.nvram_path(allocation))
        for path in _object_names.console_files(allocation):
            _host.remove(path)


def _mark_dirty(slots: list[dict[str, Any]]) -> None:
    """A guest may write to each of its disks, also to those without a cloned image."""
    for slot in slots:
        entry = _ledger.load(str(slot["slot_id"]))
        if not entry.dirty:
            _ledger.mark_dirty(
                entry.slot_id, fence=int(slot["fence"]), disk_identity=entry.disk_identity
            )


def _stop(name: str, state: str, deadline: float) -> dict[str, Any]:
    # A paused or crashed guest cannot answer a request.
    graceful = state in ("running", "blocked") and _libvirt.shut_down(name, deadline=deadline)
    if not graceful:
        _libvirt.destroy(name)
    return {"shutdown": "graceful" if graceful else "hard"}


def _undefine(name: str) -> None:
    # A transient domain goes with its QEMU.
    if name in _libvirt.states():
        _libvirt.undefine(name)


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    return {
        "domain": {
            "name": _object_names.domain_name(params["allocation_id"]),
            "state": state.life.name if state.life else "absent",
            "port": _object_names.port_name(params["allocation_id"]),
            "ofport": state.port or 0,
            "flows": len(state.flows),
            "qos": state.qos.document(),
            "pid": state.pids[0] if state.pids else 0,
        }
    }


def _spec(params: _change.Params) -> _domain.Domain:
    options = {**params["spec"], "bridge": params["bridge"]}
    return _domain.from_options(params["allocation_id"], options)


def _guard(params: _change.Params) -> _flows.Guard:
    return _flows.check(
        _flows.Guard(
            allocation_id=params["allocation_id"],
            bridge=params["bridge"],
            mac=params["spec"]["mac"],
            ip=params["ip"],
            address=params["bridge_address"],
        )
    )


def _guard_flows(guard: _flows.Guard, port: int) -> frozenset[_flows.Flow]:
    rule = _guards.egress_of(_guards.recorded(), guard)
    return _flows.rules(guard, port, _flows.local_addresses(), rule)


def _orphan(name: str, pids: tuple[int, ...]) -> Refusal:
    return _refuse(
        "qemu_orphan",
        f"no QEMU of {name} without its domain",
        f"process {', '.join(map(str, pids))}",
        "restart libvirtd so that it finds the process again, or end it by hand",
    )


def _refuse(code: str, expected: str, found: str, remedy: str) -> Refusal:
    return Refusal(code, expected=expected, found=found, remedy=remedy)


def _strings(*, required: bool = False) -> dict[str, Any]:
    spec: dict[str, Any] = {"type": "list", "elements": "str"}
    return {**spec, "required": True} if required else {**spec, "default": []}


SPEC: dict[str, Any] = {
    "vcpus": {"type": "int", "required": True},
    "memory_mib": {"type": "int", "required": True},
    "cpus": {"type": "list", "elements": "int", "default": []},
    "numa_node": {"type": "int", "default": -1},
    "firmware": {"type": "str", "choices": ["bios", "uefi"], "default": "bios"},
    "hugepages": {"type": "bool", "default": False},
    "nested": {"type": "bool", "default": False},
    "gpus": _strings(required=True),
    "fabric_vfs": _strings(),
    "disks": _strings(required=True),
    "mac": {"type": "str", "required": True},
    "mgmt_attachment": {"type": "str", "choices": ["tap", "vf_representor"], "default": "tap"},
    "mgmt_qos": {
        "type": "dict",
        "options": {
            "rate_kbps": {"type": "int", "required": True},
            "burst_kb": {"type": "int", "required": True},
        },
    },
    "seed_path": {"type": "str", "default": ""},
    "qemu_arguments": _strings(),
}
OPTIONS: dict[str, Any] = {
    "allocation_id": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["running", "stopped", "absent"], "default": "running"},
    "slots": {"type": "list", "elements": "dict", "default": []},
    "bridge": {"type": "str", "default": "ovsbr0"},
    "bridge_address": {"type": "str"},
    "ip": {"type": "str"},
    "shutdown_deadline": {"type": "int", "default": 60},
    "spec": {"type": "dict", "options": SPEC},
}


def main() -> None:
    module = AnsibleModule(
        argument_spec=OPTIONS,
        required_if=[("state", "running", ("spec", "ip", "bridge_address"))],
        supports_check_mode=True,
    )
    _change.run(module, _change.Subject(observe, plan, apply, facts))


if __name__ == "__main__":
    main()
