"""Decisions about worker pools: their states, and which of them ends when memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reconciler.model.states import Described

# Id of the host of pools whose workers run anywhere, and reach the service by its API only.
REMOTE = "remote"
# Id of the host of pools whose workers a launch starts in a slice. They, too, have the API only.
GUEST = "allocation"
APART = (REMOTE, GUEST)
# Shares of a memory limit from which a warning is logged, and from which a pool is evicted.
WARN_SHARE = 0.85
ACT_SHARE = 0.90
# Workers of a pool that may end by themselves in this time before the pool is given up.
ENDS_LIMIT = 8
ENDS_S = 600.0
# How many of those count for jobs that they held, if the pool runs the jobs of all projects:
# members whose jobs kill their workers must not end the pool for everybody.
ENDS_WITH_JOBS = 3


def passed_percent(share: float) -> int:
    """The highest threshold in per cent that a share of memory has passed, or 0."""
    return round(100 * next((mark for mark in (ACT_SHARE, WARN_SHARE) if share >= mark), 0))


class PoolState(Described):
    """Lifecycle of a worker pool."""

    REQUESTED = "requested", "Recorded; its host has not begun."
    STARTING = "starting", "Its workers load their models."
    RUNNING = "running", "All its workers have loaded their models and take jobs."
    DRAINING = "draining", "Its workers finish the jobs that they hold and take no others."
    STOPPING = "stopping", "Its workers have got SIGTERM, and are killed after the grace period."
    STOPPED = "stopped", "Ended by request; none of its processes is left."
    EVICTED = "evicted", "Ended by force or for its memory; none of its processes is left."
    FAILED = (
        "failed",
        "Its workers ended too often or came too late; none of its processes is left.",
    )


LIVE_POOLS = (
    PoolState.REQUESTED,
    PoolState.STARTING,
    PoolState.RUNNING,
    PoolState.DRAINING,
    PoolState.STOPPING,
)
# Their workers take jobs, and are replaced when they end.
SERVING_POOLS = (PoolState.STARTING, PoolState.RUNNING)


@dataclass(frozen=True)
class Load:
    """Memory of a pool. share: the largest part of its limit that one of its workers uses.

    killed: the kernel, or the sampler in its place, has killed a process of it for its memory.
    """

    pool_id: str
    bytes: int
    share: float
    kill_on_oom: bool
    killed: bool = False


def victim(loads: Sequence[Load], host_share: float) -> Load | None:
    """The largest pool that has to end for memory; only pools with kill_on_oom do.

    A pool that is near its own limit ends, and if the host is near its limit, any does.
    """
    pressed = host_share >= ACT_SHARE
    candidates = [
        load
        for load in loads
        if load.kill_on_oom and (pressed or load.killed or load.share >= ACT_SHARE)
    ]
    return max(candidates, key=lambda load: load.bytes, default=None)
