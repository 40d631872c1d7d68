"""Tables of host reports: discovery, parity, host baseline and absence.

Reports are separate from approved slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    Row,
    document,
    flag,
    metadata,
    moment,
    number,
    reference,
    row_of,
    sequence,
    stamp,
    text,
)


def _sighting() -> list[sa.Column[Any]]:
    # observed_at: when the reporting run started, by the database's clock. The host's clock is not
    # trusted.
    return [
        sequence(),
        reference("node_id", "nodes"),
        sa.Column("task_id", sa.Text),
        text("boot_id"),
        text("install_id"),
        document("document"),
        moment("observed_at"),
        stamp(),
    ]


discoveries = sa.Table(
    "topology_discoveries",
    metadata,
    *_sighting(),
    flag("reboot_required"),
    sa.Index("ix_topology_discoveries_node_id", "node_id"),
)

parities = sa.Table(
    "parity_reports",
    metadata,
    *_sighting(),
    text("intent", "slice"),
    number("failures"),
    number("warnings"),
    sa.Index("ix_parity_reports_node_id", "node_id"),
)

baselines = sa.Table(
    "host_baselines",
    metadata,
    *_sighting(),
    text("allocation_id", None),
    sa.Index("ix_host_baselines_allocation_id", "allocation_id"),
)

absences = sa.Table(
    "absence_reports",
    metadata,
    *_sighting(),
    text("allocation_id", None),
    flag("absent"),
    sa.Index("ix_absence_reports_allocation_id", "allocation_id"),
)


@row_of(absences, "absence")
@dataclass(frozen=True, kw_only=True)
class Absence(Row):
    """A report of the traces of an allocation on its host."""

    id: int
    node_id: str
    task_id: str | None
    boot_id: str
    install_id: str
    document: dict[str, Any]
    observed_at: float | None
    created_at: float
    allocation_id: str
    absent: bool


@row_of(baselines, "baseline")
@dataclass(frozen=True, kw_only=True)
class Baseline(Row):
    """A host's state before a tenant had the whole machine."""

    id: int
    node_id: str
    task_id: str | None
    boot_id: str
    install_id: str
    document: dict[str, Any]
    observed_at: float | None
    created_at: float
    allocation_id: str


@row_of(discoveries, "discovery")
@dataclass(frozen=True, kw_only=True)
class Discovery(Row):
    """A discovery report."""

    id: int
    node_id: str
    task_id: str | None
    boot_id: str
    install_id: str
    document: dict[str, Any]
    observed_at: float | None
    created_at: float
    reboot_required: bool


@row_of(parities, "parity")
@dataclass(frozen=True, kw_only=True)
class Parity(Row):
    """A parity report."""

    id: int
    node_id: str
    task_id: str | None
    boot_id: str
    install_id: str
    document: dict[str, Any]
    observed_at: float | None
    created_at: float
    intent: str
    failures: int
    warnings: int
