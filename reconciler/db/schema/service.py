"""Tables of the service's own processes and of their leader."""

from __future__ import annotations

import sqlalchemy as sa

from reconciler.db.schema.base import document, key, metadata, moment, number, stamp, text

leaders = sa.Table(
    "leaders",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    # Grows with every change of the leader; writes under an older epoch are refused.
    number("epoch"),
    text("holder"),
    moment("acquired_at"),
    moment("expires_at"),
)

service_processes = sa.Table(
    "service_processes",
    metadata,
    key(),
    document("roles", list),
    text("host"),
    number("pid"),
    text("version"),
    stamp("started_at"),
    stamp("seen_at"),
)
