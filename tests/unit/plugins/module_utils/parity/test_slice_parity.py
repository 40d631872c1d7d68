"""Whole parity report: every check in order, on an empty host and on a bare-metal host."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_units,
    _bounded,
    _command,
    _host_mode,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _ipoib_address
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _guards,
    _host_filter,
    _nat,
    _nft,
    _switch,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _guest_probe, _slice_parity
from ansible_collections.gpuaas.slice.plugins.modules import slice_parity

from tests.unit.plugins.fake_switch import PROGRAMS, FakeSwitch
from tests.unit.plugins.module_utils import netplan

pytestmark = pytest.mark.covers("HOST-10")

CONTRACTS = Path(__file__).resolve().parents[5] / "contracts"
NAT = ("iptables", "--wait", "10", "-t", "nat", "-S", "POSTROUTING")
INPUT, FORWARD = (("iptables", "--wait", "10", "-S", chain) for chain in ("INPUT", "FORWARD"))
DECIDED = """
node_agent name_resolution maas_intent firmware_virtualization kvm kernel_cmdline iommu_groups
vfio_modules vfio_binding gpu_services_quiesced nvlink_partitions fabric_vfs fabric_isolation
ipoib_netplan fabric_address fabric_route
ovs_bridge dnsmasq dnsmasq_config nat ip_forwarding guest_egress guest_tcp
network_service historical_network_service tmfifo rshim_peer libvirt libvirt_directory vm_confined
console_limit ovmf cloud_init_tools rdma_tools nvme_ownership slice_disks boot_order image_cache
hugepages tuning reboot_required api_topology
"""
DEVICES = {"0000:23:00.0": "1234:11e8", "0000:24:00.0": "1234:11e8", "0000:25:10.0": "8086:10ca"}
REPAIRS = ("gpuaas.slice.bootstrap", "gpuaas.slice.bind_topology")
RULE = "-A POSTROUTING -s 10.100.0.0/24 -j MASQUERADE"


def run(
    parity: Any,
    intent: str,
    *,
    tags: list[str] | None = None,
    slots: Sequence[dict[str, Any]] = (),
    **profile: Any,
) -> dict[str, Any]:
    params = {
        "profile": parity.profile | profile,
        "slots": slots,
        "intent": intent,
        "api_topology": None,
        "maas_tags": tags,
    }
    report: dict[str, Any] = slice_parity.look(params)["parity"]
    schema = json.loads((CONTRACTS / "parity.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(report)
    return report


def without_programs(monkeypatch: pytest.MonkeyPatch, code: str = "command_missing") -> None:
    """Refuse each program of the host with this code."""

    def refuse(*_a: Any, **_k: Any) -> Any:
        raise Refusal(code, expected="", found="no such program", remedy="")

    command = "ansible_collections.gpuaas.slice.plugins.module_utils.core._command.run"
    monkeypatch.setattr(command, refuse)
    monkeypatch.setattr(_guest_probe, "echo", lambda _target: None)


def test_every_check_of_the_decisions_is_there_once_and_in_order() -> None:
    assert [check.name for check in _slice_parity.CHECKS] == DECIDED.split()
    for check in _slice_parity.CHECKS:
        assert check.remedy.text
        # A check never runs a remedy that destroys data or needs an approval.
        assert not check.remedy.role or check.remedy.playbook in REPAIRS, check.name


def test_remedies_on_bare_metal_never_bring_slices_back() -> None:
    for check in _slice_parity.CHECKS:
        if check.baremetal is not None:
            remedy = check.restore or check.remedy
            assert not remedy.role
            assert remedy.playbook in ("", "gpuaas.slice.restore_baremetal"), check.name


def test_an_empty_host_fails_every_check_that_counts_and_none_crashes(
    parity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_programs(monkeypatch)
    report = run(parity, "slice")
    passed = {check["check"] for check in report["checks"] if check["status"] == "PASS"}
    assert passed <= {
        "console_limit",
        "slice_disks",
        "boot_order",
        "nvme_ownership",
        "nvlink_partitions",
        "hugepages",
        "tuning",
        "image_cache",
    }
    assert report["lines"][-1] == report["summary"]
    assert len(report["lines"]) == len(DECIDED.split()) + 1


@pytest.mark.covers("ORCH-3")
def test_the_report_has_the_networks_that_bootstrap_applied(
    parity: Any, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_programs(monkeypatch)
    assert "networks" not in run(parity, "slice")
    settings = {"allowed_networks": ["10.40.0.0/24", "the storage"], "denied_networks": []}
    machine.file(_baseline_files.SETTINGS, json.dumps(settings))
    expected = {"allowed_networks": ["10.40.0.0/24"], "denied_networks": []}
    assert run(parity, "slice")["networks"] == expected


@pytest.mark.covers("ECO-3")
@pytest.mark.parametrize("intent", ["slice", "baremetal"])
def test_a_wrong_tag_of_maas_fails_and_unknown_ones_warn(
    parity: Any, monkeypatch: pytest.MonkeyPatch, intent: str
) -> None:
    without_programs(monkeypatch)
    for tags, status in ((None, "WARN"), (["gpuaas-profile-other"], "FAIL")):
        checks = run(parity, intent, tags=tags)["checks"]
        (outcome,) = [row["status"] for row in checks if row["check"] == "maas_intent"]
        assert outcome == status


@pytest.mark.covers("HOST-15")
def test_a_bare_metal_host_is_free_of_slice_services(
    parity: Any, machine: Any, script: Any
) -> None:
    parity.enrolled(before=2**64 - 1)
    machine.file("/etc/gpuaas/enrolment.env", "GPUAAS_API_URL=http://127.0.0.1:1\n")
    machine.pci("0000:23:00.0", "1234:11e8", group=1, driver="nvidia")
    parity.shown(("eth0", "192.0.2.5/24"))
    script.on(*NAT, out="").on(*INPUT, out="").on(*FORWARD, out="")
    parity.units()
    report = run(parity, "baremetal")
    assert [row for row in report["checks"] if row["status"] == "FAIL"] == []


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize(("code", "status"), [("command_missing", "PASS"), ("other", "FAIL")])
def test_a_bare_metal_host_need_not_have_iptables(
    parity: Any, machine: Any, monkeypatch: pytest.MonkeyPatch, code: str, status: str
) -> None:
    without_programs(monkeypatch, code)
    statuses = {row["check"]: row["status"] for row in run(parity, "baremetal")["checks"]}
    assert statuses["nat"] == status


def test_slice_services_left_on_bare_metal_are_named(
    parity: Any, machine: Any, script: Any
) -> None:
    machine.pci("0000:23:00.0", "1234:11e8", group=1, driver="vfio-pci")
    machine.file("/etc/gpuaas/vfio-binding.json", '{"devices": {"0000:23:00.0": "1234:11e8"}}')
    machine.file("/etc/libvirt/qemu/gpuaas-slice-1.xml", "<domain/>")
    machine.file("/etc/dnsmasq.d/gpuaas-slice.conf", "interface=ovsbr0\n")
    machine.file("/etc/modules-load.d/gpuaas-vfio.conf", "vfio\n")
    machine.file("/etc/default/grub.d/60-gpuaas-slice.cfg", "# ours\n")
    machine.file("/etc/gpuaas/slice-mode.json", '{"mode": "slice"}')
    _ledger.hold("slot-0", fence=1, allocation_id="alloc-1", disk_identity="eui.5e0000000000a000")
    parity.shown(("ovsbr0", "10.100.0.1/24"))
    script.on(*NAT, out=RULE).on(*INPUT, out="").on(*FORWARD, out="")
    parity.units(baseline="loaded/active/enabled/success", fabric="loaded/active/enabled/success")
    checks = run(parity, "baremetal")["checks"]
    statuses = {row["check"]: row["status"] for row in checks}
    binding = next(row["detail"] for row in checks if row["check"] == "vfio_binding")
    assert "still in slice mode" in binding
    for name in (
        "kernel_cmdline",
        "vfio_modules",
        "fabric_vfs",
        "vfio_binding",
        "ovs_bridge",
        "dnsmasq",
        "nat",
        "network_service",
        "libvirt",
        "nvme_ownership",
    ):
        assert statuses[name] == "FAIL", name


# Programs of a whole run on a host with a fabric card; within sh, nft alone. Each takes about a
# tenth of a second on the lab host.
STARTED = {
    "systemctl": 1, "netplan": 1, "dnsmasq": 1, "virsh": 1, "iptables": 3,
    # Interfaces, routes and the fabric card, again under the lock of its guards; then the probe's:
    # its namespace from outside and inside, both ends of its link, and the removal of both.
    "ip": 4 + 6,
    # The probe's port comes and goes. Its meter and flows are set and removed, all are listed.
    "ovs-vsctl": 2, "ovs-ofctl": 4 + 2,
    # Two tables of ours are loaded together, and printed by the kernel beside its existing tables.
    "unshare": 1, "nft": 3 + 3,
}  # fmt: skip


class Programs:
    """Programs of a slice host, counted by name. Open vSwitch answers on its sockets."""

    def __init__(self, script: Any, sockets: Path) -> None:
        self.started: Counter[str] = Counter()
        self.beside: set[str] = set()
        self.switch = FakeSwitch()
        self.switch.add_bridge()
        self._others = netplan.before(script.run)
        self._namespace = sockets / "run/netns" / _guest_probe.NAMESPACE
        self._namespace.parent.mkdir()

    def run(self, argv: Sequence[str], **options: Any) -> _command.Result:
        name = argv[0]
        self.started[name] += 1
        if threading.current_thread() is not threading.main_thread():
            self.beside.add(name)
        if name == "unshare":
            self.started["nft"] += argv[-1].count("nft ")
        if name in (*PROGRAMS, "iptables"):
            return self.switch.run(argv, **options)
        if name != "ip" or "-j" in argv:
            return self._others(argv, **options)
        if "netns add" in options.get("stdin", ""):
            self._namespace.touch()
        elif "netns" in argv:
            self._namespace.unlink()
        return _command.Result(0, "", "")

    def ask(self, _name: str, argv: Sequence[str], *_question: Any) -> Any:
        out = self.switch.run(argv).out
        rows = argv[0] == "ovs-vsctl"
        return [json.loads(row)["data"] for row in out.splitlines()] if rows else out


def test_a_whole_run_starts_few_programs(
    parity: Any, machine: Any, script: Any, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a number grows: a file, a socket or another program may have the answer."""
    programs, children, network = Programs(script, sockets), [], parity.profile["network"]
    call = _bounded.call

    def fork(*action: Any, **deadline: Any) -> Any:
        children.append(action)
        return call(*action, **deadline)

    monkeypatch.setattr(_command, "run", programs.run)
    monkeypatch.setattr(_switch, "_ask", programs.ask)
    monkeypatch.setattr(_bounded, "call", fork)
    monkeypatch.setattr(_guest_probe, "echo", lambda _target: None)
    for step in _guards.plan(network, _guards.observe(network)):
        _guards.apply(network, step)
    programs.switch.nat, programs.switch.filter = _nat.rules(network), _host_filter.rules("ovsbr0")
    slots = [parity.slot, parity.slot | {"gpu_pci_address": "0000:24:00.0", "slot_id": "slot-1"}]
    machine.pci("0000:25:00.0", "8086:10c9", **{"class": "0x020000", "sriov_numvfs": "1"})
    for number, (address, device) in enumerate(DEVICES.items()):
        machine.pci(address, device, group=number, driver="vfio-pci")
    machine.function("0000:25:00.0", 0, "0000:25:10.0")
    idle = {"vlan_list": [{"vlan": 3000}], "spoofchk": True, "trust": False, "link_state": "auto"}
    parity.identified({"address": parity.mac, **idle})
    machine.file(_host_mode.MARKER, '{"mode": "slice"}')
    machine.file(_ipoib_address.FILE, "network: {}\n")
    for unit in (_boot_units.FABRIC, _boot_units.BINDING, _boot_units.CLAIM):
        parity.installed(unit, devices=DEVICES)
    loaded = "loaded/active/enabled/success"
    parity.units(baseline=loaded, fabric=loaded, binding=loaded, claim=loaded)
    parity.shown(("ovsbr0", network["address"]), ("ibp65s0", "10.20.0.7/16"))
    script.on("ip", "-j", "-4", "route", "show", "table", "main", out="[]")
    script.on("dnsmasq", "--test", "--conf-dir=/etc/dnsmasq.d,.dpkg-dist,.dpkg-old,.dpkg-new")
    script.on("virsh", "-q", "-c", "qemu:///system", "version", out="Running hypervisor: QEMU\n")
    programs.started.clear()
    programs.beside.clear()
    _nft.forget()
    report = run(parity, "slice", slots=slots)
    shown = {row["check"]: f"{row['status']} {row['detail']}" for row in report["checks"]}
    for check in ("ovs_bridge", "nat", "guest_egress", "fabric_isolation", "libvirt"):
        assert shown[check].startswith("PASS"), shown[check]
    assert shown["guest_tcp"] == "FAIL stops"
    assert "does not answer" not in shown["vfio_binding"]
    assert dict(programs.started) == STARTED
    # The guest's programs, and libvirt, whose daemon may have to start.
    assert programs.beside == {"ovs-vsctl", "ovs-ofctl", "ip", "virsh"}
    # All devices are read in one child.
    assert len(children) == 1
