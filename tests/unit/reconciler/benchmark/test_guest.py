"""SSH access to a slice VM through its host, with two real SSH servers."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest

from reconciler.benchmark.capture import capture
from reconciler.benchmark.harness.probe import Request
from reconciler.benchmark.target import (
    Target,
    command,
    guest_place,
    guest_target,
    jump,
)
from reconciler.model.errors import Problem
from reconciler.runs.ssh import SshAccess
from reconciler.trust import ca
from tests.unit.reconciler.benchmark.sshd import USER, Boot, Machine, boot, new_key

__all__ = ["boot"]

pytestmark = pytest.mark.covers("HOST-12")

TINY = Request(
    label="vm", kind="vm", cpu_steps=5_000, memory_bytes=1 << 16, repetitions=2, seconds=1
)
ID = "23bd713b-6073-4ef7-8a51-2897e902365d"


def measured(target: Target) -> dict[str, Any]:
    return capture(target, TINY, lambda _line: None)


def refused(target: Target) -> Problem:
    with pytest.raises(Problem) as caught:
        measured(target)
    return caught.value


@dataclasses.dataclass
class Site:
    """A host with a certificate for node-1, a guest without any, and a tenant's key."""

    host: Machine
    guest: Machine
    access: SshAccess
    allocation: dict[str, Any]
    node: dict[str, Any]
    caller: Target
    folder: Path

    def target(self, **changes: Any) -> Target:
        caller = dataclasses.replace(self.caller, **changes)
        return guest_target(
            self.allocation, self.node, caller, access=self.access, folder=self.folder
        )

    def record(self, *keys: str) -> None:
        """Record the keys that the launch read."""
        self.allocation["connection"] = {"host_keys": list(keys)}


@pytest.fixture
def site(boot: Boot, tmp_path: Path) -> Site:
    trust = ca.open_trust(tmp_path / "state")
    identity = ca.operator_identity(trust)
    (tmp_path / "user_ca.pub").write_text(ca.user_ca(trust) + "\n")
    (tmp_path / "principals").write_text(f"{ca.OPERATOR}\n")
    host = boot(
        "host",
        login="",
        settings=f"TrustedUserCAKeys {tmp_path}/user_ca.pub\n"
        f"AuthorizedPrincipalsFile {tmp_path}/principals\n",
        certify=lambda key: ca.certify_host(trust, key, "node-1"),
    )
    vm = boot("guest", login=new_key(tmp_path / "tenant_key"))
    return Site(
        host=host,
        guest=vm,
        access=SshAccess(identity.key, identity.certificate, identity.known_hosts),
        allocation={
            "id": ID,
            "capacity_shape": "gpu_slice",
            "state": "active",
            "username": USER,
            "connection": {},
            "claims": [
                {"position": 1, "node_id": "node-1", "private_ip": "192.0.2.9"},
                {"position": 0, "node_id": "node-1", "private_ip": "127.0.0.1"},
            ],
        },
        node={"id": "node-1", "address": "127.0.0.1", "port": host.port, "ssh_user": USER},
        caller=Target(port=vm.port, key=tmp_path / "tenant_key"),
        folder=tmp_path,
    )


def test_a_guest_is_measured_through_its_host_by_its_recorded_keys(site: Site) -> None:
    site.record(site.guest.key)
    result = measured(site.target())
    probes = {probe["probe"]: probe["status"] for probe in result["probes"]}
    assert (probes["cpu"], probes["memory"]) == ("ok", "ok")
    # The guest answered, through the host.
    assert "Accepted publickey" in site.guest.log
    assert "Accepted publickey" in site.host.log and "gpuaas-operator" in site.host.log
    assert (site.folder / "known_hosts").read_text() == f"{ID} {site.guest.key}\n"


def test_a_guest_with_another_key_is_not_measured(site: Site, tmp_path: Path) -> None:
    """An earlier or later tenant of the address answers."""
    site.record(new_key(tmp_path / "another"))
    problem = refused(site.target())
    assert problem.code == "target_unreachable"
    assert "Host key verification failed" in problem.found or "changed" in problem.found
    assert "Accepted" not in site.guest.log


def test_a_guest_without_a_recorded_key_is_not_trusted(site: Site) -> None:
    key = site.guest.key
    for keys in ((), ("ssh-ed25519 ",), (f"{key}\n* {key}",), (f"@cert-authority * {key}",)):
        site.record(*keys)
        with pytest.raises(Problem) as caught:
            site.target()
        assert caught.value.code == "guest_key_unknown"
    assert site.guest.log.count("Connection") == 0, "no connection was tried"


