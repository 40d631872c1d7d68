"""Slice host without VMs: real ovs-vswitchd, nft and dnsmasq, guests as network namespaces.

The switch runs in user space in a namespace of its own, so this machine's network stays as it is. A
guest is an end of a veth pair, whose other end is the guarded port. The port's end drops answers of
its own kernel, which would bypass the switch. Beside the host there are a public network with a
server, and a management network with a BMC.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _baseline_files,
    _bridge,
    _flows,
    _guards,
    _nft,
    _port_filter,
    _switch,
)

TOOLS = ("ovs-vswitchd", "ovsdb-server", "nft", "iptables", "dnsmasq", "ip", "unshare")
NETWORK: dict[str, Any] = {
    "bridge": "ovsbr0",
    "address": "10.100.0.1/24",
    "subnet": "10.100.0.0/24",
    "tmfifo": False,
    "allowed_networks": ["10.30.0.0/24"],
    "denied_networks": ["9.9.9.128/25"],
    "egress_probe": "9.9.9.9",
}
GATEWAY, UPLINK, WORLD, CLOSED = "10.100.0.1", "11.0.0.2", "9.9.9.9", "9.9.9.200"
MANAGEMENT, BMC, STORAGE = "10.20.0.2", "10.20.0.9", "10.30.0.9"
_CLONE_NEWNET = 0x40000000
_SCHEMA = "/usr/share/openvswitch/vswitch.ovsschema"


@dataclass(frozen=True)
class Guest:
    """A slice's guest. place: its network namespace."""

    place: str
    guard: _flows.Guard


A = Guest(
    "rig-a",
    _flows.Guard(
        "23bd713b-6073-4ef7-8a51-2897e902365d",
        "ovsbr0",
        "52:54:00:64:00:0a",
        "10.100.0.10",
        "10.100.0.1/24",
    ),
)
B = Guest(
    "rig-b",
    _flows.Guard(
        "4c0de1b2-91aa-4f10-9d3e-5b6a7c8d9e0f",
        "ovsbr0",
        "52:54:00:64:00:0b",
        "10.100.0.11",
        "10.100.0.1/24",
    ),
)


