"""Files of a boot service: unit, program, settings, and the code that it runs.

They are separate from `_boot_service`, which installs and removes them, because parity needs only
the comparison with the installed files. Unit and program are compared with the current code's
rendering. The code itself is compared with digests recorded when it was written (RECORD). Nearly
every release changes a line of it, and an upgrade of the control machine alone must not close the
gate of every host. The digest of the settings tells those of an earlier profile from edited ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _file_edits,
    _host,
    _object_names,
    _source_closure,
)

LIBRARY = "/usr/local/lib/gpuaas"
PACKAGE = _source_closure.PACKAGE
UNITS = "/etc/systemd/system"
PROGRAMS = "/usr/local/sbin"
# Path and digest of code and settings, by service. Only root reads and writes it.
RECORD = f"{_host.STATE_DIRECTORY}/boot-code.json"

# Parents of a unit's permanent drop-in folders: `systemctl edit` and `systemctl set-property`.
_ADDITIONS = (UNITS, "/etc/systemd/system.control")

_SCRIPT = """\
#!/usr/bin/python3 -I
# Written by the gpuaas.slice collection; changed by its playbooks only.
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, "{library}")

from {package} import {module}

sys.exit({module}.{entry}("{settings}"))
"""

# Hook of libvirt, which calls it for each step of every domain with the definition as input. It
# imports the library for slices only, so that no other domain depends on it.
_HOOK = """\
#!/usr/bin/python3 -I
# Written by the gpuaas.slice collection; changed by its playbooks only.
import sys

if sys.argv[1].startswith("{prefix}") and sys.argv[2:4] == ["start", "begin"]:
    sys.dont_write_bytecode = True
    sys.path.insert(0, "{library}")

    from {package} import {module}

    sys.exit({module}.start(sys.argv[1], sys.stdin.read()))
"""

_UNIT = """\
# Written by the gpuaas.slice collection; changed by its playbooks only.
[Unit]
Description={description}
{order}

[Service]
Type={type}
RemainAfterExit=yes
ExecStart={program}
{after}{guardian}TimeoutStartSec={limit}

[Install]
WantedBy={target}
"""


_GUARDIAN = "Restart=on-failure\nRestartSec=5\nWatchdogSec=90\n"


@dataclass(frozen=True)
class Unit:
    """A setting of the host that a boot service restores.

    module, entry: the file below module_utils (`network._bridge`) and the function to call.
    settings: its parameters, kept as JSON in `settings_path`. borrowed: another unit writes and
    removes that file. order: lines of the [Unit] section. target: starts the unit. limit_s: its
    time limit. after: ExecStartPost or "". patient: after systemd knows that the required parts are
    ready, `entry` continues to wait for optional parts. `after` and dependent units do not wait for
    those. guardian: `entry` stays and restores its setting; it is started again when it ends or
    hangs. start_hook: the file below module_utils whose `start` libvirt calls before it starts a
    slice's domain.
    """

    name: str
    description: str
    module: str
    settings_path: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    entry: str = "boot"
    target: str = "multi-user.target"
    limit_s: int = 180
    borrowed: bool = False
    after: str = ""
    patient: bool = False
    guardian: bool = False
    start_hook: str = ""

    @property
    def service(self) -> str:
        return f"{self.name}.service"

    @property
    def path(self) -> str:
        return f"{UNITS}/{self.service}"

    @property
    def program(self) -> str:
        return f"{PROGRAMS}/{self.name}"

    @property
    def programs(self) -> tuple[str, ...]:
        return (self.program, *((_object_names.START_HOOK,) if self.start_hook else ()))


def frame(unit: Unit) -> dict[str, tuple[str, int]]:
    """Unit and program: text and mode by path."""
    program = _SCRIPT.format(
        **_import_of(unit.module), entry=unit.entry, settings=unit.settings_path
    )
    definition = _UNIT.format(
        description=unit.description,
        type="notify" if unit.patient else "oneshot",
        order="\n".join(unit.order),
        program=unit.program,
        after=f"ExecStartPost={unit.after}\n" if unit.after else "",
        guardian=_GUARDIAN if unit.guardian else "",
        target=unit.target,
        limit=unit.limit_s,
    )
    files = {unit.program: (program, 0o755), unit.path: (definition, 0o644)}
    if unit.start_hook:
        hook = _HOOK.format(**_import_of(unit.start_hook), prefix=_object_names.PREFIX)
        files[_object_names.START_HOOK] = (hook, 0o755)
    return files


def _import_of(name: str) -> dict[str, str]:
    subpackage, _dot, module = name.rpartition(".")
    return {"library": LIBRARY, "package": f"{PACKAGE}.{subpackage}", "module": module}


def folders(unit: Unit) -> list[str]:
    """The unit's drop-in folders that survive a boot."""
    return [f"{where}/{unit.service}.d" for where in _ADDITIONS]


def additions(unit: Unit) -> list[str]:
    return [
        f"{folder}/{file.name}"
        for folder in folders(unit)
        if _host.path(folder).is_dir()
        for file in sorted(_host.path(folder).iterdir())
        if not file.is_dir()
    ]


def edited(unit: Unit) -> list[str]:
    """Reasons why the next boot would not run the service as installed; [] when it would."""
    problems = [
        problem
        for path, (text, mode) in frame(unit).items()
        for problem in _file_edits.unlike(path, text, mode)
    ]
    problems += [f"{path} changes {unit.service}" for path in additions(unit)]
    digests = recorded().get(unit.name, {})
    # Settings are compared with the profile, as data.
    digests.pop(unit.settings_path, None)
    if not digests:
        problems.append(f"{RECORD} does not say what code {unit.service} was given")
    changed = [path for path, was in sorted(digests.items()) if _file_edits.digest_of(path) != was]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        problems.append(f"{changed[0]}{more} is not the code that {unit.service} was given")
    return problems


def recorded() -> dict[str, dict[str, str]]:
    """Content of RECORD; an unreadable record counts as empty, and an installation rewrites it."""
    try:
        kept = json.loads(_host.read(RECORD) or "{}")
        return {str(name): dict(digests) for name, digests in kept.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def remember(unit: Unit, digests: Mapping[str, str]) -> None:
    """Record the code given to the unit. Services share files, so the last write is valid for
    all.
    """
    records = {
        name: {path: digests.get(path, was) for path, was in held.items()}
        for name, held in recorded().items()
    }
    _store({**records, unit.name: dict(digests)})


def forget(unit: Unit) -> None:
    _store({name: held for name, held in recorded().items() if name != unit.name})


def _store(records: Mapping[str, Mapping[str, str]]) -> None:
    if records:
        _host.write(RECORD, json.dumps(records, indent=2, sort_keys=True) + "\n", 0o600)
    else:
        _host.remove(RECORD)
