"""Attacks from inside two slices at once, and where the lab host sees their frames.

The table of frames is that of the rig without a lab host. Beside the host there are a public
network with a server, and a management network with a BMC and a storage service that guests may
use: two network namespaces, which are gone after the host's next boot. A listener on the host sees
every frame that leaves a guest, reaches the host, leaves it, or is delivered to the other guest.
"""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows

from lab.demo import slice_steps
from lab.demo.stage import Stage
from tests.unit.plugins.module_utils.network import frames, rig
from tests.unit.plugins.module_utils.network.frames import Attack

REMOTE = Path(__file__).parent / "remote"
PAUSE_S = 0.02
# The first round is sent again and again; each other round is sent once, with tokens of its own.
ROUNDS = 5
# Interfaces of the host, and addresses, by the place that is behind them.
OUTSIDE = {"world": "world0", "mgmt": "bmc0"}
OUTSIDERS = {"world": "11.0.0.1", "mgmt": rig.BMC}
OUTSIDE_MAC = "02:00:00:00:00:aa"
_FOLDER, _GUEST_FOLDER = "/run/lab-attacks", "/var/lib/attack"
_SEEN_LIMIT_S = 45

_NETWORKS = f"""set -e
ip netns delete lab-world 2> /dev/null || true
ip netns delete lab-mgmt 2> /dev/null || true
wire() {{
  ip netns add "lab-$1"
  ip link add "$2" address {OUTSIDE_MAC} type veth peer name eth0 netns "lab-$1"
  ip address add "$3" dev "$2"
  ip link set "$2" up
  ip -n "lab-$1" link set lo up
  ip -n "lab-$1" address add "$4" dev eth0
  ip -n "lab-$1" link set eth0 up
  ip -n "lab-$1" route add 10.100.0.0/24 via "${{3%/*}}"
}}
wire world {OUTSIDE["world"]} {rig.UPLINK}/24 {OUTSIDERS["world"]}/24
wire mgmt {OUTSIDE["mgmt"]} {rig.MANAGEMENT}/24 {OUTSIDERS["mgmt"]}/24
ip -n lab-world address add {rig.WORLD}/32 dev lo
ip -n lab-world address add {rig.CLOSED}/32 dev lo
ip -n lab-mgmt address add {rig.STORAGE}/32 dev lo
ip route add 9.9.9.0/24 via {OUTSIDERS["world"]}
ip route add 10.30.0.0/24 via {rig.BMC}
"""
# A tenant who is root lets the attack start before the guest's own network. It waits for orders
# until the guest's next boot.
_UNIT = """[Unit]
DefaultDependencies=no
Before=systemd-networkd.service
[Service]
ExecStart=/usr/bin/python3 {folder}/sender.py {mac} {pause} {folder}/rounds /run/attack-waits
Restart=on-failure
[Install]
WantedBy=sysinit.target
"""
_GUEST = """set -e
mkdir -p {folder}
touch /run/attack-waits
base64 -d > {folder}/sender.py <<'DATA'
{sender}DATA
base64 -d <<'DATA' | gunzip > {folder}/rounds
{rounds}DATA
cat > /etc/systemd/system/attack.service <<'DATA'
{unit}DATA
systemctl daemon-reload
systemctl -q enable --now attack.service
sync
"""
# Run on the host. UDP may lose an order, and a sender ignores the same order again.
_ORDER = """import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
    for _ in range(5):
        for address in sys.argv[2:]:
            handle.sendto(sys.argv[1].encode(), (address, 4999))
        time.sleep(0.3)
"""


@dataclass(frozen=True)
class Slice:
    """A running slice as an attacker. place: its name in the table of attacks."""

    allocation: dict[str, Any]
    guest: rig.Guest

    @property
    def place(self) -> str:
        return self.guest.place

    @property
    def port(self) -> str:
        port: str = self.guest.guard.port
        return port


@dataclass(frozen=True)
class Event:
    """A token on an interface of the host. at: seconds since the host's boot."""

    at: float
    interface: str
    direction: str
    token: str