@dataclass
class Rig:
    """The running machines. folder: of the switch's sockets and logs."""

    folder: Path
    prefix: str
    switch: subprocess.Popen[bytes] | None = None
    database: subprocess.Popen[bytes] | None = None
    dhcp: subprocess.Popen[bytes] | None = None
    namespaces: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def place(self, name: str) -> str:
        return f"{self.prefix}{name}"

    @property
    def host(self) -> str:
        return self.place("host")

    def run(self, argv: Sequence[str], *, place: str = "", **options: Any) -> Any:
        """Run a command on the host, or in another place."""
        environment = {**os.environ, "OVS_RUNDIR": str(self.folder)}
        with inside(place or self.host):
            return subprocess.run(
                argv, check=True, capture_output=True, text=True, env=environment, **options
            )

    def number(self, guest: Guest) -> int:
        """OpenFlow number of a guest's port."""
        if guest.place not in self.numbers:
            self.numbers[guest.place] = _flows.await_port(guest.guard.port)
        return self.numbers[guest.place]

    def start_switch(self) -> None:
        """Start ovs-vswitchd and wait until it has made the configured bridge, if any."""
        self.switch = self._daemon(
            "ovs-vswitchd",
            f"unix:{self.folder}/db.sock",
            f"--pidfile={self.folder}/ovs-vswitchd.pid",
        )
        _until(lambda: list(self.folder.glob("ovs-vswitchd.*.ctl")))

    def kill_switch(self) -> None:
        assert self.switch is not None
        self.switch.send_signal(signal.SIGKILL)
        self.switch.wait()
        for control in self.folder.glob("ovs-vswitchd.*.ctl"):
            control.unlink()

    def establish(self) -> None:
        """Bring the network to its baseline by the product's own code."""
        (_host.path("/proc/net")).mkdir(parents=True, exist_ok=True)
        for _round in range(3):
            self.read_kernel()
            planned = _bridge.plan(NETWORK, _bridge.observe(NETWORK))
            assert not planned.blockers, planned.blockers
            for step in planned.steps:
                _bridge.apply(NETWORK, step)
            if not planned.steps:
                break
        assert not planned.steps, planned.steps
        _host.write(_baseline_files.SETTINGS, json.dumps(_baseline_files.settings(NETWORK)), 0o644)
        _quiet(self.host, "ovsbr0")

    def read_kernel(self) -> None:
        """Copy the host's kernel files that the product reads into its root."""
        for path in ("/proc/net/fib_trie", "/proc/net/route", "/proc/sys/net/ipv4/ip_forward"):
            _host.path(path).parent.mkdir(parents=True, exist_ok=True)
            with inside(self.host):
                text = Path(path.replace("/proc/net", "/proc/thread-self/net")).read_text()
            _host.path(path).write_text(text)
        for link in json.loads(self.run(["ip", "-j", "link"]).stdout):
            folder = _host.path(f"/sys/class/net/{link['ifname']}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "flags").write_text("0x1\n" if "UP" in link["flags"] else "0x0\n")

    def restore(self) -> list[str]:
        """One round of the guardian."""
        self.read_kernel()
        return _guards.restore(NETWORK, with_firewall=True)

    def plug(self, guest: Guest) -> None:
        """The port that libvirt adds when a VM starts."""
        self.run(["ovs-vsctl", f"--db=unix:{self.folder}/db.sock", "--timeout=10", "--may-exist",
                  "add-port", "ovsbr0", guest.guard.port])  # fmt: skip

    def admit(self, guest: Guest) -> None:
        """Admit a guest as slice_vm does before it starts."""
        _guards.save(guest.guard)
        _guards.apply(NETWORK, _guards._change.Step("load_firewall", "", None, None))
        _port_filter.install(guest.guard)
        self.guard(guest)

    def guard(self, guest: Guest) -> None:
        """Load a guest's flows again."""
        rule = _guards.egress_of(NETWORK, guest.guard)
        _flows.install(guest.guard, self.number(guest), _flows.local_addresses(), rule)

    def start_dhcp(self, *options: str) -> None:
        """Start dnsmasq, which has no upstream server without an option."""
        folder = _host.path(_baseline_files.RESERVATIONS)
        folder.mkdir(parents=True, exist_ok=True)
        for guest in (A, B):
            line = f"{guest.guard.mac},id:*,{guest.guard.ip},12h\n"
            (folder / guest.guard.allocation_id).write_text(line)
        text = _baseline_files.dnsmasq(NETWORK)
        text = text.replace(_baseline_files.RESERVATIONS, str(folder))
        text = text.replace(_baseline_files.LEASES, str(self.leases))
        config = self.folder / "dnsmasq.conf"
        config.write_text(text)
        words = (
            *("dnsmasq", f"--conf-file={config}", "--keep-in-foreground", "--log-facility=-"),
            *("--log-dhcp", "--user=root", f"--pid-file={self.folder}/dnsmasq.pid", "--no-resolv"),
        )

        def started() -> bool:
            # A child of the last server, which served a TCP connection, may hold the port a moment.
            if self.dhcp is None or self.dhcp.poll() is not None:
                self.dhcp = self._daemon(*words, *options)
            return (self.folder / "dnsmasq.pid").exists()

        _until(started)

    def stop_dhcp(self) -> None:
        assert self.dhcp is not None
        self.dhcp.kill()
        self.dhcp.wait()
        (self.folder / "dnsmasq.pid").unlink()

    @property
    def leases(self) -> Path:
        return self.folder / "dnsmasq.leases"

    def report(self) -> str:
        """Flows, rules, addresses and counters of the machines, to explain a failed connection."""
        processes = filter(None, (self.dhcp, self.switch, self.database))
        seen = [f"{process.args!r} ended: {process.poll()}" for process in processes]
        for place, used, *words in (
            ("host", "(INPUT|FORWARD|POSTROUTING) |[1-9][0-9]*:", "iptables-save", "--counters"),
            ("host", "packets [1-9]", "nft", "list", "ruleset"),
            ("host", "n_packets=[1-9]", "ovs-ofctl", "dump-flows", NETWORK["bridge"]),
            ("host", "", "ovs-appctl", "dpctl/dump-flows"),
            ("host", "", "ovs-appctl", "dpctl/dump-conntrack"),
            ("host", "", "cat", "/proc/thread-self/net/nf_conntrack"),
            *((place, "", "ip", "neighbour") for place in ("host", "world", A.place)),
            ("host", "", "tail", "-n", "9", str(self.folder / "ovs-vswitchd.out")),
        ):
            try:
                output = self.run(words, place=self.place(place), timeout=20).stdout
            except (subprocess.SubprocessError, OSError) as failure:
                output = repr(failure)
            seen.append(f"# {place}: {' '.join(words)}")
            seen += [line for line in output.splitlines() if re.search(used, line)]
        return "\n".join(seen)

    def close(self) -> None:
        for process in (self.dhcp, self.switch, self.database):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def _daemon(self, *argv: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **{
                f"OVS_{name}": str(self.folder)
                for name in ("RUNDIR", "DBDIR", "LOGDIR", "SYSCONFDIR")
            },
        }
        with (self.folder / f"{argv[0]}.out").open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.host, *argv], env=environment, stdout=log, stderr=log
            )


