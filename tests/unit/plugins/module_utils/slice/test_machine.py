"""Plan of a VM from each of its possible states, and the execution of the plan."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _firewall,
    _flows,
    _guards,
    _start_hook,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _domain,
    _libvirt,
    _machine,
    _qos,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice._libvirt import State as Life
from ansible_collections.gpuaas.slice.plugins.modules import slice_vm_info

from tests.unit.plugins import fabric_manager
from tests.unit.plugins.fabric_manager import FabricManager
from tests.unit.plugins.fake_switch import FakeSwitch

pytestmark = pytest.mark.covers("SLICE-4")
manager = fabric_manager.manager

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
NAME = _domain.domain_name(ONE)
SPEC: dict[str, Any] = {
    "vcpus": 1,
    "memory_mib": 768,
    "cpus": [1],
    "numa_node": 1,
    "firmware": "uefi",
    "hugepages": False,
    "gpus": ["0000:43:00.0"],
    "fabric_vfs": [],
    "disks": ["/dev/disk/by-id/nvme-eui.5e0000000000a003"],
    "mac": "52:54:00:64:00:0d",
    "seed_path": "",
    "qemu_arguments": [],
}
PARAMS: dict[str, Any] = {
    "allocation_id": ONE,
    "state": "running",
    "slots": [{"slot_id": "slot-3", "fence": 7}],
    "bridge": "ovsbr0",
    "bridge_address": "10.100.0.1/24",
    "ip": "10.100.0.13",
    "shutdown_deadline": 60,
    "spec": SPEC,
}
FLOWS = frozenset({_flows.Flow(10, 10, frozenset({"in_port=5"}), "drop")})
GUARD = _flows.Guard(ONE, "ovsbr0", SPEC["mac"], PARAMS["ip"], PARAMS["bridge_address"])
NETWORK = {
    "bridge": "ovsbr0",
    "address": "10.100.0.1/24",
    "subnet": "10.100.0.0/24",
    "denied_networks": ["203.0.113.0/24"],
}
WANT = _domain.describe(_machine._spec(PARAMS))
NOTHING = _machine.State(
    life=None,
    definition=None,
    pids=(),
    port=None,
    flows=frozenset(),
    expected_flows=frozenset(),
    held=frozenset({"eui.5e0000000000a003"}),
    entries={"slot-3": _ledger.Entry("slot-3", fence=7)},
    left=(),
)
RUNNING = replace(
    NOTHING,
    life=Life("running"),
    definition=WANT,
    pids=(9,),
    port=5,
    flows=FLOWS,
    expected_flows=FLOWS,
    kept=GUARD,
)
LOGS = "/var/log/libvirt/qemu"
LIMIT = {"rate_kbps": 1000, "burst_kb": 100}
LIMITED = _qos.State((1000, 100), ("linux-htb", "1000000", "row"), ("row",))
START = ["start_domain", "guard_port", "resume_domain"]


def steps(state: _machine.State, /, **params: Any) -> list[str]:
    plan = _machine.plan({**PARAMS, **params}, state)
    assert plan.blockers == ()
    return [step.name for step in plan.steps]


def codes(state: _machine.State, /, **params: Any) -> list[str]:
    return [blocker.code for blocker in _machine.plan({**PARAMS, **params}, state).blockers]


def test_from_nothing_the_guest_runs_only_behind_its_guard() -> None:
    assert steps(NOTHING) == ["define_domain", *START]


def test_a_running_vm_needs_nothing() -> None:
    assert steps(RUNNING) == []


def test_a_vm_that_shut_itself_down_is_started_again() -> None:
    assert steps(replace(NOTHING, life=Life("shut off"), definition=WANT)) == START


def test_an_interrupted_start_is_finished() -> None:
    state = replace(RUNNING, life=Life("paused", 1), flows=frozenset())
    assert steps(state) == ["guard_port", "resume_domain"]


def test_a_guard_that_was_lost_is_put_back() -> None:
    assert steps(replace(RUNNING, flows=frozenset())) == ["guard_port"]
    # The flows are there, but the host would not restore them, or others.
    assert steps(replace(RUNNING, kept=None)) == ["guard_port"]
    assert steps(replace(RUNNING, kept=replace(GUARD, ip="10.100.0.14"))) == ["guard_port"]


@pytest.mark.covers("HOST-7")
def test_a_limit_holds_before_the_guest_runs_and_is_kept() -> None:
    spec = {**SPEC, "mgmt_qos": LIMIT}
    assert steps(NOTHING, spec=spec)[1:] == [*START[:2], "limit_port", "resume_domain"]
    # The limit that an earlier VM left behind does not apply to the port of this VM.
    assert "limit_port" in steps(replace(NOTHING, qos=LIMITED), spec=spec)
    assert steps(replace(RUNNING, qos=LIMITED), spec=spec) == []
    assert steps(RUNNING, spec=spec) == ["limit_port"]
    assert steps(replace(RUNNING, qos=LIMITED)) == ["limit_port"]


@pytest.mark.covers("HOST-7")
def test_a_limit_goes_before_its_port_and_without_it() -> None:
    both = ["stop_domain", "remove_limit", "remove_port", "remove_flows"]
    assert steps(replace(RUNNING, qos=LIMITED), state="stopped") == both
    assert steps(replace(NOTHING, qos=_qos.State(rows=("row",))), state="absent") == [
        "remove_limit"
    ]


@pytest.mark.covers("HOST-7")
def test_an_attachment_that_does_not_exist_is_refused_by_name() -> None:
    spec = {**SPEC, "mgmt_attachment": "vf_representor"}
    assert codes(NOTHING, spec=spec) == ["mgmt_attachment_unsupported"]
    # A running VM is released all the same.
    assert codes(RUNNING, spec=spec, state="absent") == []


def test_another_definition_is_replaced_only_while_off() -> None:
    changed = {**WANT, "memory_mib": 1}
    assert steps(replace(NOTHING, life=Life("shut off"), definition=changed))[0] == "define_domain"
    assert codes(replace(RUNNING, definition=changed)) == ["domain_differs"]


@pytest.mark.parametrize(
    ("life", "code"),
    [
        (Life("paused", 5), "domain_paused"),
        (Life("crashed"), "domain_crashed"),
        (Life("in shutdown"), "domain_busy"),
        (Life("state 42"), "domain_busy"),
    ],
)
def test_a_stuck_vm_is_reported(life: Life, code: str) -> None:
    assert code in codes(replace(RUNNING, life=life))


def test_other_obstacles() -> None:
    assert codes(replace(NOTHING, held=frozenset())) == ["lease_missing"]
    assert codes(replace(NOTHING, pids=(9,))) == ["qemu_orphan"]
    assert codes(replace(RUNNING, port=None)) == ["port_missing"]
    assert codes(replace(RUNNING, entries={"slot-3": _ledger.Entry("slot-3", fence=8)})) == [
        "stale_fence"
    ]


@pytest.mark.covers("SLICE-6")
def test_removal_ends_with_the_files() -> None:
    assert steps(RUNNING, state="absent") == [
        "stop_domain",
        "remove_port",
        "remove_flows",
        "undefine_domain",
        "remove_files",
    ]
    assert steps(NOTHING, state="absent") == []
    assert steps(replace(NOTHING, left=("/x",)), state="absent") == ["remove_files"]


def test_stopping_keeps_the_definition_but_no_flow() -> None:
    assert steps(RUNNING, state="stopped") == ["stop_domain", "remove_port", "remove_flows"]
    off = replace(NOTHING, life=Life("shut off"), definition=WANT, flows=FLOWS)
    assert steps(off, state="stopped") == ["remove_flows"]


def test_a_qemu_without_a_domain_is_never_called_absent() -> None:
    assert codes(replace(NOTHING, pids=(9,)), state="absent") == ["qemu_orphan"]
    assert codes(
        replace(RUNNING, entries={"slot-3": _ledger.Entry("slot-3", fence=8)}), state="absent"
    ) == ["stale_fence"]


# Connections that the start hook forgets: those of the port in the switch, and the host's own.
STARTED = ["zone=5", f"--orig-src {GUARD.ip}", f"--reply-src {GUARD.ip}"]


class Host:
    """Libvirt, and the switch with its guards, as far as the module can observe them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.acts: list[str] = []
        self.xml = ""
        self.life: Life | None = None
        self.switch = FakeSwitch()
        self.switch.add_bridge()
        self.flushed: list[str] = []
        self.stubborn, self.hooked = False, True
        self.qos = _qos.State()
        for name in ("define", "start_paused", "resume", "shut_down", "destroy", "undefine"):
            monkeypatch.setattr(_libvirt, name, getattr(self, name))
        monkeypatch.setattr(_libvirt, "states", lambda: {NAME: self.life} if self.life else {})
        monkeypatch.setattr(_libvirt, "state", lambda _name: self.life)
        monkeypatch.setattr(_libvirt, "definition", lambda _name: self.xml)
        monkeypatch.setattr(_libvirt, "described", self.described)
        monkeypatch.setattr(_command, "run", self.run)
        monkeypatch.setattr(_qos, "observe", lambda _allocation: self.qos)
        monkeypatch.setattr(_qos, "install", self.limit)

    def run(self, argv: list[str], **more: Any) -> _command.Result:
        """A program of the switch; calls whose order matters are noted."""
        if argv[0] == "bash":
            return fabric_manager.RUN(argv, **more)
        if "--bundle" in argv and "add cookie" in more["stdin"]:
            self.acts.append("guard")
        elif "--bundle" in argv:
            assert self.port() is None, "the guard of a port that is there would be restored"
        if argv[-2] == "dpctl/flush-conntrack":
            self.flushed.append(argv[-1])
        if argv[0] == "ss":
            return _command.Result(0, "", "")
        if argv[:2] == ["conntrack", "-D"]:
            self.flushed.append(" ".join(argv[2:]))
            return _command.Result(1, "", "")
        return self.switch.run(argv, **more)

    def described(self, _name: str) -> tuple[Life | None, list[str]]:
        return self.life, [self.xml] if self.life else []

    def port(self) -> int | None:
        return self.switch.bridges["ovsbr0"].get(GUARD.port)

    @property
    def flows(self) -> frozenset[_flows.Flow]:
        return _flows.installed("ovsbr0", GUARD.cookie)

    def define(self, xml: str) -> None:
        self.acts.append("define")
        # For a running guest it takes effect at the next start.
        self.xml, self.life = xml, self.life or Life("shut off")

    def start_paused(self, _name: str, *, timeout: float) -> None:
        self.acts.append("start")
        assert timeout > 180
        self.life = Life("paused", 1)
        self.switch.bridges["ovsbr0"][GUARD.port] = 5
        # libvirt gives up the start when its hook fails.
        acts = list(self.acts)
        assert not self.hooked or _start_hook.start(NAME, self.xml) == 0
        self.acts = acts

    def limit(self, _allocation: str, requested: _qos.Limit | None) -> None:
        self.acts.append("limit")
        assert requested is None or self.port(), "there is no port to limit yet"
        self.qos = LIMITED if requested else _qos.State()

    def resume(self, _name: str) -> None:
        self.acts.append("resume")
        assert self.flows, "a guest must not run before its port is guarded"
        assert _guards.saved(ONE) == GUARD, "a guard that no restart of the switch outlives"
        firewall = _firewall.installed() or ""
        assert GUARD.mac in firewall, "a guest that the firewall lets have no address"
        self.life = Life("running")

    def shut_down(self, _name: str, *, deadline: float, check: Callable[[], object]) -> bool:
        check()
        self.acts.append("shut_down")
        if not self.stubborn:
            self.life = Life("shut off")
        return not self.stubborn

    def destroy(self, _name: str, *, check: Callable[[], object]) -> None:
        check()
        self.acts.append("destroy")
        self.life = Life("shut off")

    def undefine(self, _name: str) -> None:
        self.acts.append("undefine")
        self.life = None


