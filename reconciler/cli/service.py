"""`gpuaas serve`, `gpuaas worker`, `gpuaas migrate`."""

from __future__ import annotations

from typing import Annotated

import typer

from reconciler.cli import failures, show


def mount(app: typer.Typer) -> None:
    """Add the commands of the service itself."""
    app.command("serve")(serve)
    app.command("worker")(worker)
    app.command("migrate")(migrate)


def serve(
    api_only: Annotated[
        bool, typer.Option("--api-only", help="Tasks and loops run in `gpuaas worker` elsewhere.")
    ] = False,
) -> None:
    """Run the API, its workers and the loops until interrupted. Runs on hosts go on without it."""
    # The database, the web server and Ansible's runner: seconds that no other command should pay.
    from reconciler.cli.server import serve as run

    with failures.logged():
        run(api_only=api_only)


def worker() -> None:
    """Run tasks without an API; as many of these as the site wants, on one machine or several."""
    from reconciler.cli.worker import work

    with failures.logged():
        work()


def migrate() -> None:
    """Bring the database to this version's schema."""
    from reconciler.cli.database import opened

    with failures.logged():
        engine, revision = opened()
    engine.dispose()
    show.line(f"database at {revision}")
