"""The database's clock: leases and deadlines are never compared on anybody else's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class now(FunctionElement[float]):
    """Epoch seconds at this statement."""

    type = sa.Double()
    inherit_cache = True


@compiles(now, "sqlite")
def _sqlite(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _postgresql(*_: Any, **__: Any) -> str:
    # Not now(): that stands still during a transaction, which may have waited for a lock.
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


def read(conn: sa.Connection) -> float:
    """The time, as a number."""
    return float(conn.execute(sa.select(now())).scalar_one())


def iso(at: float | None) -> str | None:
    """For people and documents."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()
