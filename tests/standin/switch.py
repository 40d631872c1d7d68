#!/usr/bin/python3 -IS
"""Stand-in for a host's Open vSwitch, nft and iptables that keeps all settings in memory.

Tests call `answer`. On the copied machine of tests/data/deployed_machine this file is installed
under the names of these programs, and keeps its state in a file. Standard library only.

Flows are kept as text, because the guards are written as the switch prints them. That real packets
see the same is shown in tests/unit/plugins/module_utils/network/test_isolation.py.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = ("ovs-vsctl", "ovs-ofctl", "ovs-appctl", "nft", "unshare", "iptables-restore")
FEATURES = "Masked set action: Yes\nCT state: Yes\nCT zone: Yes\n"
METER_FEATURES = "max_meter:262144 max_bands:8\ncapabilities: kbps pktps burst stats\n"
LOCAL = 65534

_STATE = Path("/run/machine-switch")

Answer = tuple[int, str, str]


class Unknown(Exception):
    """A command that this stand-in does not know."""


@dataclass
class Switch:
    """bridges: ports of each bridge with their numbers. modes: fail mode by bridge. flows: text by
    bridge, as added. tables: text of nft's tables by name. features: of the datapath. meters:
    rate by number, of all bridges. zones: limit of connections by zone. filter, nat: rules of
    iptables.
    """

    bridges: dict[str, dict[str, int]] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)
    flows: dict[str, list[str]] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    features: str = FEATURES
    meters: dict[str, str] = field(default_factory=dict)
    meter_features: str = METER_FEATURES
    zones: dict[str, str] = field(default_factory=dict)
    filter: list[str] = field(default_factory=list)
    nat: list[str] = field(default_factory=list)

    def answer(self, argv: Sequence[str], stdin: str | None = None) -> Answer:
        """Exit code, output and error of one of PROGRAMS."""
        name, words = argv[0], [word for word in argv[1:] if not word.startswith("--timeout=")]
        if name == "ovs-vsctl" and words[0] == "br-exists":
            return (0 if words[1] in self.bridges else 2), "", ""
        if name == "ovs-vsctl":
            # A line of output for each command that has output.
            out = [line for command in _split(words) for line in self._vsctl(command)]
            return 0, "".join(f"{line}\n" for line in out), ""
        if name == "ovs-ofctl":
            return self._ofctl(words, stdin or "")
        if name == "ovs-appctl":
            return 0, self._appctl(words), ""
        if name in ("nft", "iptables", "iptables-restore"):
            return (self._nft if name == "nft" else self._iptables)(words, stdin or "")
        if name == "unshare" and words[:3] == ["--net", "sh", "-c"]:
            load, *listings = words[3].split(" && ")
            elsewhere = Switch()
            assert load == "nft -f -", words
            loaded = elsewhere.answer(load.split(), stdin)
            shown = [
                (0, "\0", "") if listing == r"printf '\0'" else elsewhere.answer(listing.split())
                for listing in listings
            ]
            failed = [answer for answer in (loaded, *shown) if answer[0]]
            return failed[0] if failed else (0, "".join(out for _code, out, _error in shown), "")
        raise Unknown(" ".join(argv))

    def _vsctl(self, words: list[str]) -> Iterator[str]:
        columns = next((w.partition("=")[2] for w in words if w.startswith("--columns=")), "")
        match [word for word in words if not word.startswith("--")]:
            case ["list-br"]:
                yield from self.bridges
            case ["list-ports", bridge]:
                yield from self.bridges[bridge]
            case ["find", "Bridge", name]:
                bridge = name.removeprefix("name=")
                mode = self.modes.get(bridge) or ["set", []]
                yield _table(columns, [[mode]] if bridge in self.bridges else [])
            case ["find", "Interface", name]:
                ports = dict(self._interfaces())
                number = ports.get(name.removeprefix("name="))
                yield _table(columns, [] if number is None else [[number]])
            case ["list", "Interface"]:
                yield _table(columns, [list(row) for row in self._interfaces()])
            case [_, "QoS", *_]:
                yield _table(columns, [])
            case change:
                self._set(change)

    def _set(self, words: list[str]) -> None:
        match words:
            case ["add-br", bridge]:
                if bridge not in self.bridges:
                    self.bridges[bridge], self.flows[bridge] = {}, [_NORMAL]
            case ["set-fail-mode", bridge, mode]:
                # Open vSwitch drops all flows with a change; an open bridge forwards everything.
                if self.modes.get(bridge) != mode:
                    self.flows[bridge] = [] if mode == "secure" else [_NORMAL]
                self.modes[bridge] = mode
            case ["del-br", bridge]:
                for part in (self.bridges, self.modes, self.flows):
                    part.pop(bridge, None)
            case ["add-port", bridge, port]:
                used = {number for ports in self.bridges.values() for number in ports.values()}
                self.bridges[bridge][port] = max(used, default=0) + 1
            case ["del-port", *_, port]:
                for ports in self.bridges.values():
                    ports.pop(port, None)
            case ["set", "interface", *_]:
                pass
            case _:
                raise Unknown(f"ovs-vsctl {' '.join(words)}")

    def _interfaces(self) -> Iterator[tuple[str, int]]:
        for bridge, ports in self.bridges.items():
            yield bridge, LOCAL
            yield from ports.items()

    def _ofctl(self, words: list[str], stdin: str) -> Answer:
        match [word for word in words if not word.startswith("--")]:
            case [_, bridge, *_] if bridge not in self.bridges:
                return 1, "", f"ovs-ofctl: {bridge} is not a bridge or a socket\n"
            case ["dump-flows", bridge, *match]:
                chosen = [f for f in self.flows[bridge] if _chosen(f, ",".join(match))]
                return 0, "".join(f" {_printed(flow)}\n" for flow in chosen), ""
            case ["add-flows", bridge, "-"]:
                assert "--bundle" in words, "not one transaction"
                flows = list(self.flows[bridge])
                for line in stdin.splitlines():
                    verb, _, text = line.partition(" ")
                    if verb == "delete":
                        flows = [flow for flow in flows if not _chosen(flow, text)]
                    elif verb == "add" and ",actions=" in text:
                        flows = [flow for flow in flows if _key(flow) != _key(text)] + [text]
                    else:
                        return 1, "", f"ovs-ofctl: -:1: {line}\n"
                self.flows[bridge] = flows
                return 0, "", ""
            case ["del-flows", bridge, match]:
                self.flows[bridge] = [f for f in self.flows[bridge] if not _chosen(f, match)]
                return 0, "", ""
            case [verb, _, *text] if "meter" in verb:
                return 0, self._meter(verb, ",".join(text)), ""
        raise Unknown(f"ovs-ofctl {' '.join(words)}")

    def _meter(self, verb: str, text: str) -> str:
        number, rate = text.partition(",")[0].removeprefix("meter="), text.rpartition("rate=")[2]
        if verb == "meter-features":
            return self.meter_features
        if verb == "dump-meters":
            rows = (f"meter={n} pktps stats bands=\ntype=drop rate={r}\n" for n, r in
                    self.meters.items())  # fmt: skip
            return "".join(rows)
        if verb in ("add-meter", "mod-meter"):
            self.meters[number] = rate
        elif verb == "del-meter":
            self.meters.pop(number, None)
        else:
            raise Unknown(f"ovs-ofctl {verb}")
        return ""

    def _appctl(self, words: list[str]) -> str:
        match words:
            case ["dpif/show-dp-features", _]:
                return self.features
            case ["dpctl/ct-get-limits"]:
                rows = (f"zone={z},limit={limit},count=0\n" for z, limit in self.zones.items())
                return "".join(["default limit=0\n", *rows])
            case ["dpctl/ct-set-limits", text]:
                zone, _, limit = text.removeprefix("zone=").partition(",limit=")
                self.zones[zone] = limit
                return ""
            case ["dpctl/flush-conntrack", _] | ["revalidator/purge"] | ["version"]:
                return ""
        raise Unknown(f"ovs-appctl {' '.join(words)}")

    def _nft(self, words: list[str], stdin: str) -> Answer:
        match words:
            case ["--stateless", *_, "list", "table", family, name]:
                if f"{family} {name}" in self.tables:
                    return 0, self.tables[f"{family} {name}"], ""
                return 1, "", "Error: No such file or directory\n"
            case ["list", "ruleset", family]:
                return 0, "".join(v for k, v in self.tables.items() if k.startswith(family)), ""
            case ["list", "set", *_]:
                return 0, "", ""
            case ["-f", "-"] if stdin.startswith("add element "):
                return 0, "", ""
            case ["-f", "-"]:
                for line, rest in _lines(stdin):
                    if line.startswith("delete table "):
                        del self.tables[line.removeprefix("delete table ")]
                    elif line.endswith("{"):
                        self.tables[line.removeprefix("table ").removesuffix(" {")] = rest
                    else:
                        self.tables.setdefault(line.removeprefix("table "), "")
                return 0, "", ""
        raise Unknown(f"nft {' '.join(words)}")

    def _iptables(self, words: list[str], stdin: str) -> Answer:
        """`-S CHAIN`, `-F CHAIN`, or a transaction of iptables-restore."""
        rules = self.nat if "nat" in words or stdin.startswith("*nat") else self.filter
        chain = words[-1]
        if "-S" in words:
            policy = "ACCEPT" if rules is self.nat else "DROP"
            shown = [f"-P {chain} {policy}", *(r for r in rules if r.split()[1] == chain)]
            return 0, "".join(f"{line}\n" for line in shown), ""
        if "-F" in words:
            rules[:] = [rule for rule in rules if rule.split()[1] != chain]
            return 0, "", ""
        for line in stdin.splitlines()[1:-1]:
            verb, chain, *rest = line.split()
            if verb == "-D":
                rules.remove(" ".join(["-A", chain, *rest]))
            else:
                assert verb == "-I", line
                before = [n for n, rule in enumerate(rules) if rule.split()[1] == chain]
                place = [*before, len(rules)][int(rest[0]) - 1]
                rules.insert(place, " ".join(["-A", chain, *rest[1:]]))
        return 0, "", ""


_NORMAL = "cookie=0x0,table=0,priority=0,actions=NORMAL"


def _split(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in [*words, "--"]:
        if word != "--":
            command.append(word)
        elif command:
            yield command
            command = []


def _table(columns: str, rows: list[list[Any]]) -> str:
    return json.dumps({"data": rows, "headings": columns.split(",")})


def _fields(flow: str) -> list[str]:
    return flow.partition(",actions=")[0].split(",")


def _key(flow: str) -> frozenset[str]:
    """A flow with the same table, priority and match replaces its predecessor."""
    return frozenset(word for word in _fields(flow) if not word.startswith("cookie="))


def _chosen(flow: str, match: str) -> bool:
    """Whether a flow has all fields of `match`; an empty match takes every flow."""
    for word in filter(None, match.split(",")):
        name, _, value = word.partition("=")
        if name == "out_port":
            if f"output:{value}" not in flow.partition(",actions=")[2].split(","):
                return False
        elif word.removesuffix("/-1") not in _fields(flow):
            return False
    return True


def _printed(flow: str) -> str:
    """A flow as `--no-stats` prints it: commas between match fields only."""
    head, _, actions = flow.partition(",actions=")
    words = head.split(",")
    fields = [word for word in words if word.startswith(("cookie=", "table="))]
    match = [word for word in words if not word.startswith(("cookie=", "table="))]
    return f"{', '.join([*fields, ','.join(match)])} actions={actions}"


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Statements of nft, and each table's whole text."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line[0] not in " }":
            end = lines.index("}\n", number) + 1 if line.endswith("{\n") else number + 1
            yield line.strip(), "".join(lines[number:end])


def main(argv: list[str]) -> int:
    """Run a call of a program on the copied machine.

    A bridge is a real interface there, and nft's tables belong to the network namespace.
    """
    name = Path(argv[0]).name
    stdin = sys.stdin.read() if {"-", "--noflush"} & {*argv} else None
    namespace = str(Path("/proc/self/ns/net").stat().st_ino)
    with _STATE.open("a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        kept = json.loads(handle.read() or "{}")
        switch = Switch(**{**kept, "tables": kept.get("tables", {}).get(namespace, {})})
        before = set(switch.bridges)
        code, out, error = switch.answer([name, *argv[1:]], stdin)
        tables = {**kept.get("tables", {}), namespace: switch.tables}
        for bridge in set(switch.bridges) - before:
            subprocess.run(["ip", "tuntap", "add", "dev", bridge, "mode", "tap"], check=True)
        for bridge in before - set(switch.bridges):
            subprocess.run(["ip", "link", "del", "dev", bridge], check=True)
        handle.truncate(0)
        handle.write(json.dumps({**asdict(switch), "tables": tables}))
    sys.stdout.write(out)
    sys.stderr.write(error)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
