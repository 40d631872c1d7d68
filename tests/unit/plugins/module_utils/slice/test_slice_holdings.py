"""Holdings of all slices on a host, of any owner; a failed read never counts as empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _command,
    _host,
    _ledger,
    _object_names,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _block
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _firewall, _flows
from ansible_collections.gpuaas.slice.plugins.module_utils.slice import (
    _dnsmasq,
    _libvirt,
    _qos,
    _slice_holdings,
    _slots,
)

from tests.unit.reconciler.holdings import PARTS

pytestmark = pytest.mark.covers("SLICE-8")

ONE = "23bd713b-6073-4ef7-8a51-2897e902365d"
DOMAIN = _object_names.domain_name(ONE)
DISK = "/dev/disk/by-id/nvme-eui.5e0000000000a000"
SLOT = {"slot_id": "slot-0", "nvme_device": DISK, "gpu_pci_address": "0000:43:00.0"}
XML = f"""<domain><name>x</name><devices>
<disk type='block'><source dev='{DISK}'/></disk>
<hostdev type='pci'><source>
<address domain='0x0000' bus='0x43' slot='0x00' function='0x0'/></source></hostdev>
</devices></domain>"""


@pytest.fixture
def empty(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without holdings."""
    monkeypatch.setattr(_libvirt, "states", dict)
    monkeypatch.setattr(_flows, "ports", dict)
    monkeypatch.setattr(_flows, "guards", lambda _name: {})
    monkeypatch.setattr(_firewall, "forwarded", list)
    monkeypatch.setattr(_qos, "rows", dict)
    monkeypatch.setattr(_block, "judged", lambda *_, **__: (object(), []))
    monkeypatch.setattr(_slots, "passthrough", lambda *_, **__: [])
    return tree


def look() -> dict[str, Any]:
    return _slice_holdings.look([SLOT], "ovsbr0")


def file(root: Path, path: str, text: str = "") -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_nothing_is_held(empty: Path) -> None:
    parts = look()
    assert set(parts) == set(PARTS)
    assert all(part == {"known": True, "detail": "", "found": []} for part in parts.values())


def test_a_slice_is_listed_in_every_part(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libvirt, "states", lambda: {DOMAIN: _libvirt.State("shut off")})
    monkeypatch.setattr(_libvirt, "definition", lambda _name: XML)
    monkeypatch.setattr(_flows, "ports", lambda: {"eno1": 1, _object_names.port_name(ONE): 4})
    monkeypatch.setattr(_flows, "guards", lambda _name: {_object_names.cookie(ONE): 17})
    monkeypatch.setattr(_qos, "rows", lambda: {"row": ONE})
    monkeypatch.setattr(_firewall, "forwarded", lambda: [(ONE, "rule-1")])
    command = f"/usr/bin/qemu-system-x86_64\0-name\0guest={DOMAIN},debug-threads=on\0"
    file(empty, "/proc/7/cmdline", command)
    file(empty, _dnsmasq.file_of(ONE), "52:54:00:64:00:0a,id:*,10.100.0.10,vm,12h")
    file(empty, _dnsmasq.LEASES, "1 52:54:00:64:00:0a 10.100.0.10 vm *\n")
    file(empty, _object_names.seed_path(ONE))
    file(empty, _object_names.nvram_path(ONE))
    file(empty, _object_names.ingress_path(ONE))
    file(empty, f"{_object_names.console_path(ONE)}.0")
    file(empty, f"{_object_names.SEEDS}/gpuaas-slice-notes.txt")
    _ledger.hold("slot-0", fence=3, allocation_id=ONE, disk_identity="eui.1")
    rows = {name: part["found"] for name, part in look().items()}
    address = {"mac": "52:54:00:64:00:0a", "ip": "10.100.0.10"}
    holder = {"allocation_id": ONE}
    assert rows == {
        "domains": [
            {
                **holder,
                "name": DOMAIN,
                "state": "shut off",
                "active": False,
                "off_by_guest": False,
                "stops": False,
            }
            | {"devices": ["0000:43:00.0"], "disks": [DISK]}
        ],
        "processes": [{**holder, "pid": 7}],
        "leases": [{**holder, "slot_id": "slot-0", "fence": 3, "disk": "eui.1", "dirty": False}],
        "reservations": [holder | address],
        "addresses": [address],
        "ports": [{"port": "gs23bd713b6073", "owner": "23bd713b6073"}],
        "guards": [{"cookie": "0x23bd713b60734ef7", "owner": "23bd713b60734ef7"}],
        "files": [
            {**holder, "path": _object_names.nvram_path(ONE)},
            {**holder, "path": _object_names.seed_path(ONE)},
            {**holder, "path": f"{_object_names.console_path(ONE)}.0"},
            {**holder, "path": _object_names.ingress_path(ONE)},
        ],
        "limits": [{**holder, "row": "row"}],
        "ingress": [{**holder, "rule_id": "rule-1"}],
        "devices": [],
    }


