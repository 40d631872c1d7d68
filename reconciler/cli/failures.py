"""Local failures as refusals: invalid settings, an unavailable database, an unusable file.

Operators cause and repair these failures. A traceback would hide the cause and print values that
may be secret.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reconciler.model.errors import Problem, Refusal

if TYPE_CHECKING:
    from sqlalchemy.exc import DBAPIError

log = logging.getLogger("gpuaas")

# Another process has the file, or it cannot be opened or written. Other errors of the same class,
# such as a missing column, are defects.
_SQLITE_AWAY = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
)
# PostgreSQL's classes: no connection, operator intervention, no login.
_AWAY_CLASSES = ("08", "57P", "28")
# No such database, disk full, too many connections, lock not available, read-only server, a role
# without a right, such as that to make the tables of a new site.
_AWAY = ("3D000", "53100", "53300", "55P03", "25006", "42501")
# Of writes to an open file, such an error names no file.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def logged() -> Iterator[None]:
    """Log the traceback of a failure that ends the service; the command prints only a refusal."""
    try:
        yield
    except Exception as failure:
        local = _of_room(failure) or _of_database(failure) or _of_file(failure)
        if _of_settings(failure) is None and local:
            if hasattr(failure, "hide_parameters"):
                # Keep the values of a statement out of the log.
                failure.hide_parameters = True
            log.exception("ended by a local failure")
        raise


def as_problem(failure: Exception) -> Problem | None:
    """The failure as a refusal; None for a defect of the program itself."""
    if isinstance(failure, Problem):
        return failure
    if isinstance(failure, Refusal):
        parts = {name: getattr(failure, name) for name in ("expected", "found", "remedy")}
        return Problem(failure.code, 422, **parts)
    kinds = (_of_settings, _of_room, _of_database, _of_program, _of_file)
    return next((problem for kind in kinds if (problem := kind(failure))), None)


def _of_settings(failure: Exception) -> Problem | None:
    # A command that read no settings has not loaded their module.
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
        if failure.errno == errno.EILSEQ:
            return Problem(
                "settings_invalid",
                400,
                expected=f"one NAME=value per line in {file}, as text in UTF-8",
                found=str(failure.strerror),
                remedy="correct the file; then `gpuaas doctor`",
            )
        return Problem(
            "settings_invalid",
            403,
            expected=f"{file} as a text file that this user may read",
            found=failure.strerror or str(failure),
            remedy="run it as the service's user (`runuser -u gpuaas -- gpuaas …`), or set"
            " GPUAAS_TOKEN_FILE to talk to the service as another user",
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


def _of_room(failure: Exception) -> Problem | None:
    cause: Any = getattr(failure, "orig", failure)
    full = getattr(cause, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    if not full and getattr(cause, "errno", None) not in _FULL:
        return None
    file = getattr(cause, "filename", None)
    return Problem(
        "disk_full",
        507,
        expected="room on the disks of this machine that the command writes to",
        found=f"{file}: {cause.strerror}" if file else str(cause),
        remedy="free space (`df -h; df -i`), mostly of GPUAAS_STATE_DIR or of the folder that the"
        " command names, then repeat the command; `gpuaas doctor` warns before it is too late",
    )


def _of_database(failure: Exception) -> Problem | None:
    if "sqlalchemy" not in sys.modules:
        return None
    from sqlalchemy import exc

    # In other errors the driver's text can quote the values of a statement.
    if not isinstance(failure, exc.DBAPIError) or not _is_away(failure):
        return None
    return Problem(
        "database_unavailable",
        503,
        expected="a database that answers",
        found=" ".join(str(failure.orig).split())[:300],
        remedy="check that it runs, and that GPUAAS_DATABASE_URL or the mode of the state folder"
        " lets this user in; `gpuaas doctor` checks both",
    )


def _is_away(failure: DBAPIError) -> bool:
    """Whether the database is unavailable or refuses access, rather than the statement wrong."""
    from sqlalchemy import exc

    if failure.connection_invalidated:
        return True
    cause = failure.orig
    if isinstance(cause, sqlite3.Error):
        # The low byte is the code; the other bytes refine it.
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF in _SQLITE_AWAY
    state = getattr(cause, "sqlstate", None)
    if state is None:
        # No answer of a server: no connection was made.
        return isinstance(failure, exc.OperationalError)
    return state in _AWAY or state.startswith(_AWAY_CLASSES)


def _of_program(failure: Exception) -> Problem | None:
    # Programs are started by name. A name with a path is a missing file or folder instead.
    if not isinstance(failure, FileNotFoundError) or "/" in str(failure.filename):
        return None
    frames = traceback.extract_tb(failure.__traceback__)
    if not frames or frames[-1].filename != subprocess.__file__:
        return None
    return Problem(
        "program_missing",
        500,
        expected=f"{failure.filename} on this machine",
        found="none on PATH",
        remedy="install it, or correct PATH",
    )


def _of_file(failure: Exception) -> Problem | None:
    # Without a name it is a pipe or a socket, not a file of this machine.
    if not isinstance(failure, OSError) or failure.filename is None:
        return None
    # A missing or already existing file is a defect of the program itself.
    if failure.errno not in _NO_PERMISSION:
        return None
    return Problem(
        "file_unusable",
        403,
        expected="files and folders that this user may use",
        found=f"{failure.filename}: {failure.strerror}",
        remedy="run it as the service's user (`runuser -u gpuaas -- gpuaas …`), or set the intended"
        " folder, such as GPUAAS_STATE_DIR",
    )