@contextlib.contextmanager
def machines(folder: Path) -> Iterator[Rig]:
    """A host with the product's network baseline and two guests, A and B, with their guards."""
    rig = Rig(folder, f"rig{os.getpid()}-")
    try:
        _wire(rig)
        subprocess.run(
            ["ovsdb-tool", "create", str(folder / "conf.db"), _SCHEMA],
            check=True,
            capture_output=True,
        )
        rig.database = rig._daemon(
            "ovsdb-server", f"--remote=punix:{folder}/db.sock", str(folder / "conf.db")
        )
        _until((folder / "db.sock").exists)
        rig.run(["ovs-vsctl", f"--db=unix:{folder}/db.sock", "--no-wait", "init"])
        rig.start_switch()
        _host.path("/run").mkdir(parents=True)
        _host.path(_switch.FOLDER).symlink_to(folder)
        rig.establish()
        for guest in (A, B):
            rig.plug(guest)
            rig.admit(guest)
        rig.start_dhcp()
        yield rig
    finally:
        rig.close()


@contextlib.contextmanager
def standing() -> Iterator[tuple[Rig, pytest.MonkeyPatch]]:
    """The machines, with the product acting on their host until the end."""
    # Paths of sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="rig"))
    patch = pytest.MonkeyPatch()
    # A stand-in for nft prints a table in another form.
    _nft.forget()
    try:
        patch.setattr(_host, "ROOT", folder / "root")
        commands_on(folder, f"rig{os.getpid()}-host", patch)
        with machines(folder) as rig:
            yield rig, patch
    finally:
        patch.undo()
        _nft.forget()
        shutil.rmtree(folder)


