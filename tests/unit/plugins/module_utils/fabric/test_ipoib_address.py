"""Fabric address of the host: as netplan reads it, and as the host then has it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.fabric import _ipoib_address

pytestmark = pytest.mark.covers("HOST-7")

PARAMS = {"interface": "ibp65s0", "address": "10.20.0.7/16", "route": "10.20.0.0/16"}
# Saved before a test replaces it.
REAL = _command.run


class Fabric:
    """netplan and networkd: an apply moves the file's content to the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.addresses: dict[str, list[str]] = {"ibp65s0": []}
        self.refusal = self.broken = ""
        self.deaf = False
        self.shown: dict[str, str] = {}
        # Links of the route.
        self.way: list[str] = []
        monkeypatch.setattr(_command, "run", self.run)
        monkeypatch.setattr(_ipoib_address, "_SETTLES_S", 0.0)

    def run(self, argv: Sequence[str], **_more: Any) -> _command.Result:
        self.calls.append(" ".join(argv[:2]))
        if argv[:4] == ["ip", "-j", "-4", "route"]:
            hops = [{"dev": link} for link in self.way]
            rows = [{"dst": "10.20.0.0/16", "nexthops": hops}] if hops else []
            return _command.Result(0, json.dumps(rows), "")
        if argv[0] == "ip":
            return _command.Result(0, json.dumps(self._links()), "")
        if argv[:2] == ["netplan", "generate"]:
            root = Path(argv[3])
            self.shown = {
                str(file.relative_to(root)): file.read_text() for file in root.glob("*/*/*.yaml")
            }
            refusal = f"{root}{self.refusal}" if self.refusal else ""
            return _command.Result(1 if self.refusal else 0, "", refusal)
        assert list(argv) == ["netplan", "apply"]
        if self.broken:
            raise _command.Refusal("command_failed", expected="", found=self.broken, remedy="")
        if not self.deaf:
            self.settle()
        return _command.Result(0, "", "")

    def settle(self) -> None:
        settings = yaml.safe_load(_host.read(_ipoib_address.FILE) or "") or {}
        for name, link in settings.get("network", {}).get("ethernets", {}).items():
            self.addresses[name] = link["addresses"]
            self.way = [name] if link.get("routes") else []

    def _links(self) -> list[dict[str, Any]]:
        return [
            {
                "ifname": name,
                "flags": ["UP"],
                "addr_info": [
                    {
                        "local": address.partition("/")[0],
                        "prefixlen": int(address.partition("/")[2]),
                    }
                    for address in addresses
                ],
            }
            for name, addresses in self.addresses.items()
        ]


