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
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.network import _flows

from lab.demo import slice_steps
from lab.demo.stage import Stage
from tests.lab import networks
from tests.unit.plugins.module_utils.network import frames, rig
from tests.unit.plugins.module_utils.network.frames import Attack

REMOTE = Path(__file__).parent / "remote"
# After each frame. Both guests and the listener share the lab host's emulated processors.
PAUSE_S = 0.05
# The first round is repeated until the next order. Other rounds are sent once, with new tokens.
ROUNDS = 5
# Interfaces of the host, and addresses, by the place behind them.
OUTSIDE = {"world": networks.WORLD, "mgmt": networks.MANAGEMENT}
OUTSIDERS = {"world": networks.ROUTER, "mgmt": rig.BMC}
_FOLDER, _GUEST_FOLDER = "/run/lab-attacks", "/var/lib/attack"
_SEEN_LIMIT_S, _ORDER_LIMIT_S = 45, 180

_NETWORKS = f"""{networks.WIRE}{networks.WIRE_WORLD}
ip -n lab-world address add {rig.CLOSED}/32 dev lo
{networks.WIRE_MANAGEMENT}ip -n lab-world route add 10.100.0.0/24 via {rig.UPLINK}
ip -n lab-mgmt route add 10.100.0.0/24 via {rig.MANAGEMENT}
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
test -d /sys/firmware/efi && echo uefi || echo bios
id -u
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
        self._next = self._orders = 0
        self._gateway = self._log = ""
        self._open = False

    def install(self) -> list[list[str]]:
        """Let root in both guests install the attack, which waits for orders.

        Returns firmware and user of each guest.
        """
        self._gateway = gateway = self._mac()
        for place, table in self._tables().items():
            self._texts[place] = self._build(
                table, networks.OUTSIDE_MAC if place in OUTSIDE else gateway
            )
        sender = base64.encodebytes((REMOTE / "sender.py").read_bytes()).decode()

        def run(each: Slice) -> list[str]:
            unit = _UNIT.format(folder=_GUEST_FOLDER, mac=each.guest.guard.mac, pause=PAUSE_S)
            rounds = base64.encodebytes(gzip.compress(self._texts[each.place].encode())).decode()
            script = _GUEST.format(folder=_GUEST_FOLDER, sender=sender, rounds=rounds, unit=unit)
            output = slice_steps.in_guest(
                self.stage, "sudo sh -s", script, allocation=each.allocation
            )
            return output.split()

        with ThreadPoolExecutor() as pool:
            return list(pool.map(run, self.slices))

    def lay_out(self) -> None:
        """Connect the two networks to the host, and start their senders and the listener.

        Guards that are loaded know the host's new addresses afterwards.
        """
        files = {path.name: path.read_text() for path in REMOTE.glob("*.py")}
        files |= {place: self._texts[place] for place in OUTSIDE}
        lines = [f"set -e\nmkdir -p {_FOLDER}\n: > {_FOLDER}/seen\n{_NETWORKS}"]
        for name, text in files.items():
            lines.append(f"cat > {_FOLDER}/{name} <<'DATA'\n{text}DATA\n")
        lines.append(
            f"systemd-run -q --unit=lab-listener -p StandardOutput=append:{_FOLDER}/seen"
            f" python3 {_FOLDER}/listener.py {frames.PORT}\n"
        )
        for place in OUTSIDE:
            lines.append(
                f"systemd-run -q --unit=lab-attack-{place} ip netns exec lab-{place} python3"
                f" {_FOLDER}/sender.py eth0 {PAUSE_S} {_FOLDER}/{place} {_FOLDER}\n"
            )
        for each in self.slices:
            flows = f"ovs-ofctl dump-flows ovsbr0 cookie={each.guest.guard.cookie}/-1"
            lines.append(
                f"until ! flows=$({flows} | grep cookie=0x) || "
                f'echo "$flows" | grep -q nw_dst={rig.UPLINK}; do sleep 0.5; done\n'
            )
        self._open, self._log = True, ""
        self.stage.on_host("sh", "-s", stdin="".join(lines))
        # Frames of an earlier boot are addressed to it, and guests keep it for minutes.
        assert self._mac() == self._gateway, "the gateway has another hardware address"

    def order(self, order: str) -> None:
        """Give guests and outsiders an order, which each confirms: `loop`, `stop` or a round."""
        self._watch(order=order)

    def one_round(self) -> list[str]:
        """Violations of a round: frames that were lost or arrived at a wrong place.

        A busy emulated switch may lose a frame, so the same frames are sent up to three times.
        """
        self._next += 1
        tokens = self._rounds[self._next]
        groups = [
            [f"{interface} {direction} {token}"]
            for token in sorted(tokens)
            for interface, direction in self._way(self.attacks[token])
        ]
        for _attempt in range(3):
            self._watch(order=str(self._next), groups=groups)
            if not self.violations(tokens):
                break
        return self.violations(tokens)

    def close(self) -> None:
        """Remove senders, networks and the listener, which may not have lost a frame."""
        if not self._open:
            return
        self._open = False
        units = [f"lab-attack-{place}.service" for place in OUTSIDE]
        delete = [f"ip netns delete lab-{place}\n" for place in OUTSIDE]
        last = self.stage.on_host("sh", "-s", stdin=(
            f"set -e\nsystemctl stop {' '.join(units)} lab-listener.service\n"
            f"grep ' lost ' {_FOLDER}/seen\nrm -r {_FOLDER}\n{''.join(delete)}"
        ))  # fmt: skip
        assert last.split()[-2:] == ["lost", "0"], last

    def remove(self) -> None:
        """Take the attack out of the guests; from their next boot on it would send by itself."""
        stop = "sudo systemctl -q disable --now attack.service"
        for each in self.slices:
            slice_steps.in_guest(self.stage, stop, allocation=each.allocation)

    def events(self) -> list[Event]:
        """Tokens on the host's interfaces since the networks were laid out, up to now."""
        self._watch()
        return self._seen_so_far()

    def strays(self) -> list[str]:
        """Frames seen at a forbidden place since the networks were laid out."""
        seen = self._places(self.events())
        return [
            f"{attack.place}: {attack.name}: {sorted(places - attack.seen)}"
            for token, attack in self.attacks.items()
            if (places := seen.get(token, set())) - attack.seen
        ]

    def violations(self, tokens: set[str]) -> list[str]:
        """Frames of a round that were not sent, or not seen exactly where they should be."""
        events = self._seen_so_far()
        seen, sent = self._places(events), {event.token for event in self.departures(events)}
        return [
            f"{attack.place}: {attack.name}: {sorted(seen.get(token, ()))}, sent: {token in sent}"
            for token, attack in self.attacks.items()
            if token in tokens and (token not in sent or seen.get(token, set()) != attack.seen)
        ]

    def departures(self, events: list[Event]) -> list[Event]:
        """Frames as they leave their senders, before the switch or the host handles them."""
        return [
            event
            for event in events
            if event.direction == "in"
            and event.token in self.attacks
            and event.interface == self._cable(self.attacks[event.token].place)
        ]

    def await_world(self, after: float = 0, limit_s: float = 300) -> None:
        """Wait until frames of both slices reach the public server again."""
        groups = [
            [
                f"{OUTSIDE['world']} out {token}"
                for token, attack in self.attacks.items()
                if attack.place == each.place and "world" in attack.seen
            ]
            for each in self.slices
        ]
        self._watch(groups=groups, after=after, limit_s=limit_s)
        seen = {
            self.attacks[event.token].place
            for event in self._seen_so_far()
            if event.at >= after and event.token in self.attacks and self._place(event) == "world"
        }
        missing = {each.place for each in self.slices} - seen
        sent = {self.attacks[e.token].place for e in self.departures(self._seen_so_far())}
        assert not missing, f"nothing of {missing} reaches the public server; {sent} have sent"

    def _watch(
        self,
        *,
        order: str = "",
        groups: Iterable[list[str]] = (),
        after: float = 0,
        limit_s: float = _SEEN_LIMIT_S,
    ) -> None:
        """Give an order, wait for a line of each group, and read the listener's new lines.

        It uses a single connection, which costs an emulated host seconds of processor time.
        """
        if order:
            self._orders += 1
        addresses = [each.guest.guard.ip for each in self.slices] + list(OUTSIDERS.values())
        task = {
            "file": f"{_FOLDER}/seen",
            "offset": len(self._log),
            "order": f"{self._orders} {order}" if order else "",
            "addresses": addresses,
            "order_limit_s": _ORDER_LIMIT_S,
            "groups": list(groups),
            "after": after,
            "limit_s": limit_s,
        }
        words = ("python3", f"{_FOLDER}/watch.py")
        limit = _ORDER_LIMIT_S + limit_s + 120
        self._log += self.stage.on_host(*words, stdin=json.dumps(task), limit_s=limit)

    def _seen_so_far(self) -> list[Event]:
        return [
            Event(float(at), interface, direction, token)
            for at, interface, direction, token in map(str.split, self._log.splitlines())
        ]

    def _places(self, events: list[Event]) -> dict[str, set[str]]:
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
        places = {self._cable(place): place for place in self._cables()}
        return places.get(event.interface, event.interface)

    def _way(self, attack: Attack) -> list[tuple[str, str]]:
        """Interface and direction where a frame leaves its sender, and where each place sees it."""
        ways = {"host": ("ovsbr0", "in"), "service": ("service", "in")}
        seen = [ways.get(place) or (self._cable(place), "out") for place in sorted(attack.seen)]
        return [(self._cable(attack.place), "in"), *seen]

    def _cable(self, place: str) -> str:
        """The host's interface to a slice or a network."""
        return self._cables()[place]

    def _cables(self) -> Mapping[str, str]:
        return {**OUTSIDE, **{each.place: each.port for each in self.slices}}

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

    def _mac(self) -> str:
        return self.stage.on_host("cat", "/sys/class/net/ovsbr0/address").strip()
