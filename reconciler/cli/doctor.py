"""`gpuaas doctor`: what is wrong with this installation?"""

from __future__ import annotations

import typer

from reconciler.cli import session, show


def mount(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(context: typer.Context) -> None:
    """Look at settings, folders, keys, programs, database and processes; exit 1 on a failure.

    Changes nothing. Run it as the service's user, with the service's settings.
    """
    from reconciler.doctor.examine import examine

    here = session.of(context)
    found = examine()
    failures = sum(finding.status == "fail" for finding in found)
    warnings = sum(finding.status == "warn" for finding in found)
    if here.output == "json":
        documents = [finding.document() for finding in found]
        show.document({"failures": failures, "warnings": warnings, "findings": documents})
    else:
        columns = ("status", "check", "found", "expected", "remedy")
        show.rows(here, [finding.document() for finding in found], *columns)
        show.line(f"{len(found)} findings, {failures} failures, {warnings} warnings")
    if failures:
        raise typer.Exit(1)
