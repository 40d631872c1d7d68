"""The database of a site that must be there already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine

from reconciler.domain.errors import Problem
from reconciler.settings import Settings
from reconciler.store.engine import open_engine


@contextmanager
def existing(settings: Settings) -> Iterator[Engine]:
    """The site's database; Problem `database_missing` rather than a new one."""
    if not settings.database_url and not (settings.state_dir / "reconciler.db").is_file():
        raise Problem(
            "database_missing",
            404,
            expected=f"a database in {settings.state_dir}",
            found="none",
            remedy="set GPUAAS_STATE_DIR or GPUAAS_DATABASE_URL as the service has it",
        )
    engine = open_engine(settings.database)
    try:
        yield engine
    finally:
        engine.dispose()
