"""All checks of the doctor, in the order in which they depend on each other; the settings first."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from dotenv import dotenv_values
from pydantic import ValidationError
from sqlalchemy import Connection, Engine

from reconciler.db.engine import open_engine, reading
from reconciler.doctor import (
    Finding,
    exposure,
    fail,
    installation,
    inventory,
    ok,
    services,
    warn,
)
from reconciler.service.configuration import OTHERS
from reconciler.settings import CONFIG_FILE_VARIABLE, PREFIX, Settings, config_file, refused

# Variables of other programs of this project: the lab, and scripts that run on hosts.
_OTHER_PREFIXES = ("GPUAAS_LAB_", "GPUAAS_SLICE_", "GPUAAS_RUN_")
_CHECKS: dict[str, Callable[[Settings], Iterable[Finding]]] = {
    "listen": installation.listen,
    "operator_listen": installation.operator_listen,
    "public_url": installation.public_url,
    "state_dir": installation.state_folder,
    "ssh_ca": installation.keys,
    "disk_space": installation.free_space,
    **{name: partial(installation.program, name) for name in installation.PROGRAMS},
    "ansible_runner": installation.ansible_runner,
    "collection": installation.collection,
    "profiles": installation.profiles,
    "identity_provider": services.identity_provider,
    "awx": services.awx,
    "netbox": inventory.netbox,
    "maas": inventory.maas,
    "ufm": services.ufm,
    "redis": services.redis,
    "database": services.database,
}
RecordCheck = Callable[[Settings, Connection], Iterable[Finding]]
_RECORD_CHECKS: dict[str, RecordCheck] = {
    "clock": services.same_clock,
    "authorities": services.ssh_authorities,
    "tokens": services.admin_tokens,
    "host_certificates": services.host_certificates,
    "images": services.image_files,
    "fabric": services.fabric,
    "guest_reach": exposure.guest_reach,
    "processes": services.processes,
    "job_workers": services.job_workers,
    "leader": services.loops_leader,
    "leases": services.leases,
    "run_locks": services.run_locks,
    "member_address": services.member_address,
    "way": services.any_way,
}


def examine(allocation_id: str = "") -> list[dict[str, str]]:
    """All findings, each with the name of its check. allocation_id: the slice to try the way to.

    Checks that need settings, a database or its schema are left out without them.
    """
    findings = list(_findings("settings", _settings))
    if any(finding["status"] == "fail" for finding in findings):
        return findings
    settings = Settings()
    for name, check in _CHECKS.items():
        findings += _findings(name, partial(check, settings))
    if findings[-1]["status"] == "fail":
        return findings
    engine = open_engine(settings.database)
    try:
        findings += _findings("schema", partial(services.schema, engine))
        if findings[-1]["status"] == "ok":
            checks = dict(_RECORD_CHECKS)
            if allocation_id:
                checks["way"] = partial(services.way, allocation_id)
            for name, record_check in checks.items():
                findings += _findings(name, partial(_recorded, engine, record_check, settings))
    finally:
        engine.dispose()
    return findings


def _recorded(engine: Engine, check: RecordCheck, settings: Settings) -> Iterator[Finding]:
    with reading(engine) as conn:
        yield from check(settings, conn)


def _findings(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[dict[str, str]]:
    """Findings of a check. An exception becomes a finding, so that the other checks still run."""
    try:
        for finding in check():
            yield {"check": name, **vars(finding)}
    except Exception as failure:
        finding = fail(
            f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}",
            expected="a check without an error",
            remedy="run the doctor as the service's user, then read the error",
        )
        yield {"check": name, **vars(finding)}


def _settings() -> Iterator[Finding]:
    findings = list(file_mode())
    try:
        Settings()
    except ValidationError as wrong:
        findings += [
            fail(
                f"{name}: {rule}",
                expected="a value that docs/configuration.md allows",
                remedy=f"correct {name} in the environment or in {config_file()}",
            )
            for name, rule in refused(wrong)
        ]
    except OSError as closed:
        text = f"{config_file()} cannot be read: {closed.strerror}"
        remedy = "give it the service's group and mode 640; if the file does not exist, correct"
        findings.append(
            fail(
                text,
                expected="a file that the service's user can read, with one NAME=value per line",
                remedy="correct the line"
                if closed.errno == errno.EILSEQ
                else f"{remedy} {CONFIG_FILE_VARIABLE}",
            )
        )
    else:
        findings += _unknown_names()
    yield from findings or [ok(f"environment and {config_file()}")]


def file_mode() -> Iterator[Finding]:
    """A warning when all users of the machine can read the file of settings."""
    file = config_file()
    if file.is_file() and file.stat().st_mode & 0o007:
        yield warn(
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
                f"{name} in {source}, which is the name of no setting",
                expected="names of docs/configuration.md",
                remedy="correct the name or remove it; it has no effect",
            )
