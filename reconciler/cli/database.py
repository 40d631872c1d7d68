"""The database, for the few commands that need no service."""

from __future__ import annotations

from sqlalchemy import Engine

from reconciler.settings import Settings
from reconciler.store.engine import open_engine
from reconciler.store.migrations import migrate


def opened(settings: Settings | None = None) -> tuple[Engine, str]:
    """The configured database at the newest revision, and that revision."""
    settings = settings or Settings()
    # Run folders, keys and the database are for the service's user only.
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not settings.database_url:
        # SQLite's other files take their mode from this one.
        (settings.state_dir / "reconciler.db").touch(mode=0o600)
    engine = open_engine(settings.database)
    return engine, migrate(engine)
