"""Absence of a slice, proven trace by trace; a failed read proves nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _slice_fabric
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _firewall,
    _flows,
    _host_connections,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _libvirt,
    _qos,
    _slice_absence,
    _slots,
)

pytestmark = pytest.mark.covers("SLICE-7")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
TWO = "33bd713b-6073-4ef7-8a51-2897e902365d"
SLOT = {
    "slot_id": "slot-3",
    "gpu_pci_address": "0000:43:00.0",
    "management_mac": "52:54:00:64:00:0d",
    "private_ip": "10.100.0.13",
    "fabric_vf_pci_address": "0000:61:10.1",
}


def unreadable(*_: object, **__: object) -> Any:
    raise Refusal("command_timeout", expected="", found="late", remedy="")


@pytest.fixture
def empty(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without any trace."""
    monkeypatch.setattr(_libvirt, "states", dict)
    monkeypatch.setattr(_flows, "ports", lambda: {"gs33bd713b6073": 5})
    monkeypatch.setattr(_flows, "guards", lambda _bridge: {_object_names.cookie(TWO): 17})
    monkeypatch.setattr(_firewall, "forwarded", lambda: [(TWO, "rule-2")])
    monkeypatch.setattr(_qos, "rows", lambda: {"another": TWO})
    monkeypatch.setattr(_host_connections, "number", lambda _ip: 0)
    monkeypatch.setattr(_block, "judged", lambda _slot: (object(), []))
    monkeypatch.setattr(_slots, "passthrough", lambda _address: [])
    return tree


def not_absent(checks: dict[str, Any]) -> set[str]:
    return {name for name, check in checks.items() if not check["absent"]}


@pytest.mark.covers("I17")
def test_nothing_left(empty: Path) -> None:
    checks = _slice_absence.look(ONE, [SLOT], "ovsbr0")
    assert not_absent(checks) == set()
    assert all(check["known"] for check in checks.values())


OFF = {_object_names.domain_name(ONE): _libvirt.State("shut off")}
UNBOUND = Refusal("not_bound", expected="", found="", remedy="")
IN_VLAN = Refusal("function_unguarded", expected="VLAN 4000", found="VLAN 3001", remedy="")
MOUNTED = Refusal("disk_in_use", expected="not in use", found="mounted", remedy="")
DISK = SimpleNamespace(disk_identity="eui.1")


@pytest.mark.covers("I17")
@pytest.mark.parametrize(
    ("look", "trace"),
    [
        ((_libvirt, "states", lambda: OFF), "domain"),
        ((_libvirt, "processes", lambda _marker: {7: "qemu-system-x86_64"}), "qemu_process"),
        ((_flows, "ports", lambda: {_object_names.port_name(ONE): 0}), "ovs_port"),
        ((_flows, "guards", lambda _bridge: {_object_names.cookie(ONE): 1}), "flows"),
        ((_qos, "rows", lambda: {"row": ONE}), "qos"),
        ((_firewall, "forwarded", lambda: [(ONE, "rule-1")]), "ingress"),
        ((_host_connections, "number", lambda _ip: 2), "connections"),
        ((_block, "judged", lambda _slot: (DISK, [MOUNTED])), "disk_holders"),
        ((_slice_fabric, "unguarded", lambda _function: [IN_VLAN]), "fabric_isolation"),
        pytest.param(
            (_slots, "passthrough", lambda _functions: [UNBOUND]),
            "vfio_bound",
            marks=pytest.mark.covers("I18"),
        ),
    ],
)
def test_one_trace_is_enough(
    empty: Path, monkeypatch: pytest.MonkeyPatch, look: tuple[Any, str, Any], trace: str
) -> None:
    monkeypatch.setattr(*look)
    assert not_absent(_slice_absence.look(ONE, [SLOT], "ovsbr0")) == {trace}


@pytest.mark.covers("I17")
@pytest.mark.parametrize(
    ("path", "trace"),
    [
        (_object_names.nvram_path(ONE), "nvram"),
        (_object_names.seed_path(ONE), "seed"),
        (_object_names.console_path(ONE), "console"),
        (_object_names.channel_path(ONE, "telemetry"), "channel"),
        (_object_names.guard_path(ONE), "guard"),
        (_object_names.fabric_guard_path(ONE), "fabric_guard"),
        (_object_names.ingress_path(ONE), "ingress_file"),
        (_object_names.nvlink_path(ONE), "nvlink_file"),
        (_dnsmasq.file_of(ONE), "reservation"),
    ],
)
def test_a_file_left_behind(empty: Path, path: str, trace: str) -> None:
    file = empty / path.lstrip("/")
    file.parent.mkdir(parents=True)
    file.write_text("52:54:00:64:00:0d,10.100.0.13,a")
    assert not_absent(_slice_absence.look(ONE, [SLOT], "ovsbr0")) == {trace}


@pytest.mark.covers("I17")
def test_a_lease_counts_unless_the_address_has_a_new_holder(empty: Path) -> None:
    leases = empty / _dnsmasq.LEASES.lstrip("/")
    leases.parent.mkdir(parents=True)
    leases.write_text("1 52:54:00:64:00:0d 10.100.0.13 a *\n")
    assert not_absent(_slice_absence.look(ONE, [SLOT], "ovsbr0")) == {"lease"}
    other = empty / _dnsmasq.file_of(TWO).lstrip("/")
    other.parent.mkdir(parents=True)
    other.write_text("52:54:00:64:00:0d,id:*,10.100.0.13,b,12h")
    assert not_absent(_slice_absence.look(ONE, [SLOT], "ovsbr0")) == set()


@pytest.mark.covers("I13")
@pytest.mark.parametrize(
    ("owner", "name", "trace"),
    [
        (_libvirt, "states", "domain"),
        (_flows, "ports", "ovs_port"),
        (_flows, "guards", "flows"),
        (_qos, "rows", "qos"),
        (_firewall, "forwarded", "ingress"),
        (_host_connections, "number", "connections"),
        (_block, "judged", "disk_holders"),
        (_slots, "passthrough", "vfio_bound"),
    ],
)
def test_a_look_that_fails_proves_nothing(
    empty: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, trace: str
) -> None:
    monkeypatch.setattr(owner, name, unreadable)
    checks = _slice_absence.look(ONE, [SLOT], "ovsbr0")
    assert not_absent(checks) == {trace}
    assert not checks[trace]["known"]


def test_an_answer_in_another_form_proves_nothing(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_qos, "rows", lambda: json.loads("{"))
    checks = _slice_absence.look(ONE, [SLOT], "ovsbr0")
    assert not_absent(checks) == {"qos"} and not checks["qos"]["known"]


def test_a_disk_that_is_not_the_approved_one_proves_nothing(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Refusal("identity_mismatch", expected="", found="", remedy="")
    monkeypatch.setattr(_block, "judged", lambda _slot: (None, [refusal]))
    assert not _slice_absence.look(ONE, [SLOT], "ovsbr0")["disk_holders"]["known"]
