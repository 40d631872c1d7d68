"""The settings themselves: what is refused, what is misspelt, who can read them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from dotenv import dotenv_values
from pydantic import ValidationError

from reconciler.doctor.finding import Finding, fail, ok, warn
from reconciler.service.configuration import OTHERS
from reconciler.settings import CONFIG_FILE_VARIABLE, PREFIX, Settings, config_file, refused

CHECK = "settings"
# Names of other programs of this project: the lab, the scripts that hosts run.
_NOT_OURS = ("GPUAAS_LAB_", "GPUAAS_SLICE_", "GPUAAS_RUN_", "GPUAAS_MAAS_")


def settings() -> tuple[Settings | None, list[Finding]]:
    """The settings as the service would have them; None when it would not start with them."""
    found = list(_file())
    try:
        read = Settings()
    except ValidationError as wrong:
        for name, rule in refused(wrong):
            found.append(
                fail(
                    CHECK,
                    f"{name}: {rule}",
                    expected="a value that docs/configuration.md allows",
                    remedy=f"correct {name} in the environment or in {config_file()}",
                )
            )
        return None, found
    except OSError as closed:
        return None, [_closed(closed)]
    found += _misspelt()
    return read, found or [ok(CHECK, f"environment and {config_file()}")]


def _file() -> Iterator[Finding]:
    file = config_file()
    if file.is_file() and file.stat().st_mode & 0o007:
        yield warn(
            CHECK,
            f"{file} is open to everybody (mode {file.stat().st_mode & 0o777:03o})",
            expected="mode 640: a database URL holds a password",
            remedy=f"chmod 640 {file}",
        )


def _misspelt() -> Iterator[Finding]:
    known = {PREFIX + name.upper() for name in Settings.model_fields} | set(OTHERS)
    file = config_file()
    given = dict.fromkeys(os.environ, "the environment")
    if file.is_file():
        given |= dict.fromkeys(dotenv_values(file), str(file))
    for name, where in sorted(given.items()):
        if name.startswith(PREFIX) and name not in known and not name.startswith(_NOT_OURS):
            yield warn(
                CHECK,
                f"{name} in {where}, which no setting is called",
                expected="names of docs/configuration.md",
                remedy="correct the name or remove it; now it does nothing",
            )


def _closed(failure: OSError) -> Finding:
    return fail(
        CHECK,
        f"{config_file()} cannot be read: {failure.strerror}",
        expected="a text file that the service's user can read",
        remedy="give it the service's group and mode 640; of one that is not there, correct"
        f" {CONFIG_FILE_VARIABLE}",
    )
