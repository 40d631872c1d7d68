"""Netplan's result for the host's files, from the stand-in and from the real program."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _netplan
from ansible_collections.gpuaas.slice.plugins.module_utils.network._netplan import Link

from tests.unit.plugins.module_utils import netplan

pytestmark = pytest.mark.covers("HOST-10")

FILE = "/etc/netplan/60-ipoib.yaml"
HEAD = "network:\n  version: 2\n  ethernets:\n"
TEXTS = {
    "given": f"{HEAD}    ibp65s0: {{addresses: [10.20.0.7/16]}}\n",
    "out of its place": "addresses: [10.20.0.7/16]\n",
    "no prefix length": f"{HEAD}    ibp65s0: {{addresses: [10.20.0.7]}}\n",
    "long prefix": f"{HEAD}    ibp65s0: {{addresses: [10.20.0.7/160]}}\n",
    "a comment": f"# 10.20.0.7/16\n{HEAD}    ibp65s0: {{addresses: [10.20.0.8/16]}}\n",
    "matched": f"{HEAD}    a: {{match: {{name: 'ib*'}}, addresses: [10.20.0.7/16]}}\n"
    "    b: {match: {macaddress: '52:54:00:00:fa:01'}, addresses: [10.21.0.7/16]}\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_stand_in_judges_as_netplan_does(
    machine: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    machine.file(FILE, TEXTS[name])
    machine.file("/lib/netplan/60-ipoib.yaml", "hidden: by the other\n")
    real = _netplan.judge()
    monkeypatch.setattr(_command, "run", netplan.before(_command.run))
    stand_in = _netplan.judge()
    assert sorted(map(str, stand_in.links)) == sorted(map(str, real.links))
    why = stand_in.refused.partition(" Error ")[2]
    assert (bool(why), why in real.refused) == (bool(real.refused), True), real.refused


def test_the_hosts_files_are_left_alone(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_command, "run", netplan.before(_command.run))
    assert _netplan.judge(FILE, TEXTS["given"]) == _netplan.Judgement(
        "", (Link(("ibp65s0",), (), ("10.20.0.7/16",)),)
    )
    assert list(machine.root.rglob("*")) == []


def test_what_is_made_for_networkmanager_is_read_too() -> None:
    """In the form of netplan 0.106."""
    head = "[connection]\nid=netplan-x\ntype=ethernet\n"
    addresses = "[ipv4]\nmethod=manual\naddress1=10.20.0.7/16,10.20.0.1\naddress2=10.21.0.7/16\n"
    both = ("10.20.0.7/16", "10.21.0.7/16")
    for name, link in (
        ("interface-name=ibp65s0\n", Link(("ibp65s0",), (), both)),
        ("[match]\ninterface-name=ib*;\n", Link(("ib*",), (), both)),
        ("[ethernet]\nmac-address=AA:bb:cc:dd:ee:fe\n", Link((), ("aa:bb:cc:dd:ee:fe",), both)),
    ):
        assert _netplan._link(f"{head}{name}\n{addresses}") == link


def test_options_of_an_address_are_a_section_of_its_own() -> None:
    text = "[Match]\nName=ib0\n[Network]\nAddress=a/1\n[Address]\nAddress=b/2\n[Route]\nAddress=c\n"
    assert _netplan._link(text).addresses == ("a/1", "b/2")


def test_whose_link_it_is(machine: Any) -> None:
    machine.file("/sys/class/net/ibp65s0/address", "80:00:00:29:FE\n")
    assert Link(("eth0", "ib*"), (), ()).is_of("ibp65s0")
    assert not Link(("eth0",), (), ()).is_of("ibp65s0")
    assert Link((), ("80:00:00:29:fe",), ()).is_of("ibp65s0")
    assert not Link((), ("80:00:00:29:fe",), ()).is_of("eth0")
    assert Link((), (), ()).is_of("ibp65s0"), "known by its driver"
