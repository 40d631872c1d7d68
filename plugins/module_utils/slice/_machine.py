"""Domain of one allocation with its guarded port: running, prepared, stopped, or gone.

A domain is started paused, its port is guarded with flows, and only then does it run. A guest asked
to stop gets a deadline, then its power is taken away. A restart first prepares the domain: the plan
of its start, as after the stop, refuses while the guest still runs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows, _guards, _nvlink
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
# Slices whose QEMU logs stay for an operator. A guest can fill that of its slice, up to virtlogd's
# limit of 8 MiB.
_LOGS = 32
# Plans of a start: that of a guest which still runs, and of one that is to run.
_STARTS = ("prepared", "running")


@dataclass(frozen=True)
class State:
    """definition: None without a domain. port: number on the bridge, None without one.
    expected_flows: guard of that port. qos: limit of the port. left: files that outlived the VM.
    kept: the guard that the host restores after a restart of the switch. nvlink: whether the
    partition of the GPUs is active, or why that is unknown; None without a partition, and for a
    guest that is to run and does. admitted: whether libvirt's start hook has the network's settings
    that it needs.
    """

    life: _libvirt.State | None
    definition: _domain.Description | None
    pids: tuple[int, ...]
    port: int | None
    flows: frozenset[_flows.Flow]
    expected_flows: frozenset[_flows.Flow]
    held: frozenset[str]
    entries: dict[str, _ledger.Entry]
    left: tuple[str, ...]
    qos: _qos.State = _qos.UNLIMITED
    kept: _flows.Guard | None = None
    nvlink: bool | Refusal | None = None
    admitted: bool = True

    @property
    def active(self) -> bool:
        return self.life is not None and self.life.active


def observe(params: _change.Params) -> State:
    allocation = params["allocation_id"]
    name = _object_names.domain_name(allocation)
    slots = _slots.checked(params["slots"], needed=("slot_id", "fence"))
    if params["state"] == "running":
        # A stop whose run was lost may take effect after a look, and the start would be none.
        check = partial(_ledger.check_each, params["slots"])
        life, definitions = _libvirt.settled(name, check)
    else:
        life, definitions = _libvirt.described(name)
    active = life is not None and life.active
    port = _flows.port_number(_object_names.port_name(allocation))
    flows: frozenset[_flows.Flow] = frozenset()
    held: frozenset[str] = frozenset()
    if params["state"] in _STARTS:
        guard = _guard(params)
        held = frozenset(
            e.disk_identity for e in _ledger.entries() if e.allocation_id == allocation
        )
        if active and port:
            flows = _guard_flows(guard, port)
    files = [
        *(_object_names.nvram_path(allocation), _object_names.guard_path(allocation)),
        _object_names.nvlink_path(allocation),
        *_object_names.console_files(allocation),
        *_object_names.channel_files(allocation),
    ]
    return State(
        life=life,
        definition=_domain.parse(definitions[0]) if definitions else None,
        pids=tuple(_libvirt.processes(name)),
        port=port,
        flows=_flows.installed(params["bridge"], _object_names.cookie(allocation)),
        expected_flows=flows,
        held=held,
        entries={str(s["slot_id"]): _ledger.load(str(s["slot_id"])) for s in slots},
        left=tuple(path for path in files if _host.path(path).exists()),
        qos=_qos.observe(allocation),
        kept=_guards.saved(allocation),
        nvlink=_nvlink_state(params, active=active),
        admitted=bool(_guards.recorded()) or not _host.path(_object_names.START_HOOK).exists(),
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    rows = ((state.entries[str(slot["slot_id"])], int(slot["fence"])) for slot in params["slots"])
    stale = [refusal for entry, fence in rows for refusal in entry.stale(fence)]
    if params["state"] == "prepared":
        started = _plan_running(params, _after_stop(state))
        define = (step for step in started.steps if step.name == "define_domain")
        planned = _change.Plan(tuple(define), started.blockers)
    elif params["state"] == "running":
        planned = _plan_running(params, state)
    else:
        planned = _plan_off(params, state)
    return _change.Plan(planned.steps, (*stale, *planned.blockers))


def _after_stop(state: State) -> State:
    """The state of a guest that runs as its stop will leave it."""
    if not state.active:
        return state
    life = _libvirt.State("shut off")
    return replace(state, life=life, pids=(), port=None, flows=frozenset(), qos=_qos.UNLIMITED)


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
    if isinstance(state.nvlink, Refusal):
        blockers.append(state.nvlink)
    elif state.nvlink is not None:
        what = f"{domain.name} NVLink"
        steps.append(_change.Step("activate_partition", what, state.nvlink, True))
    if not state.active:
        steps.append(_change.Step("start_domain", f"{domain.name} power", "off", "paused"))
    elif state.life and state.life.stop_requested:
        steps.append(_change.Step("forget_shutdown", f"{domain.name} power", "asked to go off", ""))
    unguarded = state.flows != state.expected_flows or state.kept != _guard(params)
    if not state.active or unguarded:
        before_flows = sorted(flow.text() for flow in state.flows)
        after_flows: Any = sorted(flow.text() for flow in state.expected_flows)
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
        text = f"holds on {len(state.held)} disks"
        expected = f"holds of this allocation on {len(domain.disks)} disks"
        blockers.append(
            _refuse("lease_missing", expected, text, "take the slots with slice_lease first")
        )
    if not (state.active or state.admitted):
        blockers.append(
            _refuse(
                "not_bootstrapped",
                "the network that bootstrap recorded, for libvirt's start hook",
                "no record",
                "run the bootstrap playbook",
            )
        )
    life = state.life
    if life is None and state.pids:
        blockers.append(_orphan(domain.name, state.pids))
    if life is None or life.runs or life.name == "shut off":
        pass
    elif not life.paused_on_purpose:
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
    if state.nvlink:
        before = state.nvlink.code if isinstance(state.nvlink, Refusal) else True
        # A stopped slice keeps its GPUs, and a silent Fabric Manager must not stop a restart of
        # the host.
        soft = params["state"] == "stopped"
        what = f"{name} NVLink"
        steps.append(_change.Step("deactivate_partition", what, before, False, soft=soft))
    if params["state"] == "absent":
        if state.definition is not None:
            steps.append(_change.Step("undefine_domain", name, state.definition, None))
        if state.left or state.definition is not None:
            steps.append(_change.Step("remove_files", f"{name} files", list(state.left), []))
    return _change.Plan(tuple(steps), tuple(blockers))


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    allocation = params["allocation_id"]
    name = _object_names.domain_name(allocation)
    _ledger.check_each(params["slots"])
    if step.name == "define_domain":
        _libvirt.define(_domain.render(_spec(params)))
    elif step.name == "activate_partition" and (partition := _partition(params)):
        # Kept first, so that a release finds what an interrupted start has activated.
        _nvlink.save(allocation, partition)
        return _nvlink.change(partition, active=True)
    elif step.name == "start_domain":
        # Memory is pinned before the first instruction: the limit grows with the memory to pin. A
        # start that is cut off leaves its slot to a person, so it is long: an emulated host needed
        # more than 240 s beside a guest that booted.
        spec = params["spec"]
        limit = 600 + spec["memory_mib"] / 256 + 60 * len(spec["gpus"])
        _mark_dirty(params["slots"])
        # libvirt makes the sockets of the channels, but not their folder, which only root enters.
        _host.path(_object_names.CHANNELS).mkdir(mode=0o700, parents=True, exist_ok=True)
        # libvirt's start hook brings it in force, and refuses a start without it.
        _guards.save(_guard(params))
        _guards.reload_firewall()
        _libvirt.start_paused(name, timeout=limit)
        _end_late_start(name, params["slots"])
    elif step.name == "guard_port":
        return _guard_port(_guard(params), loaded=bool(step.before))
    elif step.name == "limit_port":
        _qos.install(allocation, _qos.limit(params["spec"].get("mgmt_qos")))
        return _qos.observe(allocation).document()
    elif step.name == "forget_shutdown":
        _libvirt.forget_request(name)
    elif step.name == "resume_domain":
        _libvirt.resume(name)
    elif step.name == "stop_domain":
        return _stop(name, step.before, params)
    else:
        _remove(params, step.name)
    return None


def _guard_port(guard: _flows.Guard, *, loaded: bool) -> dict[str, Any]:
    """Keep the guard and bring it in force. loaded: whether the switch had flows of it before."""
    number = _flows.await_port(guard.port)
    # A start has done so before the port was there.
    if _guards.saved(guard.allocation_id) != guard:
        _guards.save(guard)
        _guards.reload_firewall()
    flows = _guard_flows(guard, number)
    # Its flows come last. The start hook or the guardian that has loaded exactly these since then
    # has set the filter and the limits of this port first.
    if loaded or _flows.installed(guard.bridge, guard.cookie) != flows:
        _guards.install(_guards.recorded(), guard, number)
    return {"ofport": number, "flows": len(flows)}


def _remove(params: _change.Params, name: str) -> None:
    """One step of removing the traces of a VM that is off."""
    allocation, bridge = params["allocation_id"], params["bridge"]
    if name == "remove_flows":
        _flows.remove(bridge, _object_names.cookie(allocation))
    elif name == "remove_limit":
        _qos.install(allocation, None)
    elif name == "remove_port":
        _flows.remove_port(bridge, _object_names.port_name(allocation))
    elif name == "deactivate_partition":
        if partition := _nvlink.saved(allocation):
            _nvlink.change(partition, active=False)
    elif name == "undefine_domain":
        _undefine(_object_names.domain_name(allocation))
    elif name == "remove_files":
        _guards.forget(allocation)
        _nvlink.forget(allocation)
        _guards.reload_firewall()
        _host.remove(_object_names.nvram_path(allocation))
        for path in (
            *_object_names.console_files(allocation),
            *_object_names.channel_files(allocation),
        ):
            _host.remove(path)
        _forget_logs()


def _forget_logs() -> None:
    """Delete QEMU's logs of all but the newest slices that are gone. Those that are not have a
    guard.
    """
    present = {_object_names.owner(path) for path in _object_names.files("guard")}
    logs: dict[str, list[str]] = {}
    for path in _object_names.qemu_logs():
        if (owner := _object_names.owner(path)) not in present:
            logs.setdefault(owner, []).append(path)
    newest = sorted(logs.values(), key=lambda paths: max(map(_changed_at, paths)), reverse=True)
    for paths in newest[_LOGS:]:
        for path in paths:
            _host.remove(path)


def _changed_at(path: str) -> float:
    # logrotate may rename a file meanwhile.
    with contextlib.suppress(OSError):
        return float(_host.path(path).stat().st_mtime)
    return 0.0


def _mark_dirty(slots: list[dict[str, Any]]) -> None:
    """A guest may use each of its GPUs and disks, also disks without a cloned image."""
    for slot in slots:
        entry = _ledger.mark_gpu_used(str(slot["slot_id"]), fence=int(slot["fence"]))
        if not entry.dirty:
            _ledger.mark_dirty(
                entry.slot_id, fence=int(slot["fence"]), disk_identity=entry.disk_identity
            )


def _end_late_start(name: str, slots: list[dict[str, Any]]) -> None:
    """End the guest of a start whose successor began meanwhile: a stop may have seen it off. It has
    run nothing yet, unless that successor has resumed it.
    """
    try:
        _ledger.check_each(slots)
    except Refusal as late:
        refusal = late

        def require_paused() -> None:
            life = _libvirt.state(name)
            if life is None or not life.paused_on_purpose:
                raise refusal

        _libvirt.destroy(name, check=require_paused)
        raise


def _stop(name: str, state: str, params: _change.Params) -> dict[str, Any]:
    # While this waits, a later run may stop the guest and start it again.
    check = partial(_ledger.check_each, params["slots"])
    # A paused or crashed guest cannot answer a request.
    graceful = state in _libvirt.RUNNING and _libvirt.shut_down(
        name, deadline=params["shutdown_deadline"], check=check
    )
    if not graceful:
        _libvirt.destroy(name, check=check)
    return {"shutdown": "graceful" if graceful else "hard"}


def _undefine(name: str) -> None:
    # A transient domain goes with its QEMU.
    if _libvirt.state(name):
        _libvirt.undefine(name)


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    return {
        "domain": {
            "name": _object_names.domain_name(params["allocation_id"]),
            "state": state.life.name if state.life else "absent",
            "off_by_guest": state.life is not None and state.life.off_by_guest,
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


def _partition(params: _change.Params) -> _nvlink.Partition | None:
    options, gpus = params["spec"].get("nvlink_partition"), params["spec"]["gpus"]
    partition = _nvlink.partition(options) if options else None
    if partition and len(partition.modules) != len(gpus):
        expected = f"nvlink_partition: a module of each of {len(gpus)} GPUs"
        remedy = "correct gpu.module_ids of the profile"
        raise _refuse("spec_invalid", expected, partition.text, remedy)
    return partition


def _nvlink_state(params: _change.Params, *, active: bool) -> bool | Refusal | None:
    starts = params["state"] in _STARTS
    if params["state"] == "running" and active:
        return None
    try:
        partition = _partition(params) if starts else _nvlink.saved(params["allocation_id"])
        if partition is None:
            return None
        row = _nvlink.require(partition) if starts else _nvlink.find(partition)
    except Refusal as refusal:
        return refusal
    return row is not None and row.active


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
    return _guards.rules_of(_guards.recorded(), guard, port, _flows.local_addresses())


def _orphan(name: str, pids: tuple[int, ...]) -> Refusal:
    return _refuse(
        "qemu_orphan",
        f"no QEMU of {name} without its domain",
        f"process {', '.join(map(str, pids))}",
        "restart libvirtd so that it finds the process again, or end it by hand",
    )


def _refuse(code: str, expected: str, found: str, remedy: str) -> Refusal:
    return Refusal(code, expected=expected, found=found, remedy=remedy)


SUBJECT = _change.Subject(observe, plan, apply, facts)
