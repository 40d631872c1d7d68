"""Everything the doctor looks at, in the order in which one thing needs the other."""

from __future__ import annotations

from functools import partial

from reconciler.doctor import folders, others, records, tools
from reconciler.doctor.configured import settings as configured
from reconciler.doctor.finding import Finding, guarded
from reconciler.doctor.listeners import listeners

_LOOKS = {
    "listeners": listeners,
    "state_dir": folders.state_folder,
    "ssh_ca": folders.keys,
    "disk_space": folders.room,
    "programs": tools.programs,
    "collection": tools.collection,
    "profiles": tools.profiles,
    "identity_provider": others.identities,
    "awx": others.awx,
}


def examine() -> list[Finding]:
    """All findings. Without settings or database, what needs them is left out."""
    settings, found = configured()
    if settings is None:
        return found
    for check, look in _LOOKS.items():
        found += guarded(check, partial(look, settings))
    engine, told = records.database(settings)
    found += told
    if engine is not None:
        found += guarded("records", partial(records.contents, settings, engine))
        engine.dispose()
    return found
