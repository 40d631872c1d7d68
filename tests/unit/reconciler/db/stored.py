"""Databases of earlier revisions, stored as SQL for each engine.

`python -m tests.unit.reconciler.db.stored` stores those that this version makes.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from reconciler.db.engine import open_engine
from reconciler.db.migrations import migrate
from tests.postgresql import running

FOLDER = Path(__file__).resolve().parents[3] / "data" / "schema"


def load(engine: sa.Engine, revision: str) -> None:
    """Fill an empty database."""
    text = _file(revision, engine.dialect.name).read_text()
    with closing(engine.raw_connection()) as raw:
        connection = raw.driver_connection
        if isinstance(connection, sqlite3.Connection):
            connection.executescript(text)
        else:
            connection.execute(text)
        raw.commit()
    # The dump has changed settings of the session.
    engine.dispose()


def _file(revision: str, dialect: str) -> Path:
    return FOLDER / f"{revision}.{dialect}.sql"


def _made(url: str) -> str:
    engine = open_engine(url)
    revision = migrate(engine)
    engine.dispose()
    return revision


def _main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/new.db"
        revision = _made(f"sqlite:///{file}")
        with closing(sqlite3.connect(file)) as connection:
            text = "".join(f"{line}\n" for line in connection.iterdump())
    _file(revision, "sqlite").write_text(text)
    with running(fsync=False) as server:
        _made(server.url)
        where = ("-h", str(server.folder), "-U", "gpuaas", "-d", "postgres")
        text = server.run("pg_dump", *where, "--no-owner", "--inserts")
    # Without commands of psql.
    lines = (line for line in text.splitlines(keepends=True) if not line.startswith("\\"))
    _file(revision, "postgresql").write_text("".join(lines))


if __name__ == "__main__":
    _main()
