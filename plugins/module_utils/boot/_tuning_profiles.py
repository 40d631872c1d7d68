"""Tuning profiles by name and the settings of each.

They are off by default, because they change the whole host. A profile becomes a default for a kind
of host when a benchmark with and without it supports that. The values here are starting points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _hugepages

NETWORK = "network-buffers"


@dataclass(frozen=True)
class Definition:
    """about: purpose of the profile. sysctl: by key. modprobe: options by module and name. memlock:
    the limit of every login, or "". Pages of 1 GiB are kernel arguments: _hugepages.
    """

    about: str
    sysctl: Mapping[str, str] = field(default_factory=dict)
    modprobe: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    memlock: str = ""


DEFINITIONS: Mapping[str, Definition] = {
    _hugepages.PROFILE: Definition("pages of 1 GiB for the memory of guests, taken at boot"),
    NETWORK: Definition(
        "socket buffers, backlog, IPoIB queues and locked memory for a fast fabric",
        sysctl={
            # Bandwidth times delay of 200 Gbit/s at 10 ms. This is a limit, not a use: a socket
            # that needs less takes less.
            "net.core.rmem_max": "268435456",
            "net.core.wmem_max": "268435456",
            "net.ipv4.tcp_rmem": "4096 87380 134217728",
            "net.ipv4.tcp_wmem": "4096 65536 134217728",
            # Packets that wait for a processor; with too small a queue, a burst drops packets.
            "net.core.netdev_max_backlog": "250000",
        },
        # The driver takes at most 8192.
        modprobe={"ib_ipoib": {"send_queue_size": "4096", "recv_queue_size": "4096"}},
        # RDMA locks the memory that it registers; the usual limit is 8 MiB.
        memlock="unlimited",
    ),
}
PROFILES = tuple(DEFINITIONS)
