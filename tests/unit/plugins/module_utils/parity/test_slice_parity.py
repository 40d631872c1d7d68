"""Whole parity report: every check in order, on an empty host and on a bare-metal host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _guest_probe, _slice_parity
from ansible_collections.gpuaas.slice.plugins.modules import slice_parity

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
REPAIRS = ("gpuaas.slice.bootstrap", "gpuaas.slice.bind_topology")
RULE = "-A POSTROUTING -s 10.100.0.0/24 -j MASQUERADE"


def run(
    parity: Any, intent: str, *, tags: list[str] | None = None, **profile: Any
) -> dict[str, Any]:
    params = {
        "profile": parity.profile | profile,
        "slots": [],
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
