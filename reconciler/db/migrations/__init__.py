"""Schema migrations, with the same history for SQLite and PostgreSQL.

A new database is made from `db.schema` and begins at the newest revision. Migrations bring older
ones there.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib.metadata import version
from pathlib import Path

import sqlalchemy as sa

from reconciler.db.engine import reading, transaction, without_limits
from reconciler.db.schema import creation
from reconciler.model.errors import Problem

# Key of the advisory lock. Any number that has no other use in the database would do.
_LOCK = 7_325_011
# Alembic keeps the current migration in a global variable of the process.
_ONE_AT_A_TIME = threading.Lock()
# Alembic's own.
_TABLE = sa.table("alembic_version", sa.column("version_num", sa.Text))


def migrate(engine: sa.Engine) -> str:
    """Bring the database to the newest schema; its revision. Simultaneous calls run in turn.

    Problem `schema_outdated` for a database whose revision this version does not know.
    """
    if current(engine) == head():
        # Any role of the database can hold the lock.
        return head()
    with _ONE_AT_A_TIME, transaction(engine) as conn:
        without_limits(conn)
        if engine.dialect.name == "postgresql":
            conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        revision = _current(conn)
        if revision is not None:
            _lock_schema(conn, "EXCLUSIVE")
        if revision is not None and revision not in revisions():
            raise Problem(
                "schema_outdated",
                expected=f"an empty database, or revision {span()}",
                found=f"revision {revision}",
                remedy="start the version of the service that made this database; an older revision"
                f" needs a version that migrates it to {revisions()[0]} first",
            )
        # Only this needs Alembic, which is an eighth of what a worker loads.
        from alembic import command  # noqa: PLC0415
        from alembic.config import Config  # noqa: PLC0415

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent))
        config.attributes["connection"] = conn
        if revision is None:
            creation.create(conn)
            command.stamp(config, "head")
        else:
            command.upgrade(config, "head")
    return current(engine) or ""


def current(engine: sa.Engine) -> str | None:
    """Revision of the database; None for an empty database."""
    with reading(engine) as conn:
        return _current(conn)


def refuse_newer(conn: sa.Connection) -> None:
    """Problem `schema_outdated` when a newer version has migrated the database meanwhile.

    A process of this version would otherwise go on with rules that no longer hold.
    """
    revision = _current(conn)
    if revision is not None and revision not in revisions():
        raise Problem(
            "schema_outdated",
            expected=f"a schema that this version knows, up to {head()}",
            found=f"revision {revision}: a newer version has migrated the database",
            remedy="start the newer version on this machine too; this process ends",
        )


def refuse_migration(conn: sa.Connection) -> None:
    """`refuse_newer`, and no migration begins before the end of this transaction.

    It must be the first lock of the transaction, as it is of a migration. It waits for a migration
    that has begun. It is a lock of a table, because the gateway's role can hold advisory locks.
    """
    _lock_schema(conn, "ROW SHARE")
    refuse_newer(conn)


def _lock_schema(conn: sa.Connection, mode: str) -> None:
    # The only writer of SQLite excludes all others. Readers wait for neither mode.
    if conn.dialect.name == "postgresql":
        conn.exec_driver_sql(f"LOCK TABLE {_TABLE.name} IN {mode} MODE")


def _current(conn: sa.Connection) -> str | None:
    if not sa.inspect(conn).has_table(_TABLE.name):
        return None
    return conn.execute(sa.select(_TABLE.c.version_num)).scalar_one_or_none()


@cache
def revisions() -> tuple[str, ...]:
    """Every revision in this version of the service, oldest first: its file has its number."""
    files = (Path(__file__).parent / "versions").glob("[0-9]*.py")
    return tuple(sorted(file.name.partition("_")[0] for file in files))


def head() -> str:
    """Revision that this version of the service needs."""
    return revisions()[-1]


def span() -> str:
    """The revisions that this version can migrate, for a refusal of others."""
    return " to ".join(dict.fromkeys((revisions()[0], head())))


@cache
def program_version() -> str:
    """Version of this program and the revision that it needs, such as "0.1.0+0058".

    As of the first call: the files of a running program may be replaced.
    """
    return f"{version('gpuaas-slice')}+{head()}"