def test_a_host_without_the_nodes_certificate_is_not_trusted(site: Site) -> None:
    site.record(site.guest.key)
    site.node["id"] = "node-2"
    assert refused(site.target()).code == "target_unreachable"
    assert "Accepted" not in site.host.log


def test_a_known_guest_needs_no_recorded_key(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_text(site.guest.known_hosts_line())
    assert measured(site.target(known_hosts=file))["label"] == TINY.label
    # The host still needs the node's certificate.
    site.node["id"] = "node-2"
    assert refused(site.target(known_hosts=file)).code == "target_unreachable"


@pytest.mark.parametrize(
    "change", [{"state": "releasing"}, {"state": "requested"}, {"capacity_shape": "baremetal"}]
)
def test_only_a_running_slice_has_a_guest(change: dict[str, str]) -> None:
    allocation = {"capacity_shape": "gpu_slice", "state": "active", "claims": []} | change
    with pytest.raises(Problem, match="no_slice_vm"):
        guest_place(allocation)


# By hand: no reconciler; the operator has both host keys.


@pytest.fixture
def pair(boot: Boot, tmp_path: Path) -> tuple[Machine, Machine, Target]:
    key = new_key(tmp_path / "key")
    host, vm = boot("host", login=key), boot("guest", login=key)
    config = tmp_path / "config"
    config.write_text(
        f"Host *\n  IdentityFile {tmp_path}/key\n  StrictHostKeyChecking no\n"
        f"Host slice\n  HostName 127.0.0.1\n  Port {vm.port}\n"
    )
    known_hosts = tmp_path / "known"
    known_hosts.write_text(host.known_hosts_line() + vm.known_hosts_line())
    via = dataclasses.replace(
        jump(f"{USER}@127.0.0.1:{host.port}"), config=config, known_hosts=known_hosts
    )
    caller = Target(
        host="127.0.0.1", user=USER, port=vm.port, config=config, known_hosts=known_hosts, via=via
    )
    return host, vm, caller


def test_through_a_host_by_hand(pair: tuple[Machine, Machine, Target]) -> None:
    host, vm, caller = pair
    assert measured(caller)["vcpus"] > 0
    assert "Accepted publickey" in host.log and "Accepted publickey" in vm.log
    # Under a name from the caller's SSH configuration.
    assert measured(dataclasses.replace(caller, host="slice", port=0))["vcpus"] > 0


@pytest.mark.parametrize("stranger", [0, 1])
def test_neither_key_is_trusted_on_first_use(
    pair: tuple[Machine, Machine, Target], stranger: int
) -> None:
    caller = pair[2]
    assert caller.known_hosts
    lines = caller.known_hosts.read_text().splitlines(keepends=True)
    del lines[stranger]
    caller.known_hosts.write_text("".join(lines))
    assert refused(caller).code == "target_unreachable"
    assert caller.known_hosts.read_text() == "".join(lines), "no key was added"
    assert "Accepted" not in pair[1].log


@pytest.mark.parametrize(
    ("text", "host", "user", "port"),
    [
        ("j22u15", "j22u15", "", 0),
        ("ubuntu@10.177.36.197:2222", "10.177.36.197", "ubuntu", 2222),
        ("root@[2001:db8::1]:22", "2001:db8::1", "root", 22),
    ],
)
def test_parsing_the_jump_host(text: str, host: str, user: str, port: int) -> None:
    hop = jump(text)
    assert (hop.host, hop.user, hop.port) == (host, user, port)


@pytest.mark.parametrize(
    "text", ["", "a:b", "a:22:22", "a b", "-oProxyCommand=id", "x@-oProxyCommand=id", "$(id)@a"]
)
def test_a_jump_host_is_never_an_option(text: str) -> None:
    with pytest.raises(Problem):
        command(Target(host="10.100.0.10", via=jump(text)))


def test_the_configuration_cannot_weaken_the_jump(tmp_path: Path) -> None:
    lax = tmp_path / "100% mine"
    lax.write_text("Host *\nStrictHostKeyChecking no\nProxyJump elsewhere\n")
    via = dataclasses.replace(jump("j22u15"), config=lax)
    words = command(Target(host="10.100.0.10", config=lax, via=via))
    text = subprocess.run(
        ["ssh", "-G", *words[1:]], capture_output=True, text=True, check=True
    ).stdout
    settings = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    assert "proxyjump" not in settings
    assert "StrictHostKeyChecking=yes" in settings["proxycommand"]
    assert settings["proxycommand"].endswith("-W '[%h]:%p' -- j22u15")
    assert "100%% mine" in settings["proxycommand"], "else ssh would expand a token"