class Attacks:
    """Attacks of two slices on each other, the host and its networks."""

    def __init__(self, stage: Stage, allocations: Iterable[dict[str, Any]]) -> None:
        self.stage = stage
        macs = {slot["slot_id"]: slot["management_mac"] for slot in stage.bundles()}
        address = stage.profile()["network"]["address"]
        self.slices = [
            Slice(
                allocation,
                rig.Guest(
                    f"slice {name}",
                    _flows.Guard(
                        allocation["id"],
                        stage.profile()["network"]["bridge"],
                        macs[allocation["claims"][0]["slot_id"]],
                        allocation["claims"][0]["private_ip"],
                        address,
                    ),
                ),
            )
            for name, allocation in zip("ab", allocations, strict=True)
        ]
        self.attacks: dict[str, Attack] = {}
        self._rounds: list[set[str]] = [set() for _ in range(ROUNDS)]
        self._texts: dict[str, str] = {}
        self._next = 0
        self._open = False

    def install(self) -> None:
        """Let root in both guests install the attack, which waits for orders."""
        gateway = self._mac("ovsbr0")
        for place, table in self._tables().items():
            self._texts[place] = self._build(table, OUTSIDE_MAC if place in OUTSIDE else gateway)
        sender = base64.encodebytes((REMOTE / "sender.py").read_bytes()).decode()

        def run(each: Slice) -> None:
            unit = _UNIT.format(folder=_GUEST_FOLDER, mac=each.guest.guard.mac, pause=PAUSE_S)
            rounds = base64.encodebytes(gzip.compress(self._texts[each.place].encode())).decode()
            script = _GUEST.format(folder=_GUEST_FOLDER, sender=sender, rounds=rounds, unit=unit)
            slice_steps.in_guest(self.stage, "sudo sh -s", script, allocation=each.allocation)

        with ThreadPoolExecutor() as pool:
            list(pool.map(run, self.slices))

    def lay_out(self) -> None:
        """Connect the two networks to the host, and start their senders and the listener."""
        self._open = True
        self.stage.on_host("sh", "-s", stdin=_NETWORKS)
        for name in ("sender.py", "listener.py"):
            self._put(name, (REMOTE / name).read_text())
        self._put("order.py", _ORDER)
        log = f"StandardOutput=append:{_FOLDER}/seen"
        listener = ("python3", f"{_FOLDER}/listener.py", str(frames.PORT))
        self.stage.on_host("systemd-run", "--unit=lab-listener", "-p", log, *listener)
        for place in OUTSIDE:
            self._put(place, self._texts[place])
            words = ("python3", f"{_FOLDER}/sender.py", "eth0", str(PAUSE_S), f"{_FOLDER}/{place}")
            inside = ("ip", "netns", "exec", f"lab-{place}")
            unit = f"--unit=lab-attack-{place}"
            self.stage.on_host("systemd-run", unit, *inside, *words, _FOLDER)

    def await_guards(self) -> None:
        """Wait until the guards know the host's newest addresses."""
        for each in self.slices:
            flows = f"ovs-ofctl dump-flows ovsbr0 cookie={each.guest.guard.cookie}/-1"
            loop = f"until {flows} | grep -q nw_dst={rig.UPLINK}; do sleep 0.5; done"
            self.stage.on_host("timeout", "90", "sh", "-c", f"'{loop}'")

    def order(self, order: str) -> None:
        """Give guests and outsiders an order: `loop` or `stop`."""
        addresses = [each.guest.guard.ip for each in self.slices] + list(OUTSIDERS.values())
        self.stage.on_host("python3", f"{_FOLDER}/order.py", order, *addresses)

    def one_round(self) -> list[str]:
        """Violations of a round, in which every frame comes where it should and nowhere else.

        A busy emulated switch may lose a frame, so the same frames are sent up to three times.
        """
        self._next += 1
        tokens = self._rounds[self._next]
        for _attempt in range(3):
            self.order(str(self._next))
            end = time.monotonic() + _SEEN_LIMIT_S
            while self.violations(tokens) and time.monotonic() < end:
                time.sleep(1)
            if not self.violations(tokens):
                break
            self.order("stop")
        # A frame that goes astray may come a little later.
        time.sleep(1)
        return self.violations(tokens)

    def close(self) -> None:
        """Remove senders, networks and the listener, which may not have lost a frame."""
        if not self._open:
            return
        self._open = False
        units = [f"lab-attack-{place}.service" for place in OUTSIDE]
        self.stage.on_host("systemctl", "stop", *units, "lab-listener.service")
        lost = [event.token for event in self.events() if event.direction == "lost"]
        self.stage.on_host("rm", "-r", _FOLDER)
        for place in OUTSIDE:
            self.stage.on_host("ip", "netns", "delete", f"lab-{place}")
        assert lost == ["0"], lost

    def events(self) -> list[Event]:
        lines = self.stage.on_host("cat", f"{_FOLDER}/seen").splitlines()
        return [
            Event(float(at), interface, direction, token)
            for at, interface, direction, token in (line.split() for line in lines)
        ]

    def strays(self) -> list[str]:
        """Frames that were seen, at any time, where they must not be."""
        seen = self._seen(self.events())
        return [
            f"{attack.place}: {attack.name}: {sorted(places - attack.seen)}"
            for token, attack in self.attacks.items()
            if (places := seen.get(token, set())) - attack.seen
        ]

    def violations(self, tokens: set[str]) -> list[str]:
        """Frames of a round that were not sent, or not seen exactly where they should be."""
        events = self.events()
        seen, sent = self._seen(events), {event.token for event in self.departures(events)}
        return [
            f"{attack.place}: {attack.name}: {sorted(seen.get(token, ()))}, sent: {token in sent}"
            for token, attack in self.attacks.items()
            if token in tokens and (token not in sent or seen.get(token, set()) != attack.seen)
        ]

    def departures(self, events: list[Event]) -> list[Event]:
        """Frames as they leave their senders, before the switch or the host has seen them."""
        cables = {each.port: each.place for each in self.slices}
        cables |= {interface: place for place, interface in OUTSIDE.items()}
        return [
            event
            for event in events
            if event.direction == "in"
            and event.token in self.attacks
            and cables.get(event.interface) == self.attacks[event.token].place
        ]

    def await_world(self, after: float = 0, limit_s: float = 300) -> None:
        """Wait until frames of both slices reach the public server again."""
        end = time.monotonic() + limit_s
        missing = {each.place for each in self.slices}
        while missing:
            assert time.monotonic() < end, f"nothing of {missing} reaches the public server"
            time.sleep(1)
            missing -= {
                self.attacks[event.token].place
                for event in self.events()
                if event.at > after
                and event.token in self.attacks
                and self._place(event) == "world"
            }

    def _seen(self, events: list[Event]) -> dict[str, set[str]]:
        """Places by token, without its sender, which sees its frame again in an error message."""
        seen: dict[str, set[str]] = {}
        for event in events:
            attack, place = self.attacks.get(event.token), self._place(event)
            if attack and place and place != attack.place:
                seen.setdefault(event.token, set()).add(place)
        return seen

    def _place(self, event: Event) -> str:
        """The place that sees a frame here; "" on its way from a sender to the switch."""
        if event.interface in ("ovsbr0", "service", "lo"):
            name = "host" if event.interface == "ovsbr0" else event.interface
            return name if event.direction == "in" else ""
        if event.direction != "out":
            return ""
        places = {each.port: each.place for each in self.slices}
        places |= {interface: place for place, interface in OUTSIDE.items()}
        return places.get(event.interface, event.interface)

    def _tables(self) -> dict[str, list[Attack]]:
        """Attacks by the place of the sender; both guests are attacked from outside."""
        first, second = (each.guest for each in self.slices)
        tables: dict[str, list[Attack]] = {}
        for attack in (*frames.attacks(first, second), *frames.attacks(second, first)):
            tables.setdefault(attack.place, []).append(attack)
        return tables

    def _build(self, table: list[Attack], gateway: str) -> str:
        """A round of frames in each line; every frame has a token of its own."""
        lines = []
        for tokens in self._rounds:
            line = []
            for attack in table:
                token = f"<{len(self.attacks):06d}>"
                self.attacks[token] = attack
                tokens.add(token)
                line.append(attack.build(gateway, token.encode()).hex())
            lines.append(json.dumps(line) + "\n")
        return "".join(lines)

    def _mac(self, interface: str) -> str:
        return self.stage.on_host("cat", f"/sys/class/net/{interface}/address").strip()

    def _put(self, name: str, text: str) -> None:
        command = f"'mkdir -p {_FOLDER}; cat > {_FOLDER}/{name}'"
        self.stage.on_host("sh", "-c", command, stdin=text)
