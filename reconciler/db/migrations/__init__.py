"""One migration history for both engines."""

from __future__ import annotations

import threading
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from reconciler.db.engine import reading, transaction

# Any number, as long as nothing else in the database locks the same one.
_LOCK = 7_325_011
# Alembic keeps the migration at hand in a global of the process.
_ONE_AT_A_TIME = threading.Lock()


def migrate(engine: sa.Engine, to: str = "head") -> str:
    """Bring the database up to a revision and name it; two at once take turns."""
    with _ONE_AT_A_TIME, transaction(engine) as conn:
        if engine.dialect.name == "postgresql":
            conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent))
        config.attributes["connection"] = conn
        command.upgrade(config, to)
    return current(engine) or ""


def current(engine: sa.Engine) -> str | None:
    """The revision of the database; None when it is empty."""
    with reading(engine) as conn:
        return MigrationContext.configure(conn).get_current_revision()


@cache
def revisions() -> tuple[str, ...]:
    """Every revision that this version knows, oldest first."""
    scripts = ScriptDirectory(str(Path(__file__).parent)).walk_revisions()
    return tuple(reversed([script.revision for script in scripts]))


def head() -> str:
    """The revision that this version of the service works with."""
    return revisions()[-1]
