"""Database clock, the only clock by which leases and deadlines are compared (I22)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class now(FunctionElement[float]):
    """Epoch seconds at the time of the statement."""

    type = sa.Double()
    inherit_cache = True


@compiles(now, "sqlite")
def _sqlite(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _postgresql(*_: Any, **__: Any) -> str:
    # Not now(): it is constant within a transaction, which may have waited for a lock.
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


def read(conn: sa.Connection) -> float:
    """Current time of the database in epoch seconds."""
    return float(conn.execute(sa.select(now())).scalar_one())


def iso(at: float | None) -> str | None:
    """ISO 8601 form of a time, for people and documents; None for None."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()
