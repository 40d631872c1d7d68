"""Checks of the settings: invalid values, unknown names, permissions of the file."""

from __future__ import annotations

import os
from collections.abc import Iterator

from dotenv import dotenv_values
from pydantic import ValidationError

from reconciler.doctor.finding import Finding, fail, ok, warn
from reconciler.service.configuration import OTHERS
from reconciler.settings import CONFIG_FILE_VARIABLE, PREFIX, Settings, config_file, refused

CHECK = "settings"
# Variables of other programs of this project: the lab, and scripts that run on hosts.
_OTHER_PREFIXES = ("GPUAAS_LAB_", "GPUAAS_SLICE_", "GPUAAS_RUN_", "GPUAAS_MAAS_")


def settings() -> tuple[Settings | None, list[Finding]]:
    """The settings of the service, None when it could not start with them, and the findings."""
    findings = list(_file())
    try:
        read = Settings()
    except ValidationError as wrong:
        for name, rule in refused(wrong):
            findings.append(
                fail(
                    CHECK,
                    f"{name}: {rule}",
                    expected="a value that docs/configuration.md allows",
                    remedy=f"correct {name} in the environment or in {config_file()}",
                )
            )
        return None, findings
    except OSError as closed:
        return None, [_closed(closed)]
    findings += _unknown_names()
    return read, findings or [ok(CHECK, f"environment and {config_file()}")]


def _file() -> Iterator[Finding]:
    file = config_file()
    if file.is_file() and file.stat().st_mode & 0o007:
        yield warn(
            CHECK,
            f"{file} is accessible to all users (mode {file.stat().st_mode & 0o777:03o})",
            expected="mode 640, because a database URL contains a password",
            remedy=f"chmod 640 {file}",
        )


def _unknown_names() -> Iterator[Finding]:
    names = {PREFIX + name.upper() for name in Settings.model_fields} | set(OTHERS)
    file = config_file()
    sources = dict.fromkeys(os.environ, "the environment")
    if file.is_file():
        sources |= dict.fromkeys(dotenv_values(file), str(file))
    for name, source in sorted(sources.items()):
        if name.startswith(PREFIX) and name not in names and not name.startswith(_OTHER_PREFIXES):
            yield warn(
                CHECK,
                f"{name} in {source}, which is the name of no setting",
                expected="names of docs/configuration.md",
                remedy="correct the name or remove it; it has no effect",
            )


def _closed(failure: OSError) -> Finding:
    return fail(
        CHECK,
        f"{config_file()} cannot be read: {failure.strerror}",
        expected="a text file that the service's user can read",
        remedy="give it the service's group and mode 640; if the file does not exist, correct"
        f" {CONFIG_FILE_VARIABLE}",
    )
