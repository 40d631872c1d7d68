"""All checks of the doctor, in the order in which they depend on each other; the settings first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from dotenv import dotenv_values
from pydantic import ValidationError

from reconciler.doctor import Finding, fail, installation, ok, services, warn
from reconciler.service.configuration import OTHERS
from reconciler.settings import CONFIG_FILE_VARIABLE, PREFIX, Settings, config_file, refused

# Variables of other programs of this project: the lab, and scripts that run on hosts.
_OTHER_PREFIXES = ("GPUAAS_LAB_", "GPUAAS_SLICE_", "GPUAAS_RUN_", "GPUAAS_MAAS_")
_CHECKS = {
    "listeners": installation.listeners,
    "state_dir": installation.state_folder,
    "ssh_ca": installation.keys,
    "disk_space": installation.free_space,
    "programs": installation.programs,
    "collection": installation.collection,
    "profiles": installation.profiles,
    "identity_provider": services.identity_provider,
    "awx": services.awx,
}


def examine() -> list[Finding]:
    """All findings. Checks that need settings or a database are left out without them."""
    settings, findings = _settings()
    if settings is None:
        return findings
    for name, check in _CHECKS.items():
        findings += _guarded(name, partial(check, settings))
    engine, problems = services.database(settings)
    findings += problems
    if engine is not None:
        findings += _guarded("records", partial(services.records, settings, engine))
        engine.dispose()
    return findings


def _guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Findings of a check. An exception becomes a finding, so that the other checks still run."""
    try:
        yield from check()
    except Exception as failure:
        yield fail(
            name,
            f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}",
            expected="a check without an error",
            remedy="run the doctor as the service's user, then read the error",
        )


def _settings() -> tuple[Settings | None, list[Finding]]:
    """The settings of the service, None when it could not start with them, and the findings."""
    findings = list(file_mode())
    try:
        settings = Settings()
    except ValidationError as wrong:
        findings += [
            fail(
                "settings",
                f"{name}: {rule}",
                expected="a value that docs/configuration.md allows",
                remedy=f"correct {name} in the environment or in {config_file()}",
            )
            for name, rule in refused(wrong)
        ]
        return None, findings
    except OSError as closed:
        unreadable = fail(
            "settings",
            f"{config_file()} cannot be read: {closed.strerror}",
            expected="a text file that the service's user can read",
            remedy="give it the service's group and mode 640; if the file does not exist, correct"
            f" {CONFIG_FILE_VARIABLE}",
        )
        return None, [unreadable]
    findings += _unknown_names()
    return settings, findings or [ok("settings", f"environment and {config_file()}")]


def file_mode() -> Iterator[Finding]:
    """A warning when all users of the machine can read the file of settings."""
    file = config_file()
    if file.is_file() and file.stat().st_mode & 0o007:
        yield warn(
            "settings",
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
                "settings",
                f"{name} in {source}, which is the name of no setting",
                expected="names of docs/configuration.md",
                remedy="correct the name or remove it; it has no effect",
            )