def commands_on(rig_folder: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the product's commands act on the rig's host."""
    real, outside = _command.run, _namespace()

    def run(argv: Sequence[str], **options: Any) -> Any:
        words = list(argv)
        if words[0] == "ovs-vsctl":
            words.insert(1, f"--db=unix:{rig_folder}/db.sock")
        if words[0] == "ovs-vsctl" and "add-br" in words:
            # There is no kernel module for the switch in a namespace.
            words += [
                "--",
                "set",
                "bridge",
                words[words.index("add-br") + 1],
                "datapath_type=netdev",
            ]
        if words[0] == "unshare":
            return real(words, **options)
        if words[0] == "conntrack" and not is_installed("conntrack"):
            # The rules alone cut connections then.
            return _command.Result(0, "", "")
        words = ["env", f"OVS_RUNDIR={rig_folder}", *words]
        # Parity's probe has entered a namespace of its own.
        with inside(host) if _namespace() == outside else contextlib.nullcontext():
            return real(words, **options)

    monkeypatch.setattr(_command, "run", run)


def missing() -> str:
    """Why the rig cannot run here, or "". CI requires it."""
    reason = _missing()
    assert not (reason and os.environ.get("SLICE_TEST_RIG") == "required"), reason
    return reason


def _missing() -> str:
    absent = [tool for tool in TOOLS if not is_installed(tool)]
    if absent:
        return f"needs {', '.join(absent)}"
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    tried = ["unshare", "--net", "nft", "add", "table", "inet", "rig"]
    done = subprocess.run(tried, check=False, capture_output=True, text=True)
    return f"needs a kernel with namespaces and nftables: {done.stderr}" if done.returncode else ""


def is_installed(tool: str) -> bool:
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is not None


@contextlib.contextmanager
def inside(place: str) -> Iterator[None]:
    """Sockets made inside belong to the namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{place}", os.O_RDONLY)
    try:
        assert library.setns(there, _CLONE_NEWNET) == 0
        try:
            yield
        finally:
            assert library.setns(here, _CLONE_NEWNET) == 0
    finally:
        os.close(here)
        os.close(there)


def _namespace() -> int:
    return Path("/proc/thread-self/ns/net").stat().st_ino


def packet_socket(place: str, interface: str) -> socket.socket:
    """A raw socket that sees every frame of an interface."""
    with inside(place):
        handle = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        handle.bind((interface, 0))
    handle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    handle.setblocking(False)
    return handle


def hardware_address(place: str, interface: str) -> str:
    with packet_socket(place, interface) as handle:
        return ":".join(f"{byte:02x}" for byte in handle.getsockname()[4])


def _wire(rig: Rig) -> None:
    """Namespaces, cables and addresses."""
    # The first namespace of a machine mounts a folder, which two processes cannot do at once.
    with Path("/run/lock/gpuaas-rig").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in ("host", "world", "mgmt", A.place, B.place):
            subprocess.run(["ip", "netns", "add", rig.place(name)], check=True, capture_output=True)
            rig.namespaces.append(rig.place(name))
    settings = {name: ["link set lo up"] for name in ("host", "world", "mgmt", A.place, B.place)}
    for name in settings:
        with inside(rig.place(name)):
            # Kernels must not send frames of their own, which the guard would count.
            Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
            Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    cables = (
        ("up0", "world"),
        ("mgmt0", "mgmt"),
        (A.guard.port, A.place),
        (B.guard.port, B.place),
    )
    settings["host"] += [
        f"link add {here} up type veth peer name eth0 netns {rig.place(there)}"
        for here, there in cables
    ]
    addresses = (
        ("host", f"{UPLINK}/24", "up0"),
        ("host", f"{MANAGEMENT}/24", "mgmt0"),
        ("world", "11.0.0.1/24", "eth0"),
        ("world", f"{WORLD}/32", "lo"),
        ("world", f"{CLOSED}/32", "lo"),
        ("mgmt", f"{BMC}/24", "eth0"),
        ("mgmt", f"{STORAGE}/32", "lo"),
        *((guest.place, f"{guest.guard.ip}/24", "eth0") for guest in (A, B)),
    )
    for guest in (A, B):
        settings[guest.place].append(f"link set eth0 address {guest.guard.mac}")
    for place, address, interface in addresses:
        settings[place] += [f"address add {address} dev {interface}", f"link set {interface} up"]
    settings["host"] += ["route add default via 11.0.0.1", f"route add 10.30.0.0/24 via {BMC}"]
    settings["world"].append(f"route add 10.100.0.0/24 via {UPLINK}")
    settings["mgmt"].append(f"route add 10.100.0.0/24 via {MANAGEMENT}")
    for guest in (A, B):
        settings[guest.place].append(f"route add default via {GATEWAY}")
    for place, lines in settings.items():
        rig.run(["ip", "-batch", "-"], place=rig.place(place), input="\n".join(lines))
    for here, there in cables:
        _quiet(rig.host, here)
        _quiet(rig.place(there), "eth0")
    # The kernel behind a port's end must not answer: on a real host a tap has no kernel behind it.
    drop = "".join(
        f"chain {guest.place[-1]} {{ type filter hook ingress device {guest.guard.port} "
        "priority 0; policy drop; }\n"
        for guest in (A, B)
    )
    rig.run(["nft", "-f", "-"], input=f"table netdev rig {{\n{drop}}}\n")


def _quiet(place: str, interface: str) -> None:
    """Switch checksum offload off: the user-space switch drops unfinished checksums."""
    with inside(place):
        handle = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with handle:
        for command in (0x17, 0x1F):  # ETHTOOL_STXCSUM, ETHTOOL_STSO
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), ctypes.addressof(value)).ljust(
                40, b"\0"
            )
            fcntl.ioctl(handle, 0x8946, request)  # SIOCETHTOOL


def _until(ready: Any, deadline: float = 60) -> None:
    end = time.monotonic() + deadline
    while not ready():
        assert time.monotonic() < end, "the switch or dnsmasq did not start"
        time.sleep(0.02)
