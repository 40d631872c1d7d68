"""What Prometheus reads: this process's requests, and the site as the database has it now.

The numbers of the site come from the database at each question, so every process tells the same
and none has to be asked in particular.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Engine

from reconciler.db import clock, leader
from reconciler.db.engine import reading
from reconciler.db.schema import allocations, nodes, outbox, slots, tasks
from reconciler.lifecycle import drift
from reconciler.model.states import TaskState
from reconciler.records import certificates
from reconciler.records.leasing import DUE

__all__ = ["CONTENT_TYPE", "answered", "exposition"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
_OWN = CollectorRegistry(auto_describe=True)
ProcessCollector(registry=_OWN)
_REQUESTS = Histogram(
    "gpuaas_http_request_seconds",
    "Time until an answer was complete. route is the pattern, never a path that somebody sent.",
    ("method", "route", "status"),
    buckets=(0.005, 0.02, 0.1, 0.5, 2, 10),
    registry=_OWN,
)
# What HTTP knows; a client may send any other word, and each would be a series of its own.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_ENDED = (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELED, TaskState.LOST)


def answered(scope: MutableMapping[str, Any], status: int, seconds: float) -> None:
    """Count one request of the API."""
    route = getattr(scope.get("route"), "path", "none")
    method = scope["method"] if scope["method"] in _METHODS else "other"
    _REQUESTS.labels(method, route, str(status)).observe(seconds)


def exposition(engine: Engine) -> bytes:
    """Everything, as text for Prometheus."""
    site = CollectorRegistry(auto_describe=False)
    with reading(engine) as conn:
        site.register(_Found(list(_site(conn))))
    return generate_latest(_OWN) + generate_latest(site)


class _Found(Collector):
    """Numbers that have been read already."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        yield from self._found


def _site(conn: Connection) -> Iterator[Metric]:
    for name, told, columns in (
        ("gpuaas_tasks", "Tasks by kind and state.", (tasks.c.kind, tasks.c.state)),
        ("gpuaas_nodes", "Nodes by state and mode.", (nodes.c.state, nodes.c.mode)),
        ("gpuaas_allocations", "Allocations by state.", (allocations.c.state,)),
    ):
        yield _counted(conn, name, told, columns)
    present = slots.c.retired_at.is_(None)
    states = (slots.c.status, slots.c.health_state)
    yield _counted(conn, "gpuaas_slots", "Approved slots by state and health.", states, present)
    due = sa.and_(
        tasks.c.state.in_(DUE),
        sa.or_(tasks.c.not_before.is_(None), tasks.c.not_before <= clock.now()),
    )
    yield _one(
        "gpuaas_task_wait_seconds",
        "How long the oldest task that could begin has waited.",
        _number(conn, sa.select(clock.now() - sa.func.min(tasks.c.created_at)).where(due)),
    )
    live = tasks.c.state.not_in(_ENDED)
    late = sa.and_(live, tasks.c.deadline_at < clock.now())
    yield _one(
        "gpuaas_tasks_overdue",
        "Tasks past their deadline that nothing has ended yet.",
        _number(conn, sa.select(sa.func.count()).select_from(tasks).where(late)),
    )
    yield _one(
        "gpuaas_drift_seconds",
        "Since the slice host whose turn is longest ago was asked what it holds.",
        drift.overdue_nodes(conn),
    )
    unsent = outbox.c.published_at.is_(None)
    yield _one(
        "gpuaas_outbox_pending",
        "Events that no relay has taken yet.",
        _number(conn, sa.select(sa.func.count()).select_from(outbox).where(unsent)),
    )
    yield from _certificates(conn)
    yield from _service(conn)


def _certificates(conn: Connection) -> Iterator[Metric]:
    until = certificates.of_living(conn).values()
    now = clock.read(conn)
    family = GaugeMetricFamily(
        "gpuaas_host_certificates",
        "Hosts by whether their certificate is still good.",
        labels=["validity"],
    )
    expired = sum(end <= now for end in until)
    family.add_metric(["valid"], len(until) - expired)
    family.add_metric(["expired"], expired)
    yield family
    if until:
        yield _one(
            "gpuaas_host_certificate_seconds",
            "Until the first host certificate ends; below zero it has.",
            min(until) - now,
        )


def _service(conn: Connection) -> Iterator[Metric]:
    living = GaugeMetricFamily(
        "gpuaas_service_processes", "Living processes of the service by role.", labels=["role"]
    )
    found = leader.live_roles(conn)
    for role in ("api", "worker", "loops"):
        living.add_metric([role], found.get(role, 0))
    yield living
    leads = leader.read(conn, leader.LOOPS)
    yield _one(
        "gpuaas_leader", "1 while a leader's lease runs.", int(bool(leads and leads["live"]))
    )
    yield _one("gpuaas_leader_epoch", "Grows with every leader.", leads["epoch"] if leads else 0)


def _counted(
    conn: Connection,
    name: str,
    told: str,
    columns: tuple[sa.Column[Any], ...],
    where: sa.ColumnElement[bool] | None = None,
) -> Metric:
    family = GaugeMetricFamily(name, told, labels=[column.name for column in columns])
    query = sa.select(*columns, sa.func.count()).group_by(*columns).order_by(*columns)
    for *labels, count in conn.execute(query if where is None else query.where(where)):
        family.add_metric([str(label) for label in labels], count)
    return family


def _one(name: str, told: str, value: float) -> Metric:
    return GaugeMetricFamily(name, told, value=value)


def _number(conn: Connection, query: sa.Select[Any]) -> float:
    return float(conn.execute(query).scalar() or 0)
