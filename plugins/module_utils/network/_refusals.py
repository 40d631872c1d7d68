"""Counters of the traffic that a slice's guard refused, by kind.

Each kind has a dropping flow of its own (`_flows.rules`), and the packet limit counts by itself.
The port's filter, before the switch, drops and counts most frames of some kinds. A counter begins
when the guard is loaded, so it falls when a guard is restored. The host's firewall counts the kinds
that only it can judge, since its table was loaded, which each launch and release does. Its counters
of the guard's own kinds are not added, because they begin at other times. So does the counter of
the limit in the host's table of connections, with each start of the slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.network import (
    _firewall,
    _flows,
    _guards,
    _host_connections,
    _packet_limit,
    _port_filter,
)

RATE = "packet_rate"


def counters(state: _guards.State, bridge: str) -> dict[str, dict[str, int]]:
    """Refused packets by allocation id and kind, for the loaded guards; kinds without any are left
    out.
    """
    kinds = {
        cookie: {flow: flow.kind for flow in flows} for cookie, flows in state.expected.items()
    }
    dropped, filtered = _packet_limit.dropped(bridge), _port_filter.installed()
    in_kernel, unopened = _firewall.refused(), _host_connections.refused()
    refused: dict[str, Counter[str]] = {}
    for cookie, guard in state.guards.items():
        if cookie != _flows.PROBE_COOKIE and guard.port in state.ports:
            _text, by_kind = filtered.get(guard.port, ("", {}))
            of_flows = set(kinds.get(cookie, {}).values())
            refused[cookie] = Counter(by_kind)
            for kind, packets in in_kernel.get(guard.port, Counter()).items():
                if kind not in of_flows:
                    refused[cookie][kind] += packets
            refused[cookie][_host_connections.KIND] += unopened.get(guard.ip, 0)
            refused[cookie][RATE] += dropped.get(state.ports[guard.port], 0)
    for cookie, flow, packets in _flows.counted(bridge):
        kind = kinds.get(cookie, {}).get(flow, "")
        if kind and cookie in refused:
            refused[cookie][kind] += packets
    return {
        state.guards[cookie].allocation_id: dict(+by_kind) for cookie, by_kind in refused.items()
    }


def rows(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The counters of this host; [] without its bridge. params: the recorded network."""
    state = _guards.observe(params, with_firewall=False) if params else None
    if state is None:
        return []
    return [
        {"allocation_id": allocation_id, "refused": by_kind}
        for allocation_id, by_kind in sorted(counters(state, params["bridge"]).items())
    ]