@pytest.fixture
def fabric(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    return Fabric(monkeypatch)


def drive(*, check_mode: bool = False, **more: str) -> _change.Outcome:
    return _change.drive(_ipoib_address.SUBJECT, PARAMS | more, check_mode=check_mode)


def test_the_file_is_what_netplan_takes_and_written_once(fabric: Fabric) -> None:
    assert drive().done == ["remember_before", "write_netplan", "apply_netplan"]
    text = _host.read(_ipoib_address.FILE)
    assert text is not None
    assert yaml.safe_load(text)["network"]["ethernets"] == {
        "ibp65s0": {
            "addresses": ["10.20.0.7/16"],
            "routes": [{"to": "10.20.0.0/16", "scope": "link"}],
        }
    }
    assert _host.path(_ipoib_address.FILE).stat().st_mode & 0o777 == 0o600
    fabric.calls.clear()
    assert not drive().changed
    assert "netplan generate" not in fabric.calls
    assert drive(route="").changed


@pytest.mark.parametrize(
    "bad",
    [
        {"interface": ""},
        {"interface": 'ib": {}'},
        {"address": ""},
        {"address": "10.20.0.7"},
        {"address": "10.20.0.7/33"},
        {"address": "fd00::7/64"},
        {"route": "default\nx: y"},
    ],
)
def test_what_netplan_would_read_as_more_is_refused(fabric: Fabric, bad: dict[str, str]) -> None:
    failure = drive(**bad).failure
    assert failure.code == "ipoib_invalid"
    assert (_host.read(_ipoib_address.FILE), fabric.calls) == (None, [])


def test_what_netplan_refuses_is_never_written(fabric: Fabric, tree: Path) -> None:
    """netplan judges a copy of all files that the next boot reads."""
    _host.write("/etc/netplan/50-cloud-init.yaml", "network: {version: 2, x: 1}\n")
    fabric.refusal = "/etc/netplan/50-cloud-init.yaml:1:25: unknown key x"
    for check_mode in (True, False):
        failure = drive(check_mode=check_mode).failure
        assert failure.code == "netplan_refused"
        assert failure.found == fabric.refusal
    assert set(fabric.shown) == {"etc/netplan/50-cloud-init.yaml", "etc/netplan/60-ipoib.yaml"}
    assert fabric.shown["etc/netplan/60-ipoib.yaml"] == _ipoib_address.text(PARAMS)
    assert _host.read(_ipoib_address.FILE) is None
    assert "netplan apply" not in fabric.calls


def test_an_apply_that_fails_fails_again_until_the_host_has_it(fabric: Fabric) -> None:
    """The file is written by then, so the file alone does not prove success."""
    fabric.broken = "networkd is masked"
    failure = drive().failure
    assert failure.found == fabric.broken
    again = drive()
    assert (again.failed_step, again.done) == ("apply_netplan", [])
    fabric.broken = ""
    assert drive().done == ["apply_netplan"]
    assert not drive().changed


def test_an_apply_without_effect_is_no_success(fabric: Fabric) -> None:
    fabric.deaf = True
    failure = drive().failure
    assert failure.code == "ipoib_not_live"
    assert failure.expected == "ibp65s0 to have address 10.20.0.7/16, route 10.20.0.0/16"


@pytest.mark.parametrize("way", [None, [], ["eth0"], ["ibp65s0", "eth0"]])
def test_repair_acts_when_only_the_live_state_is_gone(
    fabric: Fabric, way: list[str] | None
) -> None:
    drive()
    if way is None:
        fabric.addresses["ibp65s0"] = []
    else:
        fabric.way = way
    assert drive(check_mode=True).changed
    assert drive().done == ["apply_netplan"]
    assert not drive().changed


def test_an_interface_that_is_not_there_is_named(fabric: Fabric) -> None:
    fabric.addresses = {"eth0": []}
    failure = drive().failure
    assert failure.code == "ipoib_interface_missing"
    assert _host.read(_ipoib_address.FILE) is None


# Other files of a site: cloud-init's file on a bond, and a VLAN on that bond.
SITE = """\
network:
  version: 2
  ethernets:
    eno1: {match: {macaddress: "52:54:00:00:00:01"}, set-name: eno1}
    eno2: {}
  bonds:
    bond0: {interfaces: [eno1, eno2], parameters: {mode: 802.3ad}, dhcp4: true}
  vlans:
    bond0.70: {id: 70, link: bond0, addresses: [10.70.0.7/24]}
"""


@pytest.fixture
def netplan(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """The real netplan judges; only its effects on this machine are simulated."""
    assert shutil.which("netplan", path=_command._PATH), (
        "expected netplan on this machine; found none. Run scripts/setup --tests (netplan.io)"
    )
    played = fabric.run

    def run(argv: Sequence[str], **more: Any) -> _command.Result:
        result = played(argv, **more)
        return REAL(argv, **more) if argv[:2] == ["netplan", "generate"] else result

    monkeypatch.setattr(_command, "run", run)
    return fabric


@pytest.mark.parametrize(
    "more",
    [
        # A partition of the fabric; a virtual function with the longest possible name.
        {"interface": "ib0v3"},
        {"interface": "ibp65s0f1v12345", "route": ""},
        {"address": "10.20.0.7/31", "route": "10.0.0.0/8"},
    ],
)
def test_netplan_itself_takes_every_form(netplan: Fabric, more: dict[str, str]) -> None:
    _host.write("/etc/netplan/50-cloud-init.yaml", SITE, 0o600)
    netplan.addresses = {more.get("interface", "ibp65s0"): []}
    outcome = drive(check_mode=True, **more)
    assert (outcome.failure, outcome.changed) == (None, True)


def test_netplan_itself_makes_of_the_file_what_was_asked(netplan: Fabric, tree: Path) -> None:
    _host.write("/etc/netplan/50-cloud-init.yaml", SITE, 0o600)
    assert drive().failure is None
    # netplan judged a copy, so the host's folders contain nothing of it.
    assert not (tree / "run").exists()
    REAL(["netplan", "generate", "--root-dir", str(tree)])
    made = {file.name: file.read_text() for file in (tree / "run/systemd/network").iterdir()}
    rows = made["10-netplan-ibp65s0.network"].split()
    route = ["[Route]", "Destination=10.20.0.0/16", "Scope=link"]
    assert [row for row in rows if row in ("Address=10.20.0.7/16", *route)] == [
        "Address=10.20.0.7/16",
        *route,
    ]
    assert not [row for row in rows if row.startswith(("DHCP", "Gateway"))]
    assert "10-netplan-bond0.70.network" in made


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ("network: {version: 2, ethernet: {}}\n", "unknown key 'ethernet'"),
        ("network: {version: 2\n", "Invalid YAML"),
        # Each is valid by itself.
        (SITE.replace("bond0:", "ibp65s0:").replace("bond0,", "ibp65s0,"), "changes device type"),
    ],
)
def test_netplan_itself_refuses_what_is_broken(
    netplan: Fabric, tree: Path, site: str, message: str
) -> None:
    _host.write("/etc/netplan/50-cloud-init.yaml", site, 0o600)
    failure = drive().failure
    assert failure.code == "netplan_refused"
    assert message in failure.found and "/etc/netplan/" in failure.found
    assert "gpuaas-netplan-" not in failure.found
    assert _host.read(_ipoib_address.FILE) is None
    assert "netplan apply" not in netplan.calls


