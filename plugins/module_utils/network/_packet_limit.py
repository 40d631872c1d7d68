"""Limit on the packets that a guest sends each second: an OpenFlow meter with its port's number.

The switch's policing by `tc` would act earlier, but it is lost without an error where the kernel
lacks a module, and a switch in user space ignores it. A meter is refused where it is unsupported,
can be read back, and counts what it drops.
"""

from __future__ import annotations

import re

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

_METER = re.compile(r"^meter=([0-9]+) (.*) bands=\ntype=drop rate=([0-9]+)$", re.MULTILINE)
_DROPPED = re.compile(r"^meter:([0-9]+) .*\n0: packet_count:([0-9]+) ", re.MULTILINE)


def ofctl(*arguments: str, stdin: str | None = None) -> str:
    """Run ovs-ofctl. Without OpenFlow 1.3 the switch leaves meters out of the flows it prints."""
    argv = ["ovs-ofctl", "--protocols=OpenFlow13", *arguments]
    return _command.run(argv, stdin=stdin, timeout=30).out


def supported(bridge: str) -> bool:
    """Whether the bridge's datapath can limit packets."""
    features = ofctl("meter-features", bridge)
    limit = re.search(r"max_meter:([0-9]+)", features)
    return bool(limit and int(limit[1]) and re.search(r"\bpktps\b", features))


def installed(bridge: str) -> dict[int, int]:
    """Packets per second by port number; -1 for a meter that limits something else."""
    text = ofctl("dump-meters", bridge)
    # A meter with another form must not be taken for a missing meter.
    limits = {int(number): -1 for number in re.findall(r"^meter=([0-9]+)", text, re.MULTILINE)}
    for number, flags, rate in _METER.findall(text):
        if flags == "pktps stats":
            limits[int(number)] = int(rate)
    return limits


def install(bridge: str, port: int, packets_per_second: int) -> None:
    """Set the limit. A change keeps the flows that use the meter."""
    meter = f"meter={port},pktps,stats,bands=type=drop,rate={packets_per_second}"
    try:
        ofctl("add-meter", bridge, meter)
    except Refusal as refusal:
        if refusal.code != "command_failed":
            raise
        # It exists already. A query before would race with the guardian, which may add it.
        ofctl("mod-meter", bridge, meter)


def remove(bridge: str, port: int) -> None:
    """Remove the limit, and with it any flow that still uses it."""
    ofctl("del-meter", bridge, f"meter={port}")


def dropped(bridge: str) -> dict[int, int]:
    """Packets beyond the limit by port number, since the limit was set."""
    return {int(n): int(packets) for n, packets in _DROPPED.findall(ofctl("meter-stats", bridge))}
