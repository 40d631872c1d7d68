"""`gpuaas check`: does the database keep its promises?"""

from __future__ import annotations

import typer

from reconciler.cli import session, show


def mount(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check")(check)


def check(context: typer.Context) -> None:
    """Ask the database for everything that must always hold; exit 1 with each violation.

    Reads only, beside a service that runs or without one.
    """
    from reconciler.backup import unfinished
    from reconciler.cli.database import outdated
    from reconciler.db.engine import open_existing, reading
    from reconciler.db.migrations import current, head
    from reconciler.lifecycle import invariants
    from reconciler.settings import Settings

    here = session.of(context)
    settings = Settings()
    unfinished.refuse(settings)
    with open_existing(settings) as engine:
        revision = current(engine)
        if revision != head():
            # Its tables are not those that the questions are about.
            raise outdated(revision)
        with reading(engine) as conn:
            found = invariants.check(conn)
    show.rows(here, [vars(violation) for violation in found], "invariant", "subject", "found")
    show.line(f"database at {revision}: {len(invariants.CHECKS)} checks, {len(found)} violations")
    if found:
        raise typer.Exit(1)
