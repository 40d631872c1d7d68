"""Switches of the site."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal
from reconciler.db.schema import settings
from reconciler.model.act import Act

SCHEDULING = "slice_scheduling"
# When the database was restored from a backup: what it says of before is not all that happened.
RESTORED = "restored_at"


def read(conn: sa.Connection, name: str, default: Any = None) -> Any:
    """The value; the default when nobody has set it."""
    query = sa.select(settings.c.value).where(settings.c.name == name)
    found = conn.execute(query).scalar_one_or_none()
    return default if found is None else found


def write(conn: sa.Connection, name: str, value: Any, act: Act) -> None:
    """Set it, and say who did."""
    values = {"value": value, "changed_at": clock.now()}
    update = sa.update(settings).where(settings.c.name == name).values(**values)
    if not conn.execute(update).rowcount:
        conn.execute(sa.insert(settings).values(name=name, **values))
    journal.audit(conn, act, "admin.setting.changed", "setting", name, detail={"value": value})


def site_scheduling(conn: sa.Connection) -> bool:
    """Whether slices are sold at all; off until set."""
    return bool(read(conn, SCHEDULING, False))


def set_site_scheduling(conn: sa.Connection, on: bool, act: Act) -> None:
    """Sell slices, or sell none; each node has a switch of its own."""
    write(conn, SCHEDULING, on, act)
