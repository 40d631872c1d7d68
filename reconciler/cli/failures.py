"""What a command can run into before or beside the service, said as any other refusal.

Settings that are refused, a database that is away, a folder that is not ours: an operator's doing,
so a traceback would hide it, and print values that may be secret.
"""

from __future__ import annotations

import sys

from reconciler.domain.errors import Problem, Refusal


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
    return _of_settings(failure) or _of_database(failure) or _of_file(failure)


def _of_settings(failure: Exception) -> Problem | None:
    # Whoever read no settings has not loaded what refuses them.
    loaded = sys.modules.get("reconciler.settings")
    if loaded is None:
        return None
    from pydantic import ValidationError

    file = loaded.config_file()
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
    if not isinstance(failure, exc.OperationalError | exc.InterfaceError):
        return None
    return Problem(
        "database_unavailable",
        503,
        expected="a database that answers",
        found=" ".join(str(failure.orig).split())[:300],
        remedy="look whether it runs and whether GPUAAS_DATABASE_URL, or the mode of the state"
        " folder, lets this user in; `gpuaas doctor` looks at both",
    )


def _of_file(failure: Exception) -> Problem | None:
    # Without a name it is a pipe or a socket, which says nothing of this machine's files.
    if not isinstance(failure, OSError) or failure.filename is None:
        return None
    return Problem(
        "file_unusable",
        403,
        expected="files and folders that this user may use",
        found=f"{failure.filename}: {failure.strerror}",
        remedy="run it as the service's user (`runuser -u gpuaas -- gpuaas …`), or set the folder"
        " that is meant, such as GPUAAS_STATE_DIR",
    )
