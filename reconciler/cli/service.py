"""`gpuaas serve`, `gpuaas worker`, `gpuaas migrate`, and the database that they open.

The imports are deferred: the database, the web server and Ansible's runner take seconds to load.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from reconciler.cli import failures, output
from reconciler.model.errors import Problem

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from reconciler.settings import Settings

log = logging.getLogger("gpuaas")


def mount(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command("serve")(serve)
    app.command("worker")(worker)
    app.command("migrate")(migrate)


def serve(
    api_only: Annotated[
        bool, typer.Option("--api-only", help="Leave tasks and loops to `gpuaas worker`.")
    ] = False,
) -> None:
    """Run the API, its workers and the loops until interrupted. Runs on hosts outlive it."""
    from reconciler.cli import server

    with failures.logged():
        server.serve(api_only=api_only)


def worker() -> None:
    """Run tasks without an API. Several workers may run, on one machine or more."""
    with failures.logged():
        run_worker()


def migrate() -> None:
    """Bring the database to this version's schema."""
    with failures.logged():
        engine, revision = open_migrated()
    engine.dispose()
    output.line(f"database at {revision}")


def run_worker() -> None:
    """Run tasks, and the site's loops while this process leads, until SIGINT or SIGTERM.

    Loads no web framework, because a site may run many workers.
    """
    from reconciler import logs
    from reconciler.service import process
    from reconciler.settings import Settings

    settings = Settings()
    logs.configure(settings)
    if not settings.workers:
        raise Problem(
            "workers_missing",
            400,
            expected="GPUAAS_WORKERS of at least 1 for a worker",
            found="0",
            remedy="set it, or run `gpuaas serve --api-only` here",
        )
    engine, revision = open_migrated(settings)
    process.adopt(settings, engine)
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    try:
        with process.running(settings, engine, api=False, work=True):
            log.info("database at %s, %d tasks at a time", revision, settings.workers)
            stopping.wait()
    finally:
        engine.dispose()


def open_migrated(settings: Settings | None = None) -> tuple[Engine, str]:
    """The configured database, migrated to the newest revision, and that revision."""
    from reconciler.db.migrations import migrate as migrate_schema
    from reconciler.settings import Settings

    engine = _open(settings or Settings())
    return engine, migrate_schema(engine)


def open_unmigrated() -> Engine:
    """The configured database; created if missing, but never migrated.

    A migration has no way back, so only `gpuaas migrate` and the service migrate, after a backup.
    Problem `schema_outdated`.
    """
    from reconciler.db.migrations import current, head
    from reconciler.db.migrations import migrate as migrate_schema
    from reconciler.settings import Settings

    engine = _open(Settings())
    revision = current(engine)
    if revision is None:
        migrate_schema(engine)
    elif revision != head():
        engine.dispose()
        raise outdated(revision)
    return engine


def outdated(revision: str | None) -> Problem:
    """The refusal of a database with another version's schema."""
    from reconciler.db.migrations import head

    return Problem(
        "schema_outdated",
        expected=f"the schema of this version, {head()}",
        found=f"revision {revision or 'none'}",
        remedy="take a backup with the version that runs, then `gpuaas migrate`; if a newer"
        " version runs, use its `gpuaas`",
    )


def _open(settings: Settings) -> Engine:
    from reconciler.backup import refuse_unfinished_restore
    from reconciler.db.engine import open_engine

    folder = settings.state_dir
    try:
        refuse_unfinished_restore(settings)
        # Run folders, keys and the database are for the service's user only.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not settings.database_url:
            # SQLite's other files inherit the mode of this file.
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
