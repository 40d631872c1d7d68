"""Rate limit of a slice's bridge port: policing of sent traffic, shaping of received traffic.

Open vSwitch polices by two columns of the Interface and shapes by a QoS row that the Port
references. Only that row outlives its port, so it contains the allocation's id. libvirt's
`<bandwidth>` is not used, because it is set only at the start, and neither compared nor repaired on
a running machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _object_names
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _switch

LABEL = "gpuaas-allocation"
_SHAPER = "linux-htb"

# A frame of 1,500 bytes is 12 kb and would never pass with a smaller burst.
LEAST_BURST_KB = 12


@dataclass(frozen=True)
class Limit:
    """rate_kbps: 1,000 bits a second, each way. burst_kb: 1,000 bits that may be sent at once."""

    rate_kbps: int
    burst_kb: int

    @property
    def bits(self) -> str:
        return str(self.rate_kbps * 1000)

    def document(self) -> dict[str, int]:
        return {"rate_kbps": self.rate_kbps, "burst_kb": self.burst_kb}


@dataclass(frozen=True)
class State:
    """State of an allocation in the switch's database.

    policed: the Interface's columns, zeros without a limit or a port. shaped: type, rate in bits a
    second and row that the Port references, if any. rows: the QoS rows of this allocation.
    """

    policed: tuple[int, int] = (0, 0)
    shaped: tuple[str, str, str] = ("", "", "")
    rows: tuple[str, ...] = ()

    def holds(self, limit: Limit | None) -> bool:
        """The port has this limit and the allocation has no other QoS row."""
        if limit is None:
            return self == UNLIMITED
        kind, bits, row = self.shaped
        return (
            self.policed == (limit.rate_kbps, limit.burst_kb)
            and (kind, bits) == (_SHAPER, limit.bits)
            and self.rows == (row,)
        )

    @property
    def lost(self) -> bool:
        """Whether traffic passes without a limit, in a direction or in both."""
        return not all(self.policed) or not self.shaped[2]

    def document(self) -> dict[str, Any]:
        """The limit as Open vSwitch has it; {} without a limit."""
        if self == UNLIMITED:
            return {}
        kind, bits, _row = self.shaped
        return {
            "rate_kbps": self.policed[0],
            "burst_kb": self.policed[1],
            "shaper": kind,
            "shaped_bps": int(bits) if bits.isdigit() else 0,
            "rows": len(self.rows),
        }


# Neither a limit nor a trace of a limit.
UNLIMITED = State()


def limit(options: Mapping[str, Any] | None) -> Limit | None:
    """The limit in a module's option; None without it."""
    if not options:
        return None
    parsed = Limit(int(options["rate_kbps"]), int(options["burst_kb"]))
    if parsed.rate_kbps < 1 or parsed.burst_kb < LEAST_BURST_KB:
        expected = f"a rate of at least 1 kbps and a burst of at least {LEAST_BURST_KB} kb"
        raise _object_names.invalid("mgmt_qos", expected, str(parsed.document()))
    return parsed


def observe(allocation_id: str) -> State:
    """The whole state from a single read."""
    port = _object_names.port_name(allocation_id)
    interfaces, ports, rows = _switch.rows(
        ("Interface", "ingress_policing_rate,ingress_policing_burst", port),
        ("Port", "qos", port),
        ("QoS", "_uuid,type,other_config,external_ids", ""),
    )
    named = _uuid(ports[0][0]) if ports else ""
    by_id = {_uuid(row[0]): row for row in rows}
    owned = [name for name, row in by_id.items() if _map(row[3]).get(LABEL) == allocation_id]
    shaped = ("", "", "")
    if named in by_id:
        shaped = (by_id[named][1], _map(by_id[named][2]).get("max-rate", ""), named)
    policed = (int(interfaces[0][0]), int(interfaces[0][1])) if interfaces else (0, 0)
    return State(policed, shaped, tuple(sorted(owned)))


def rows() -> dict[str, str]:
    """Allocation by QoS row, for the rows of every slice. A row outlives port and bridge."""
    (listed,) = _switch.rows(("QoS", "_uuid,external_ids", ""))
    owners = {_uuid(row): _map(ids).get(LABEL, "") for row, ids in listed}
    return {row: owner for row, owner in owners.items() if owner}


def install(allocation_id: str, requested: Limit | None) -> None:
    """Set or remove the port's limit in one transaction of the switch's database."""
    port = _object_names.port_name(allocation_id)
    argv = ["ovs-vsctl", "--timeout=30"]
    if requested is None:
        argv += ["--", "--if-exists", "set", "Interface", port, *_policing(0, 0)]
        _command.run([*argv, *_forget(allocation_id, port)])
        return
    # Without --if-exists, because a missing port must not count as limited.
    argv += ["--", "set", "Interface", port, *_policing(requested.rate_kbps, requested.burst_kb)]
    argv += _forget(allocation_id, port)
    argv += ["--", "--id=@limit", "create", "QoS", f"type={_SHAPER}"]
    argv += [f"other_config:max-rate={requested.bits}", f"external_ids:{LABEL}={allocation_id}"]
    argv += ["--", "set", "Port", port, "qos=@limit"]
    _command.run(argv)


def _policing(rate: int, burst: int) -> list[str]:
    return [f"ingress_policing_rate={rate}", f"ingress_policing_burst={burst}"]


def _forget(allocation_id: str, port: str) -> list[str]:
    """Clear the port's reference first, because a referenced row cannot be destroyed."""
    words = ["--", "--if-exists", "clear", "Port", port, "qos"]
    rows = observe(allocation_id).rows
    return [*words, *(["--", "--if-exists", "destroy", "QoS", *rows] if rows else [])]


def _uuid(value: Any) -> str:
    """OVSDB writes a row's name as ["uuid", name], and an absent value as ["set", []]."""
    return value[1] if isinstance(value, list) and value[0] == "uuid" else ""


def _map(value: Any) -> dict[str, str]:
    """OVSDB writes a map as ["map", [[key, value], …]]."""
    return dict(value[1]) if isinstance(value, list) and value[0] == "map" else {}
