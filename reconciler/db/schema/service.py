"""The processes of the service itself: who lives, and which one may do what only one may do."""

from __future__ import annotations

import sqlalchemy as sa

from reconciler.db.schema.base import document, key, metadata, moment, number, stamp, text

leaders = sa.Table(
    "leaders",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    # Grows with every change of hands: what was decided under an older one is refused.
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
