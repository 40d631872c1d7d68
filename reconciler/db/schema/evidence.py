"""What hosts reported: candidate topology, parity, absence. Apart from approved slots."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.db.schema.base import (
    document,
    flag,
    metadata,
    moment,
    number,
    reference,
    sequence,
    stamp,
    text,
)


def _sighting() -> list[sa.Column[Any]]:
    # observed_at is when the run that looked was started, by our clock: the host's is not trusted.
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