@pytest.fixture
def host(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    disk = "eui.5e0000000000a003"
    _ledger.hold("slot-3", fence=7, allocation_id=ONE, disk_identity=disk)
    _host.write(_baseline_files.SETTINGS, json.dumps(_baseline_files.settings(NETWORK)))
    return Host(monkeypatch)


def drive(params: dict[str, Any], *, check_mode: bool = False) -> _change.Outcome:
    outcome = _change.drive(_machine.SUBJECT, params, check_mode=check_mode)
    assert outcome.failure is None, str(outcome.failure)
    return outcome


def test_start_and_start_again(host: Host) -> None:
    assert drive(PARAMS, check_mode=True).changed
    assert host.acts == []
    first = drive(PARAMS)
    # The start hook has loaded the guard.
    assert host.acts == ["define", "start", "resume"]
    assert first.facts["domain"]["state"] == "running"
    assert first.evidence["guard_port"]["flows"] == first.facts["domain"]["flows"] > 20
    assert first.evidence["guard_port"]["ofport"] == 5
    # With the site's rule, as bootstrap recorded it.
    rule = _flows.Egress(denied=("203.0.113.0/24",))
    assert host.flows == _flows.rules(GUARD, 5, [], rule)
    # Connections of an earlier guest with this port number end before this one starts.
    assert host.flushed == STARTED
    assert not drive(PARAMS).changed


def test_a_start_asks_nothing_twice(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program costs a slow host 50 ms and more, and libvirt waits for its hook's programs."""
    _guards.restore(_guards.recorded(), with_firewall=True)
    programs: list[str] = []

    def run(argv: list[str], **more: Any) -> _command.Result:
        words = [word for word in argv[1:] if not word.startswith("-")]
        programs.append(f"{argv[0]} {words[0] if words else 'load'}")
        return host.run(argv, **more)

    def resume(_name: str) -> None:
        host.life = Life("running")

    monkeypatch.setattr(_command, "run", run)
    monkeypatch.setattr(_libvirt, "resume", resume)
    drive(PARAMS)
    number, flows = "ovs-vsctl find", "ovs-ofctl dump-flows"
    install = [
        "nft load", "ovs-ofctl add-meter", "ovs-appctl dpctl/ct-set-limits", "ovs-ofctl add-flows",
        "ovs-appctl revalidator/purge",
    ]  # fmt: skip
    compare = [
        "ovs-vsctl find", "unshare sh", "nft list", "ovs-appctl dpctl/ct-get-limits", "nft list",
        "ovs-ofctl dump-meters", flows, "nft list",
    ]  # fmt: skip
    forget = ["ovs-appctl dpctl/flush-conntrack", "ss state", "conntrack 10.100.0.13"]
    hook = [number, *install, *compare, *forget, "conntrack 10.100.0.13", "nft load"]
    look = [number, flows]
    # Programs that run side by side have no order.
    assert sorted(programs) == sorted([*look, "nft load", *hook, *look, *look])


@pytest.mark.covers("HOST-7")
@pytest.mark.parametrize("before", ["nothing", "flows of an earlier start"])
def test_a_guest_runs_behind_its_guard_also_without_the_start_hook(host: Host, before: str) -> None:
    """libvirt has not seen the hook. After the guest's own end its flows may still be there, and
    the filter has gone with its tap.
    """
    if before != "nothing":
        drive(PARAMS)
        host.life = Life("shut off")
        host.switch.bridges["ovsbr0"].pop(GUARD.port)
        host.switch.tables.pop(f"netdev gpuaas_{GUARD.port}")
        host.acts.clear()
    host.hooked = False
    assert drive(PARAMS).done[-3:] == START
    assert host.acts[-3:] == ["start", "guard", "resume"]
    assert f"netdev gpuaas_{GUARD.port}" in host.switch.tables
    assert host.switch.meters["5"] and host.switch.zones["5"]


def test_a_guest_that_ignored_its_stop_powers_off_by_itself_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(PARAMS)
    host.life = Life("running", 1, stop_requested=True)

    def forget(_name: str) -> None:
        host.life = Life("running", 1)

    monkeypatch.setattr(_libvirt, "forget_request", forget)
    assert drive(PARAMS).done == ["forget_shutdown"]
    assert not drive(PARAMS).changed


@pytest.mark.covers("HOST-7")
def test_a_guard_that_is_put_back_keeps_connections(host: Host) -> None:
    drive(PARAMS)
    _guards.forget(ONE)
    assert drive(PARAMS).done == ["guard_port"]
    assert (_guards.saved(ONE), host.flushed) == (GUARD, STARTED)


@pytest.mark.covers("HOST-7")
def test_the_limit_is_read_back_and_goes_with_the_vm(host: Host) -> None:
    params = {**PARAMS, "spec": {**SPEC, "mgmt_qos": LIMIT}}
    first = drive(params)
    assert host.acts == ["define", "start", "limit", "resume"]
    assert first.facts["domain"]["qos"] == first.evidence["limit_port"] == LIMITED.document()
    assert not drive(params).changed
    assert drive({**params, "state": "absent"}).facts["domain"]["qos"] == {}


@pytest.mark.covers("HOST-7")
def test_a_switch_that_keeps_no_limit_fails_the_run(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_qos, "install", lambda *_: None)
    params = {**PARAMS, "spec": {**SPEC, "mgmt_qos": LIMIT}}
    failure = _change.drive(_machine.SUBJECT, params, check_mode=False).failure
    assert failure is not None and "limit_port" in failure.found


@pytest.mark.usefixtures("host")
def test_qemus_logs_of_the_newest_slices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest can fill each, and its project can launch without end."""
    monkeypatch.setattr(_machine, "_LOGS", 2)
    ids = [f"{number}{ONE[1:]}" for number in range(4)]
    for at, id in enumerate(ids):
        for end in (".log", ".log.0", ".log.1.gz"):
            path = f"{LOGS}/{_object_names.domain_name(id)}{end}"
            _host.write(path, "x")
            os.utime(_host.path(path), (at, at))
    # The oldest still runs.
    _host.write(_object_names.guard_path(ids[0]), "{}")
    _host.write(f"{LOGS}/of-the-site.log", "x")
    drive(PARAMS)
    drive({**PARAMS, "state": "absent"})
    left = {path.name for path in _host.path(LOGS).iterdir()}
    assert {_object_names.owner(name) for name in left} == {"", ids[0], ids[2], ids[3]}
    assert len(left) == 10


JOINED = {
    **PARAMS,
    "spec": {
        **SPEC,
        "gpus": ["0000:43:00.0", "0000:44:00.0"],
        "nvlink_partition": {"modules": [1, 3], "address": "192.0.2.9", "socket": None},
    },
}
RECORD = _object_names.nvlink_path(ONE)


def failing(params: dict[str, Any]) -> tuple[str, str | None]:
    outcome = _change.drive(_machine.SUBJECT, params, check_mode=False)
    assert outcome.failure is not None
    return outcome.failure.code, outcome.failed_step


@pytest.mark.covers("SLICE-6")
def test_the_partition_of_the_gpus_is_active_as_long_as_the_guest_may_run(
    host: Host, manager: FabricManager
) -> None:
    assert drive(JOINED, check_mode=True).changed and manager.active == []
    first = drive(JOINED)
    assert first.done[:3] == ["define_domain", "activate_partition", "start_domain"]
    assert first.evidence["activate_partition"] == {"partition": 3, "modules": [1, 3]}
    assert manager.active == [3]
    assert not drive(JOINED).changed
    assert drive({**JOINED, "state": "stopped"}).done[-1] == "deactivate_partition"
    assert manager.active == [] and not drive({**JOINED, "state": "stopped"}).changed
    drive(JOINED)
    removal = drive({**JOINED, "state": "absent"})
    assert removal.done[-3:] == ["deactivate_partition", "undefine_domain", "remove_files"]
    assert manager.active == [] and not _host.path(RECORD).exists()
    assert not drive({**JOINED, "state": "absent"}).changed


def test_a_start_by_hand_activates_the_partition_or_is_refused(
    host: Host, manager: FabricManager, capsys: pytest.CaptureFixture[str]
) -> None:
    drive(JOINED)
    # A restart of the Fabric Manager, or a power loss.
    manager.set(active=[])
    assert _start_hook.start(NAME, host.xml) == 0
    assert manager.active == [3]
    for change, code in (
        ({"active": [1]}, "nvlink_partition_overlap"),
        ({"active": [], "faults": {"-a": "lie"}}, "nvlink_partition_unchanged"),
        ({"faults": {"-l": "down"}}, "fabric_manager_unreachable"),
    ):
        manager.set(**change)
        assert _start_hook.start(NAME, host.xml) == 1
        assert code in capsys.readouterr().err
    _host.write(RECORD, "")
    assert _start_hook.start(NAME, host.xml) == 1
    assert "nvlink_record_unreadable" in capsys.readouterr().err


def test_nothing_starts_beside_a_partition_that_another_slice_left(
    host: Host, manager: FabricManager
) -> None:
    manager.set(active=[1])
    assert failing(JOINED) == ("nvlink_partition_overlap", None)
    manager.set(active=[], faults={"-a": "refuse"})
    assert failing(JOINED) == ("fabric_manager_refused", "activate_partition")
    assert "start" not in host.acts
    # A partition that the Fabric Manager may have activated all the same is deactivated.
    manager.set(active=[3], faults={})
    drive({**JOINED, "state": "absent"})
    assert manager.active == []


@pytest.mark.covers("SLICE-6", "I13")
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"-l": "hang"}, "fabric_manager_unreachable"),
        ({"-d": "lie"}, "nvlink_partition_unchanged"),
        ({"-d": "refuse"}, "fabric_manager_refused"),
    ],
)
def test_a_release_fails_while_the_partition_may_be_active(
    host: Host,
    manager: FabricManager,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, str],
    code: str,
) -> None:
    drive(JOINED)
    manager.set(faults=fault)
    removal = {**JOINED, "state": "absent"}
    with monkeypatch.context() as patch:
        fabric_manager.be_short(patch, fault)
        assert failing(removal) == (code, "deactivate_partition")
        assert host.life == Life("shut off") and host.port() is None, "the guest does not run on"
        assert _host.path(RECORD).exists(), "the next run would not know what to deactivate"
        # A stop goes on, because the slice keeps its GPUs.
        stopped = drive({**JOINED, "state": "stopped"})
        assert [doubt.code for doubt in stopped.doubts] == [code]
    manager.set(faults={})
    drive(removal)
    assert manager.active == []


def test_a_release_deactivates_no_partition_of_others(host: Host, manager: FabricManager) -> None:
    drive(JOINED)
    manager.set(active=[1])
    overlap = ("nvlink_partition_overlap", "deactivate_partition")
    assert failing({**JOINED, "state": "absent"}) == overlap
    assert manager.active == [1]
    _host.write(RECORD, "{}")
    unreadable = ("nvlink_record_unreadable", "deactivate_partition")
    assert failing({**JOINED, "state": "absent"}) == unreadable


@pytest.mark.parametrize(
    "change",
    [{"modules": [1]}, {"modules": [1, 1]}, {"modules": [-1]}, {"address": ""}, {"socket": "/x"}],
)
def test_a_partition_that_is_not_that_of_the_gpus_is_refused(
    host: Host, manager: FabricManager, change: dict[str, Any]
) -> None:
    partition = {**JOINED["spec"]["nvlink_partition"], **change}
    wrong = {**JOINED, "spec": {**JOINED["spec"], "nvlink_partition": partition}}
    assert failing(wrong) == ("spec_invalid", None)
    assert manager.calls == [] and host.acts == []


@pytest.mark.parametrize(("stubborn", "word"), [(False, "graceful"), (True, "hard")])
def test_remove_and_remove_again(host: Host, tree: Path, stubborn: bool, word: str) -> None:
    drive(PARAMS)
    host.stubborn = stubborn
    logs = tree / "var/log/libvirt/qemu"
    logs.mkdir(parents=True)
    for name in (f"{NAME}-console.log", f"{NAME}-console.log.0", f"{NAME}.log"):
        (logs / name).write_text("login:")
    outcome = drive({**PARAMS, "state": "absent"})
    assert outcome.evidence["stop_domain"] == {"shutdown": word}
    assert outcome.facts["domain"]["state"] == "absent"
    assert [file.name for file in logs.iterdir()] == [f"{NAME}.log"]
    assert not (tree / _object_names.guard_path(ONE).lstrip("/")).exists()
    assert GUARD.mac not in (_firewall.installed() or "")
    assert (host.flows, host.port(), host.flushed) == (frozenset(), None, [*STARTED, "zone=5"])
    assert not drive({**PARAMS, "state": "absent"}).changed


def test_a_late_run_is_refused_before_each_act(host: Host) -> None:
    drive(PARAMS)
    _ledger.hold("slot-3", fence=8, allocation_id=ONE, disk_identity="eui.5e0000000000a003")
    stop = _change.Step("stop_domain", NAME, "running", "off")
    with pytest.raises(_change.Refusal, match="stale_fence"):
        _machine.apply(PARAMS, stop)
    assert "shut_down" not in host.acts


def test_every_disk_is_marked_dirty_before_the_guest_starts(tree: Path) -> None:
    """This includes the data disks of an allocation with several GPUs, which no clone marks."""
    for number in (0, 1):
        _ledger.hold(
            f"slot-{number}", fence=3, allocation_id="a", disk_identity=f"eui.{number:016x}"
        )
    _machine._mark_dirty([{"slot_id": f"slot-{number}", "fence": 3} for number in (0, 1)])
    assert [entry.dirty for entry in _ledger.entries()] == [True, True]


class Killed(BaseException):
    """SIGKILL at an act: no part of the run goes on, not even its error handlers."""


def kill(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], int]:
    """End the run before its act number `at`. Returns the number of acts so far."""
    acts = [0]
    places = (
        *((_libvirt, name) for name in ("define", "start_paused", "resume", "undefine")),
        *((_libvirt, name) for name in ("shut_down", "destroy")),
        *((_host, name) for name in ("write", "remove")),
        *((_command, "run"), (_qos, "install")),
    )

    def wrapped(real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*words: Any, **options: Any) -> Any:
            acts[0] += 1
            if acts[0] == at:
                raise Killed
            return real(*words, **options)

        return act

    for module, name in places:
        monkeypatch.setattr(module, name, wrapped(getattr(module, name)))
    return lambda: acts[0]


@pytest.mark.covers("I11", "I12")
@pytest.mark.parametrize("state", ["running", "absent"])
def test_what_a_killed_run_leaves_is_finished_by_the_next(tree: Path, state: str) -> None:
    """Killed at each act in turn, with each kind of next run."""
    limited = {**PARAMS, "spec": {**SPEC, "mgmt_qos": LIMIT}}
    at, over = 1, False
    while not over:
        for following in ("running", "absent"):
            with pytest.MonkeyPatch.context() as patch:
                prepared = fresh(tree, patch)
                if state != "running":
                    drive(limited)
                with pytest.MonkeyPatch.context() as deadly:
                    number = kill(deadly, at)
                    with contextlib.suppress(Killed):
                        drive({**limited, "state": state})
                    over = number() < at
                drive({**limited, "state": following})
                assert not drive({**limited, "state": following}).changed
                if following == "absent":
                    assert left(prepared, limits=state != "running") == [], at
                else:
                    assert prepared.life == Life("running") and prepared.qos == LIMITED
                    assert prepared.flows, at
        at += 1
    assert at > 15


def fresh(tree: Path, patch: pytest.MonkeyPatch) -> Host:
    """A host before the first run of the slice."""
    shutil.rmtree(tree / "var", ignore_errors=True)
    _ledger.hold("slot-3", fence=7, allocation_id=ONE, disk_identity="eui.5e0000000000a003")
    _host.write(_baseline_files.SETTINGS, json.dumps(_baseline_files.settings(NETWORK)))
    # virtlogd writes it, and it is removed last.
    _host.write(_object_names.console_path(ONE), "login:")
    return Host(patch)


def left(host: Host, *, limits: bool) -> list[str]:
    """Leftovers that a release must remove. limits: whether the port had been guarded, so that its
    number is known.
    """
    folder = _host.path(_host.STATE_DIRECTORY)
    files = [str(file) for file in folder.rglob(f"*{NAME}*")]
    files += ["firewall"] if GUARD.mac in (_firewall.installed() or "") else []
    files += [f"filter {name}" for name in host.switch.tables if GUARD.port in name]
    files += [f"meter {number}" for number in host.switch.meters if limits]
    traces = (host.life, host.port(), host.flows, host.qos != _qos.State())
    return [*files, *(str(trace) for trace in traces if trace)]


def machines(allocation: str | None = None) -> list[dict[str, Any]]:
    params = {"allocation_id": allocation, "bridge": "ovsbr0"}
    return list(slice_vm_info.look(params)["machines"])


@pytest.mark.covers("ECO-1")
def test_the_list_of_machines_shows_one_with_its_devices_and_guard(host: Host) -> None:
    assert machines() == []
    drive(PARAMS)
    command = f"/usr/bin/qemu-system-x86_64\0-name\0guest={NAME}\0"
    _host.write("/proc/4711/cmdline", command)
    assert machines(ONE) == machines() == [
        {
            "allocation_id": ONE,
            "name": NAME,
            "state": "running",
            "off_by_guest": False,
            "pids": [4711],
            "vcpus": 1,
            "memory_mib": 768,
            "devices": SPEC["gpus"],
            "disks": SPEC["disks"],
            "macs": [SPEC["mac"]],
            "port": GUARD.port,
            "ofport": 5,
            "flows": len(host.flows),
            "guard_kept": True,
        }
    ]  # fmt: skip
    assert host.flows and machines(ONE.replace("2", "3", 1)) == []


@pytest.mark.covers("ECO-1")
def test_a_machine_that_libvirt_has_lost_is_listed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(PARAMS)
    _host.write("/proc/4711/cmdline", f"/usr/bin/qemu-system-x86_64\0-name\0guest={NAME}\0")
    host.life = None
    (lost,) = machines()
    assert (lost["state"], lost["pids"], lost["vcpus"]) == ("absent", [4711], 0)
    assert lost["flows"] and lost["guard_kept"]
    # A domain that belongs to no slice is not listed as a slice.
    monkeypatch.setattr(_libvirt, "states", lambda: {"builder": Life("running")})
    assert [machine["state"] for machine in machines()] == ["absent"]
    # A switch that does not answer makes no machine unguarded.
    host.switch.bridges.clear()
    with pytest.raises(_command.Refusal, match="not a bridge"):
        machines()


@pytest.mark.covers("ECO-1")
def test_a_name_that_is_no_allocation_lists_nothing(host: Host) -> None:
    with pytest.raises(_command.Refusal, match="spec_invalid"):
        machines("../" + ONE)
