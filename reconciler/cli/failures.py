"""What a command can run into before or beside the service, said as any other refusal.

Settings that are refused, a database that is away, a folder that is not ours: an operator's doing,
so a traceback would hide it, and print values that may be secret.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reconciler.model.errors import Problem, Refusal

if TYPE_CHECKING:
    from sqlalchemy.exc import DBAPIError

log = logging.getLogger("gpuaas")

# Another has the file, or it may not be opened or written. All else that SQLite names the same way,
# such as a column that is not there, is a defect.
_SQLITE_AWAY = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
    }
)
# PostgreSQL's classes: no connection, an operator's intervention, no login.
_AWAY_CLASSES = ("08", "57P", "28")
# No such database, too many connections, a lock that is not given, a server that only reads.
_AWAY = frozenset({"3D000", "53300", "55P03", "25006"})
_NOT_LET_IN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def logged() -> Iterator[None]:
    """The service is told in one line why it ends; its log keeps where that came from as well."""
    try:
        yield
    except Exception as failure:
        if _of_settings(failure) is None and (_of_database(failure) or _of_file(failure)):
            if hasattr(failure, "hide_parameters"):
                # A statement's values stay out of the log.
                failure.hide_parameters = True
            log.exception("ended by what it ran into")
        raise


def told(failure: Exception) -> Problem | None:
    """The refusal that the failure is; None for a defect of the program itself."""
    if isinstance(failure, Problem):
        return failure
    if isinstance(failure, Refusal):
        return Problem(
            failure.code,
            422,
            expected=failure.expected,
            found=failure.found,
            remedy=failure.remedy,
        )
    return (
        _of_settings(failure) or _of_database(failure) or _of_program(failure) or _of_file(failure)
    )


def _of_settings(failure: Exception) -> Problem | None:
    # Whoever read no settings has not loaded what refuses them.
    loaded = sys.modules.get("reconciler.settings")
    if loaded is None:
        return None
    from pydantic import ValidationError

    file = loaded.config_file()
    if isinstance(failure, FileNotFoundError) and failure.filename == str(file):
        return Problem(
            "settings_invalid",
            404,
            expected=f"a file at {file}, which {loaded.CONFIG_FILE_VARIABLE} names",
            found="none",
            remedy=f"correct {loaded.CONFIG_FILE_VARIABLE}, or unset it for {loaded.CONFIG_FILE}",
        )
    if isinstance(failure, OSError) and failure.filename == str(file):
        return Problem(
            "settings_invalid",
            403,
            expected=f"{file} as a text file that this user may read",
            found=failure.strerror or str(failure),
            remedy="run it as the service's user (`runuser -u gpuaas -- gpuaas …`), or, to talk to"
            " a service as anybody else, set GPUAAS_TOKEN_FILE",
        )
    if not isinstance(failure, ValidationError) or failure.title != loaded.Settings.__name__:
        return None
    return Problem(
        "settings_invalid",
        400,
        expected="settings that docs/configuration.md allows",
        found="; ".join(f"{name}: {rule}" for name, rule in loaded.refused(failure)),
        remedy=f"correct them in the environment or in {file}; then `gpuaas doctor`",
    )


def _of_database(failure: Exception) -> Problem | None:
    if "sqlalchemy" not in sys.modules:
        return None
    from sqlalchemy import exc

    # Of others the driver's text can quote the values of a statement.
    if not isinstance(failure, exc.DBAPIError) or not _is_away(failure):
        return None
    return Problem(
        "database_unavailable",
        503,
        expected="a database that answers",
        found=" ".join(str(failure.orig).split())[:300],
        remedy="look whether it runs and whether GPUAAS_DATABASE_URL, or the mode of the state"
        " folder, lets this user in; `gpuaas doctor` looks at both",
    )


def _is_away(failure: DBAPIError) -> bool:
    """It is not there, or lets nobody do this now; what was asked of it may well be right."""
    from sqlalchemy import exc

    if failure.connection_invalidated:
        return True
    cause = failure.orig
    if isinstance(cause, sqlite3.Error):
        # The low byte is the code; the others say more of it.
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in _SQLITE_AWAY
    state = getattr(cause, "sqlstate", None)
    if state is None:
        # The server said nothing: no connection was made.
        return isinstance(failure, exc.OperationalError)
    return state in _AWAY or state.startswith(_AWAY_CLASSES)


def _of_program(failure: Exception) -> Problem | None:
    # A program is started by its name; what has a path is a file or folder that we expected.
    if not isinstance(failure, FileNotFoundError) or not _starts_program(failure):
        return None
    return Problem(
        "program_missing",
        500,
        expected=f"{failure.filename} on this machine",
        found="none on PATH",
        remedy="install it, or correct PATH",
    )


def _starts_program(failure: FileNotFoundError) -> bool:
    trace = failure.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = trace.tb_frame.f_globals.get("__name__") if trace else None
    return at == "subprocess" and "/" not in str(failure.filename)


def _of_file(failure: Exception) -> Problem | None:
    # Without a name it is a pipe or a socket, which says nothing of this machine's files.
    if not isinstance(failure, OSError) or failure.filename is None:
        return None
    # A file that is not there, or is there already, is what the program itself did not expect.
    if failure.errno not in _NOT_LET_IN:
        return None
    return Problem(
        "file_unusable",
        403,
        expected="files and folders that this user may use",
        found=f"{failure.filename}: {failure.strerror}",
        remedy="run it as the service's user (`runuser -u gpuaas -- gpuaas …`), or set the folder"
        " that is meant, such as GPUAAS_STATE_DIR",
    )
