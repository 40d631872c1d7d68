"""All checks of the doctor, in the order in which they depend on each other."""

from __future__ import annotations

from functools import partial

from reconciler.doctor import external, folders, records, tools
from reconciler.doctor.configuration import settings as check_settings
from reconciler.doctor.finding import Finding, guarded
from reconciler.doctor.listeners import listeners

_CHECKS = {
    "listeners": listeners,
    "state_dir": folders.state_folder,
    "ssh_ca": folders.keys,
    "disk_space": folders.room,
    "programs": tools.programs,
    "collection": tools.collection,
    "profiles": tools.profiles,
    "identity_provider": external.identity_provider,
    "awx": external.awx,
}


def examine() -> list[Finding]:
    """All findings. Checks that need settings or a database are left out without them."""
    settings, findings = check_settings()
    if settings is None:
        return findings
    for name, check in _CHECKS.items():
        findings += guarded(name, partial(check, settings))
    engine, problems = records.database(settings)
    findings += problems
    if engine is not None:
        findings += guarded("records", partial(records.contents, settings, engine))
        engine.dispose()
    return findings
