"""The database as one file and back, with each engine's own means."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Engine

from reconciler.domain.errors import Problem


def copy(engine: Engine, file: Path) -> Path:
    """A consistent copy of a database that others go on writing to."""
    if engine.dialect.name == "postgresql":
        _postgresql(engine, "pg_dump", ["--format=custom", "--no-owner", f"--file={file}"])
        return file
    source, target = sqlite3.connect(str(engine.url.database)), sqlite3.connect(file)
    try:
        source.backup(target)
        # A single file: the copy must not need a log beside it.
        target.execute("PRAGMA journal_mode = DELETE")
    finally:
        target.close()
        source.close()
    return file


def put_back(engine: Engine, file: Path) -> None:
    """Make the database of the copy; only where there is none."""
    if engine.dialect.name == "postgresql":
        _refuse_tables(engine)
        words = ["--no-owner", "--exit-on-error", "--single-transaction", str(file)]
        _postgresql(engine, "pg_restore", words)
        return
    target = Path(str(engine.url.database))
    if target.exists():
        raise not_empty(f"{target} exists")
    fresh = target.with_name(f".{target.name}.restored")
    shutil.copyfile(file, fresh)
    fresh.chmod(0o600)
    fresh.rename(target)


def _refuse_tables(engine: Engine) -> None:
    with engine.connect() as conn:
        tables = sa.inspect(conn).get_table_names()
    if tables:
        raise not_empty(f"a database with {len(tables)} tables")


def _postgresql(engine: Engine, program: str, words: Sequence[str]) -> None:
    if not shutil.which(program):
        raise Problem(
            "program_missing",
            expected=f"{program} of the server's version on this machine",
            found="none on PATH",
            remedy="install postgresql-client, or run pg_dump and pg_restore by hand as"
            " docs/operations.md says, and keep the trust folder with the dump",
        )
    url = engine.url
    where = {
        "PGHOST": url.host or url.query.get("host"),
        "PGPORT": url.port or url.query.get("port"),
        "PGUSER": url.username,
        # Not on the command line, where every user of this machine could read it.
        "PGPASSWORD": url.password,
        "PGDATABASE": url.database,
    }
    given = {name: str(value) for name, value in where.items() if value}
    target = [f"--dbname={url.database}"] if program == "pg_restore" else []
    done = subprocess.run(
        [program, *target, *words],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Problem(
            "program_failed",
            expected=f"{program} to succeed",
            found=f"exit {done.returncode}: {' '.join(done.stderr.split())[-300:]}",
            remedy="nothing was changed; correct the cause and do it again",
        )


def not_empty(found: str) -> Problem:
    """There is a site already."""
    return Problem(
        "restore_not_empty",
        expected="an empty state folder and no database",
        found=found,
        remedy="stop the service and move the old ones away; nothing was restored",
    )