@pytest.mark.covers("HOST-15")
@pytest.mark.parametrize("was", [None, "network: {version: 2, renderer: networkd}\n"])
def test_the_sites_own_file_comes_back_or_ours_goes(fabric: Fabric, was: str | None) -> None:
    if was:
        _host.write(_ipoib_address.FILE, was)
    drive()
    drive(address="10.20.0.8/16")
    assert drive(state="absent").failure is None
    assert _host.read(_ipoib_address.FILE) == (was.strip() if was else None)
    assert not drive(state="absent").changed


@pytest.mark.covers("HOST-15")
def test_a_way_back_that_was_not_applied_is_not_over(fabric: Fabric) -> None:
    drive()
    fabric.broken = "networkd is masked"
    assert drive(state="absent").failed_step == "apply_netplan"
    assert drive(state="absent").failed_step == "apply_netplan"
    fabric.broken = ""
    assert drive(state="absent").done == ["apply_netplan", "forget_before"]


@pytest.mark.covers("HOST-15")
def test_what_somebody_puts_over_our_file_is_not_what_was_before(fabric: Fabric) -> None:
    drive()
    _host.write(_ipoib_address.FILE, "network: {version: 2}\n")
    assert drive().done == ["write_netplan", "apply_netplan"]
    assert drive(state="absent").done == ["remove_netplan", "apply_netplan", "forget_before"]
    assert _host.read(_ipoib_address.FILE) is None


@pytest.mark.covers("HOST-15")
def test_a_file_of_the_site_is_not_ours_to_remove(fabric: Fabric) -> None:
    _host.write(_ipoib_address.FILE, "network: {version: 2}\n")
    assert not drive(state="absent").changed
