"""Copy of the database in a file, and its restore, with the tools of each engine."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from psycopg.pq import Conninfo
from sqlalchemy import Engine

from reconciler.model.errors import Problem

_SERVICE = "gpuaas"
# libpq strips white space from the end of a password in a service file, and a service cannot refer
# to another service.
_NOT_IN_A_FILE = {"password", "service"}


def copy(engine: Engine, file: Path) -> Path:
    """A consistent copy of a database that other processes may write to."""
    if engine.dialect.name == "postgresql":
        _postgresql(engine, "pg_dump", ["--format=custom", "--no-owner", f"--file={file}"])
        return file
    source, target = sqlite3.connect(str(engine.url.database)), sqlite3.connect(file)
    try:
        source.backup(target)
        # The copy must be a single file, without a write-ahead log beside it.
        target.execute("PRAGMA journal_mode = DELETE")
    finally:
        target.close()
        source.close()
    return file


def existing(engine: Engine) -> str:
    """Description of an existing database, "" if there is none."""
    if engine.dialect.name == "postgresql":
        with engine.connect() as conn:
            tables = sa.inspect(conn).get_table_names()
        return f"a database with {len(tables)} tables" if tables else ""
    target = Path(str(engine.url.database))
    return f"{target} exists" if target.exists() else ""


def put_back(engine: Engine, file: Path) -> None:
    """Create the database from the copy, completely or not at all."""
    if engine.dialect.name == "postgresql":
        words = ["--no-owner", "--exit-on-error", "--single-transaction", str(file)]
        _postgresql(engine, "pg_restore", words)
        return
    target = Path(str(engine.url.database))
    fresh = target.with_name(f".{target.name}.restored")
    fresh.touch(mode=0o600)
    shutil.copyfile(file, fresh)
    with fresh.open("rb") as handle:
        os.fsync(handle.fileno())
    fresh.rename(target)


def _postgresql(engine: Engine, program: str, words: Sequence[str]) -> None:
    if not shutil.which(program):
        raise Problem(
            "program_missing",
            expected=f"{program} of the server's version on this machine",
            found=f"no {program} on PATH",
            remedy="install postgresql-client, or run pg_dump and pg_restore by hand as"
            " docs/operations.md says, and keep the trust folder with the dump",
        )
    # The connection parameters of the service, including those for TLS.
    _, parameters = engine.dialect.create_connect_args(engine.url)
    password = parameters.get("password")
    secret = {"PGPASSWORD": str(password)} if password else {}
    with _service(parameters) as file:
        done = subprocess.run(
            [program, f"--dbname=service={_SERVICE}", *words],
            env={**os.environ, "PGSERVICEFILE": str(file), **secret},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise Problem(
            "program_failed",
            expected=f"{program} to succeed",
            found=f"exit {done.returncode}: {' '.join(done.stderr.split())[-300:]}",
            remedy="nothing was changed; correct the cause and repeat the command",
        )


@contextmanager
def _service(parameters: Mapping[str, Any]) -> Iterator[Path]:
    """A service file for libpq, because every user of this machine can read a command line."""
    # Other parameters are options of the driver, such as its type adapters.
    options = {option.keyword.decode() for option in Conninfo.get_defaults()} - _NOT_IN_A_FILE
    lines = [f"{name}={value}" for name, value in parameters.items() if name in options]
    # Created with mode 600.
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("\n".join([f"[{_SERVICE}]", *lines, ""]))
        file.flush()
        yield Path(file.name)


def not_empty(found: str) -> Problem:
    """Refusal to restore over an existing site."""
    return Problem(
        "restore_not_empty",
        expected="an empty state folder and no database",
        found=found,
        remedy="stop the service and move both away; nothing was restored",
    )
