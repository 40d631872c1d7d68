"""The database, for the few commands that need no service."""

from __future__ import annotations

import os

from sqlalchemy import Engine

from reconciler.backup import unfinished
from reconciler.db.engine import open_engine
from reconciler.db.migrations import current, head, migrate
from reconciler.model.errors import Problem
from reconciler.settings import Settings


def opened(settings: Settings | None = None) -> tuple[Engine, str]:
    """The configured database at the newest revision, and that revision."""
    engine = _engine(settings or Settings())
    return engine, migrate(engine)


def as_it_is() -> Engine:
    """The configured database: made where there is none, and never brought to another revision.

    That is for `gpuaas migrate` and the service, after a backup: there is no way back. Problem
    `schema_outdated`.
    """
    engine = _engine(Settings())
    revision = current(engine)
    if revision is None:
        migrate(engine)
    elif revision != head():
        engine.dispose()
        raise outdated(revision)
    return engine


def outdated(revision: str | None) -> Problem:
    """What to say of a database of another version."""
    return Problem(
        "schema_outdated",
        expected=f"the schema of this version, {head()}",
        found=f"revision {revision or 'none'}",
        remedy="take a backup with the version that runs, then `gpuaas migrate`; if a newer"
        " version runs, use its `gpuaas`",
    )


def _engine(settings: Settings) -> Engine:
    folder = settings.state_dir
    try:
        unfinished.refuse(settings)
        # Run folders, keys and the database are for the service's user only.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not settings.database_url:
            # SQLite's other files take their mode from this one.
            (folder / "reconciler.db").touch(mode=0o600)
    except OSError as failure:
        raise _unusable(settings, failure.strerror or str(failure)) from failure
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise _unusable(settings, "this user may not write there")
    return open_engine(settings.database)


def _unusable(settings: Settings, found: str) -> Problem:
    return Problem(
        "state_dir_unusable",
        403,
        expected=f"{settings.state_dir}, GPUAAS_STATE_DIR, as a folder of this user's own",
        found=found,
        remedy="run it as the service's user (`runuser -u gpuaas -- gpuaas …`), or set another"
        " folder",
    )