def test_a_strangers_machine_is_listed_with_what_it_has(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_libvirt, "states", lambda: {"win": _libvirt.State("running")})
    monkeypatch.setattr(_libvirt, "definition", lambda _name: XML)
    (domain,) = look()["domains"]["found"]
    assert (domain["name"], domain["allocation_id"], domain["disks"]) == ("win", "", [DISK])


def test_what_speaks_against_a_device_is_said_and_a_slice_is_no_obstacle(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    used = Refusal("disk_in_use", expected="not in use", found="mounted", remedy="")
    lost = Refusal("not_bound", expected="bound", found="nouveau", remedy="")

    def passthrough(_addresses: object, own_pids: list[int]) -> list[Refusal]:
        calls.append(own_pids)
        return [lost]

    monkeypatch.setattr(_libvirt, "processes", lambda _marker: {7: "qemu"})
    monkeypatch.setattr(_host, "read", lambda _path: "")
    monkeypatch.setattr(_block, "judged", lambda *_, **__: (None, [used]))
    monkeypatch.setattr(_slots, "passthrough", passthrough)
    rows = _slice_holdings.look([SLOT], "ovsbr0")["devices"]["found"]
    assert [(row["slot_id"], row["code"]) for row in rows] == [
        ("slot-0", "disk_in_use"),
        ("slot-0", "not_bound"),
    ]
    assert calls == [[7]]


@pytest.mark.covers("I13")
@pytest.mark.parametrize(
    ("owner", "name", "part"),
    [
        (_libvirt, "states", "domains"),
        (_flows, "ports", "ports"),
        (_flows, "guards", "guards"),
        (_qos, "rows", "limits"),
        (_firewall, "forwarded", "ingress"),
        (_block, "judged", "devices"),
        (_ledger, "entries", "leases"),
        (_dnsmasq, "reservations", "reservations"),
    ],
)
def test_a_look_that_fails_is_unknown(
    empty: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, part: str
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise Refusal("command_timeout", expected="", found="late", remedy="")

    monkeypatch.setattr(owner, name, broken)
    parts = look()
    assert {key for key, value in parts.items() if not value["known"]} == {part}
    assert "command_timeout" in parts[part]["detail"]


def test_cookies_are_those_of_slices(script: Any) -> None:
    flows = (
        " cookie=0x23bd713b60734ef7, priority=310,udp,in_port=4,tp_src=67 actions=drop\n"
        " cookie=0x23bd713b60734ef7, priority=200,in_port=4 actions=drop\n"
        " cookie=0x0, priority=0 actions=NORMAL\n"
        " priority=0 actions=NORMAL\n"
    )
    script.on(
        "ovs-ofctl", "--protocols=OpenFlow13", "--no-names", "dump-flows", "ovsbr0", out=flows
    )
    assert _flows.guards("ovsbr0") == {_object_names.cookie(ONE): 2}


@pytest.mark.parametrize(
    ("reason", "host", "by_guest"),
    [(1, "running", True), (1, "stopping", False), (2, "running", False), (3, "running", False)],
)
def test_a_guest_that_powered_itself_off_is_told_from_others(
    empty: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: int,
    host: str,
    by_guest: bool,
) -> None:
    """Destroyed and crashed guests do not count, nor guests that a host shuts down with itself."""
    monkeypatch.setattr(_libvirt, "states", lambda: {DOMAIN: _libvirt.State("shut off", reason)})
    monkeypatch.setattr(_libvirt, "definition", lambda _name: XML)
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\necho {host}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(_command, "_PATH", f"{tmp_path}:{_command._PATH}")
    (row,) = look()["domains"]["found"]
    assert row["off_by_guest"] is by_guest
