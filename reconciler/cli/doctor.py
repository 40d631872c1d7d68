"""`gpuaas doctor` checks the installation, `gpuaas check` the invariants of the database."""

from __future__ import annotations

import typer

from reconciler.cli import output, session


def mount(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command("check")(check)
    app.command("doctor")(doctor)


def doctor(context: typer.Context) -> None:
    """Check settings, folders, keys, programs, database and processes; exit 1 on a failure.

    Changes nothing. Run it as the service's user, with the service's settings.
    """
    from reconciler.doctor.examine import examine

    here = session.of(context)
    findings = examine()
    failures = sum(finding.status == "fail" for finding in findings)
    warnings = sum(finding.status == "warn" for finding in findings)
    documents = [vars(finding) for finding in findings]
    if here.output == "json":
        output.document({"failures": failures, "warnings": warnings, "findings": documents})
    else:
        output.rows(here, documents, "status", "check", "found", "expected", "remedy")
        output.line(f"{len(findings)} findings, {failures} failures, {warnings} warnings")
    if failures:
        raise typer.Exit(1)


def check(context: typer.Context) -> None:
    """Check every invariant of the database; exit 1 with a line for each violation.

    Reads only. The service may run meanwhile, but need not.
    """
    from reconciler.backup import refuse_unfinished_restore
    from reconciler.cli.service import outdated
    from reconciler.db.engine import open_existing, reading
    from reconciler.db.migrations import current, head
    from reconciler.lifecycle import invariants
    from reconciler.settings import Settings

    here = session.of(context)
    settings = Settings()
    refuse_unfinished_restore(settings)
    with open_existing(settings) as engine:
        revision = current(engine)
        if revision != head():
            # The checks query the tables of this version's schema.
            raise outdated(revision)
        with reading(engine) as conn:
            violations = invariants.check(conn)
    output.rows(here, [vars(row) for row in violations], "invariant", "subject", "found")
    count = len(invariants.CHECKS)
    output.line(f"database at {revision}: {count} checks, {len(violations)} violations")
    if violations:
        raise typer.Exit(1)
