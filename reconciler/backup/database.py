"""The database as one file and back, with each engine's own means."""

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
# A password may end in white space, which libpq takes off there; a service cannot name another.
_NOT_IN_A_FILE = {"password", "service"}


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


def found(engine: Engine) -> str:
    """What is there already, "" for nothing."""
    if engine.dialect.name == "postgresql":
        with engine.connect() as conn:
            tables = sa.inspect(conn).get_table_names()
        return f"a database with {len(tables)} tables" if tables else ""
    target = Path(str(engine.url.database))
    return f"{target} exists" if target.exists() else ""


def put_back(engine: Engine, file: Path) -> None:
    """Make the database of the copy, all of it or nothing, where there is none."""
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
            found="none on PATH",
            remedy="install postgresql-client, or run pg_dump and pg_restore by hand as"
            " docs/operations.md says, and keep the trust folder with the dump",
        )
    # The way to the server as the service itself goes it, TLS and all.
    _, given = engine.dialect.create_connect_args(engine.url)
    secret = {"PGPASSWORD": str(given["password"])} if given.get("password") else {}
    with _service(given) as file:
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
            remedy="nothing was changed; correct the cause and do it again",
        )


@contextmanager
def _service(words: Mapping[str, Any]) -> Iterator[Path]:
    """A file for libpq: what is on a command line every user of this machine could read."""
    # Some are words for the driver itself, such as what converts its values.
    known = {option.keyword.decode() for option in Conninfo.get_defaults()} - _NOT_IN_A_FILE
    lines = [f"{name}={value}" for name, value in words.items() if name in known]
    # Made for its owner only.
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("\n".join([f"[{_SERVICE}]", *lines, ""]))
        file.flush()
        yield Path(file.name)


def not_empty(found: str) -> Problem:
    """There is a site already."""
    return Problem(
        "restore_not_empty",
        expected="an empty state folder and no database",
        found=found,
        remedy="stop the service and move the old ones away; nothing was restored",
    )
