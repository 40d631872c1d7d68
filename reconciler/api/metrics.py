"""Prometheus metrics, the request log, and correlation ids."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Engine
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reconciler import logs
from reconciler.api.http import CORRELATION_HEADER
from reconciler.db import clock, leader
from reconciler.db.engine import reading
from reconciler.db.schema import allocations, nodes, outbox, slots, tasks
from reconciler.inventory.readings import Readings
from reconciler.lifecycle import drift, slice_telemetry
from reconciler.model.jobs import Mode
from reconciler.model.pools import APART, LIVE_POOLS, PoolState
from reconciler.model.states import TaskState
from reconciler.pools import control, hints, jobs, pools, workers
from reconciler.records import certificates
from reconciler.records.leasing import DUE

log = logging.getLogger("gpuaas.api.request")

# -- Correlation ids and the request log --------------------------------------------------------

# The id reaches run variables and syslog lines on hosts.
_CORRELATION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Correlation:
    """ASGI middleware: correlation id and log line per request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(CORRELATION_HEADER, "")
        scope["correlation_id"] = given if _CORRELATION_ID.fullmatch(given) else str(uuid.uuid4())
        began, status = time.monotonic(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[CORRELATION_HEADER] = scope["correlation_id"]
            await send(message)

        with logs.about(correlation=scope["correlation_id"]):
            try:
                await self._app(scope, receive, answer)
            finally:
                took_s = time.monotonic() - began
                _count_request(scope, status, took_s)
                # Only the path: a query may hold a download token.
                log.info(
                    "%s %s %d %.0f ms correlation_id=%s",
                    scope["method"],
                    scope["path"],
                    status,
                    took_s * 1000,
                    scope["correlation_id"],
                )


# -- Metrics ------------------------------------------------------------------------------------

_PROCESS = CollectorRegistry(auto_describe=True)
ProcessCollector(registry=_PROCESS)
_REQUESTS = Histogram(
    "gpuaas_http_request_seconds",
    "Time until an answer was complete. route is the route's pattern, not the requested path.",
    ("method", "route", "status"),
    buckets=(0.005, 0.02, 0.1, 0.5, 2, 10),
    registry=_PROCESS,
)
# Methods of HTTP. A client may send any other word, and each would create a time series.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_ENDED = (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELED, TaskState.LOST)


def _count_request(scope: MutableMapping[str, Any], status: int, seconds: float) -> None:
    """Count a request of the API."""
    route = getattr(scope.get("route"), "path", "none")
    method = scope["method"] if scope["method"] in _METHODS else "other"
    _REQUESTS.labels(method, route, str(status)).observe(seconds)


def exposition(engine: Engine, redis_url: str = "", inventories: Iterable[Readings] = ()) -> bytes:
    """All metrics in Prometheus' text format. redis_url: of the streams of jobs, if any.
    inventories: those with which the site is compared.
    """
    site = CollectorRegistry(auto_describe=False)
    with reading(engine) as conn:
        site.register(_Site(conn, redis_url, inventories))
        return generate_latest(_PROCESS) + generate_latest(site)


class _Site(Collector):
    """Metrics of the whole site, read from the database."""

    def __init__(self, conn: Connection, redis_url: str, inventories: Iterable[Readings]) -> None:
        self._conn = conn
        self._redis_url = redis_url
        self._inventories = inventories

    def collect(self) -> Iterator[Metric]:
        yield from _tables(self._conn)
        yield from _certificates(self._conn)
        yield from _service(self._conn)
        yield from _slices(self._conn)
        for readings in self._inventories:
            yield from _inventory(self._conn, readings)
        yield from _jobs(self._conn, self._redis_url)


def _tables(conn: Connection) -> Iterator[Metric]:
    for name, text, columns in (
        ("gpuaas_tasks", "Tasks by kind and state.", (tasks.c.kind, tasks.c.state)),
        ("gpuaas_nodes", "Nodes by state and mode.", (nodes.c.state, nodes.c.mode)),
        ("gpuaas_allocations", "Allocations by state.", (allocations.c.state,)),
    ):
        yield _counted(conn, name, text, columns)
    present = slots.c.retired_at.is_(None)
    states = (slots.c.status, slots.c.health_state)
    yield _counted(conn, "gpuaas_slots", "Approved slots by state and health.", states, present)
    due = sa.and_(
        tasks.c.state.in_(DUE),
        sa.or_(tasks.c.not_before.is_(None), tasks.c.not_before <= clock.now()),
    )
    yield _gauge(
        "gpuaas_task_wait_seconds",
        "How long the oldest task that is due has waited.",
        _number(conn, sa.select(clock.now() - sa.func.min(tasks.c.created_at)).where(due)),
    )
    live = tasks.c.state.not_in(_ENDED)
    late = sa.and_(live, tasks.c.deadline_at < clock.now())
    yield _gauge(
        "gpuaas_tasks_overdue",
        "Tasks past their deadline that have not ended yet.",
        _number(conn, sa.select(sa.func.count()).select_from(tasks).where(late)),
    )
    yield _gauge(
        "gpuaas_drift_seconds",
        "Time since the latest drift check that succeeded, of the host where it is longest.",
        drift.overdue_nodes(conn),
    )
    yield _gauge(
        "gpuaas_drift_failing",
        "Slice hosts whose latest drift check failed, was lost or was canceled.",
        drift.failing_nodes(conn),
    )
    yield from _drift(conn)
    text = "Packets of active slices that their guards refused, by kind."
    refused = slice_telemetry.refused_by_kind(conn)
    yield _labelled("gpuaas_refused_packets", text, "kind", refused)
    unsent = outbox.c.published_at.is_(None)
    yield _gauge(
        "gpuaas_outbox_pending",
        "Events that have not been relayed yet.",
        _number(conn, sa.select(sa.func.count()).select_from(outbox).where(unsent)),
    )


def _drift(conn: Connection) -> Iterator[Metric]:
    severities: Counter[str] = Counter(degraded=0, failed=0)
    orphans = repairs = unread = 0
    for result in drift.latest_results(conn):
        differences = result.get("differences", ())
        severities.update(row["severity"] for row in differences)
        # One for each slot that a trace uses.
        orphans += sum(row.get("orphan", False) for row in differences)
        repairs += sum(row["times"] for row in result.get("repairs", ()))
        unread += len(result.get("unknown", ()))
    text = "Differences in the latest drift check of each slice host that succeeded."
    yield _labelled("gpuaas_drift_differences", text, "severity", severities)
    yield _gauge(
        "gpuaas_drift_orphans",
        "Those of them that are a machine, or another trace of a slice, that should not be there.",
        orphans,
    )
    yield _gauge(
        "gpuaas_drift_unread",
        "Parts of hosts that the same checks could not read, and in which they found nothing.",
        unread,
    )
    yield _gauge(
        "gpuaas_drift_repairs",
        "Repairs of slice hosts by their own upkeep since their boot, as of the same checks.",
        repairs,
    )


def _inventory(conn: Connection, readings: Readings) -> Iterator[Metric]:
    name, title, last = readings.name, readings.title, readings.latest(conn)
    text = f"Whether the last comparison with {title} came to its end."
    yield _gauge(f"gpuaas_{name}_complete", text, int(bool(last and last["complete"])))
    if last is None:
        return
    text = f"Differences from {title}, by code."
    yield _labelled(f"gpuaas_{name}_differences", text, "code", last["counts"])
    text = f"Time since the last comparison with {title}."
    yield _gauge(f"gpuaas_{name}_seconds", text, clock.read(conn) - last["at"])


def _certificates(conn: Connection) -> Iterator[Metric]:
    until = certificates.of_living(conn).values()
    now = clock.read(conn)
    expired = sum(end <= now for end in until)
    numbers = {"valid": len(until) - expired, "expired": expired}
    text = "Hosts by the validity of their certificate."
    yield _labelled("gpuaas_host_certificates", text, "validity", numbers)
    first = GaugeMetricFamily(
        "gpuaas_host_certificate_seconds",
        "Time until the first host certificate expires; negative after its expiry.",
        labels=[],
    )
    if until:
        first.add_metric([], min(until) - now)
    yield first


def _service(conn: Connection) -> Iterator[Metric]:
    living = leader.live_roles(conn)
    counts = {role: living.get(role, 0) for role in ("api", "worker", "loops")}
    text = "Living processes of the service by role."
    yield _labelled("gpuaas_service_processes", text, "role", counts)
    leads = leader.read(conn, leader.LOOPS)
    yield _gauge(
        "gpuaas_leader", "1 while a leader's term is valid.", int(bool(leads and leads["live"]))
    )
    yield _gauge(
        "gpuaas_leader_epoch",
        "Number of the leader's term.",
        leads["epoch"] if leads else 0,
    )


# Pools that failed are counted for so long.
_FAILED_S = 3_600.0
_TOTALS = {
    "reclaimed": "Jobs whose lease expired, because their worker died or was away.",
    "reclaimer_errors": "Failures of workers to reclaim such jobs.",
    "job_retries": "Failed attempts that were followed by another.",
    "worker_pool_evictions": "Pools that were stopped by force.",
}


def _jobs(conn: Connection, redis_url: str) -> Iterator[Metric]:
    """Jobs under the names that dashboards of the orchestrator know."""
    prefix = "gpu_orchestrator"
    number = jobs.count(conn)
    yield _gauge(f"{prefix}_pending_jobs", "Jobs that wait.", number["pending"])
    text = "Those of them that wait for their own time, and for no worker."
    yield _gauge(f"{prefix}_delayed_jobs", text, jobs.delayed(conn))
    text = "Those of them whose time has come, and that no living worker takes."
    yield _gauge(f"{prefix}_unserved_jobs", text, jobs.unserved(conn))
    yield _gauge(f"{prefix}_running_jobs", "Jobs that workers hold.", number["running"])
    yield _gauge(f"{prefix}_dlq_length", "Jobs that failed too often.", number["dead_letter"])
    # Families without a value, such as this one without Redis, are named all the same.
    length = GaugeMetricFamily(f"{prefix}_stream_length", "Hints in the stream of jobs.", labels=[])
    streams = hints.of(redis_url)
    if lengths := streams.lengths() if streams else {}:
        length.add_metric([], lengths[hints.STREAM])
    yield length
    counts = control.counters(conn)
    for name, text in _TOTALS.items():
        yield CounterMetricFamily(f"{prefix}_{name}", text, value=counts[name])
    current = control.read(conn)
    text = "1 for the mode of the site: normal, drain or drained."
    modes = {mode: int(mode == current.mode) for mode in Mode}
    yield _labelled(f"{prefix}_mode", text, "mode", modes)
    text = "Time since the mode of the site changed."
    yield _gauge(f"{prefix}_mode_seconds", text, clock.read(conn) - current.since)
    leads = leader.read(conn, leader.LOOPS)
    text = "1 while a leader's term is valid."
    yield _gauge(f"{prefix}_leader", text, int(bool(leads and leads["live"])))
    yield from _pools(conn, prefix)


def _pools(conn: Connection, prefix: str) -> Iterator[Metric]:
    """Living pools with their memory. Of a pool with GPUs it is that of its GPUs."""
    size = GaugeMetricFamily(
        f"{prefix}_worker_pool_memory_bytes", "Memory of all workers of a pool.", labels=["pool"]
    )
    share = GaugeMetricFamily(
        f"{prefix}_nvml_mem_util_pct",
        "Used part of a GPU's memory, or without GPUs of the limit of a pool's largest worker.",
        labels=["pool", "gpu"],
    )
    live = pools.every(conn, live=True)
    states = {state: sum(pool.state == state for pool in live) for state in LIVE_POOLS}
    states[PoolState.FAILED] = pools.failed(conn, _FAILED_S)
    yield _labelled(f"{prefix}_worker_pools", "Pools by state.", "state", states)
    living = workers.living(conn, [pool.id for pool in live])
    present = pools.devices(conn)
    gpus = pools.gpus(live, present)
    leased = {(lease.host_id, lease.device) for lease in pools.leases(conn)}
    # Of workers apart, no memory is known.
    for pool in (pool for pool in live if pool.host_id not in APART):
        used = [worker.memory_bytes for worker in living[pool.id]]
        size.add_metric([pool.name], sum(used))
        for gpu in gpus[pool.id]:
            part = 100 * gpu["memory_used_bytes"] / gpu["memory_bytes"]
            share.add_metric([pool.name, gpu["id"]], part)
        if not pool.devices:
            part = 100 * max(used, default=0) / (pool.memory_mib << 20)
            share.add_metric([pool.name, ""], part)
    yield from (size, share)
    text = "Devices of the hosts that report themselves, and those that pools have."
    yield _gauge(f"{prefix}_devices", text, len(present.keys() | leased))
    yield _gauge(f"{prefix}_leases", "Devices that pools have.", len(leased))


def _slices(conn: Connection) -> Iterator[Metric]:
    """The newest telemetry of active slices: a series per value, per GPU that a guest has, and per
    NUMA node of its memory.
    """
    labels = ["allocation", "project", "source"]
    families: dict[str, GaugeMetricFamily] = {}

    def add(name: str, value: object, *texts: str, part: str = "") -> None:
        if type(value) not in (int, float, bool):
            return
        names = [*labels, part] if part else labels
        family = families.setdefault(
            name,
            GaugeMetricFamily(name, "Telemetry of a slice, in the unit of its name.", labels=names),
        )
        family.add_metric(texts, float(value))  # type: ignore[arg-type]

    for allocation, sample in slice_telemetry.current(conn):
        for source, values in (("host", sample.host), ("guest", sample.guest or {})):
            texts = (allocation.id, allocation.project_id, source)
            for name, value in values.items():
                add(f"gpuaas_slice_{name}", value, *texts)
            for gpu in values.get("gpus", ()):
                for name, value in gpu.items():
                    if name != "index":
                        add(
                            f"gpuaas_slice_gpu_{name}", value, *texts, str(gpu["index"]), part="gpu"
                        )
            for node, value in enumerate(values.get("node_memory_bytes", ())):
                add("gpuaas_slice_node_memory_bytes", value, *texts, str(node), part="numa_node")
    yield from families.values()


def _counted(
    conn: Connection,
    name: str,
    text: str,
    columns: tuple[sa.Column[Any], ...],
    where: sa.ColumnElement[bool] | None = None,
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[column.name for column in columns])
    query = sa.select(*columns, sa.func.count()).group_by(*columns).order_by(*columns)
    for *labels, count in conn.execute(query if where is None else query.where(where)):
        family.add_metric([str(label) for label in labels], count)
    return family


def _labelled(name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _number(conn: Connection, query: sa.Select[Any]) -> float:
    return float(conn.execute(query).scalar() or 0)
