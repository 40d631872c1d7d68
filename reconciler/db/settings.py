"""Settings of the site, stored in the database."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, journal
from reconciler.db.schema import settings
from reconciler.model.act import Act

SCHEDULING = "slice_scheduling"
# Public keys of the site's SSH authorities, by the names of their files.
AUTHORITIES = "ssh_authorities"
# Issuer of the site's OpenID provider, "" for none.
ISSUER = "oidc_issuer"
# Time at which the database was restored from a backup. Records from before may be incomplete.
RESTORED = "restored_at"
# Built once: hot paths read settings.
_VALUE = sa.select(settings.c.value).where(settings.c.name == sa.bindparam("of_name"))


def read(conn: sa.Connection, name: str, default: Any = None, *, lock: bool = False) -> Any:
    """Value of a setting, or the default. lock: if a new value depends on it."""
    query = _VALUE.with_for_update() if lock else _VALUE
    value = conn.execute(query, {"of_name": name}).scalar_one_or_none()
    return default if value is None else value


def column(name: str) -> sa.ScalarSelect[Any]:
    """Value of a setting as a part of another statement; NULL when never set."""
    return sa.select(settings.c.value).where(settings.c.name == name).scalar_subquery()


def write(conn: sa.Connection, name: str, value: Any, act: Act) -> None:
    """Set the value and audit the change."""
    store(conn, name, value)
    journal.audit(conn, act, "admin.setting.changed", "setting", name, detail={"value": value})


def store(conn: sa.Connection, name: str, value: Any) -> None:
    """Set a value that the service keeps for itself."""
    values = {"value": value, "changed_at": clock.now()}
    update = sa.update(settings).where(settings.c.name == name).values(**values)
    if not conn.execute(update).rowcount:
        conn.execute(sa.insert(settings).values(name=name, **values))


def site_scheduling(conn: sa.Connection) -> bool:
    """Whether the site sells slices; off by default."""
    return bool(read(conn, SCHEDULING, False))


def set_site_scheduling(conn: sa.Connection, on: bool, act: Act) -> None:
    """Turn the sale of slices on or off for the site. Each node has its own switch as well."""
    write(conn, SCHEDULING, on, act)
