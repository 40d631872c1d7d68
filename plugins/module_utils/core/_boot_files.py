"""Files of a boot service: unit, program, settings, and the code that it runs.

Apart from `_boot_service`, which installs and removes them, because parity needs only this: whether
what the next boot runs is what was installed. Unit and program are compared with what the present
code writes. The code itself is compared with digests that were recorded as it was written (RECORD):
nearly every release changes a line of it, and an upgrade of the control machine alone must not
close the gate of every host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _file_edits,
    _host,
    _source_closure,
)

LIBRARY = "/usr/local/lib/gpuaas"
PACKAGE = _source_closure.PACKAGE
UNITS = "/etc/systemd/system"
PROGRAMS = "/usr/local/sbin"
# By service, path and digest of the code that it runs. Read and written by root alone.
RECORD = f"{_host.STATE_DIRECTORY}/boot-code.json"

# Where systemd keeps what `systemctl edit` and `systemctl set-property` add to a unit for good.
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

_UNIT = """\
# Written by the gpuaas.slice collection; changed by its playbooks only.
[Unit]
Description={description}
{order}

[Service]
Type={type}
RemainAfterExit=yes
ExecStart={program}
{after}TimeoutStartSec={limit}

[Install]
WantedBy={target}
"""


@dataclass(frozen=True)
class Unit:
    """A concern that is brought back at boot.

    module, entry: the file below module_utils (`network._bridge`) and its function that is called.
    settings: its parameters, kept as JSON in `settings_path`. borrowed: that file is another
    unit's, which writes and removes it. order: lines of the [Unit] section. target: what pulls the
    unit in. limit_s: how long it may take. after: ExecStartPost or "". patient: `entry` goes on
    waiting for what is optional after it has told systemd that the rest is there; `after` and
    units that wait for this one are not kept waiting.
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

    @property
    def service(self) -> str:
        return f"{self.name}.service"

    @property
    def path(self) -> str:
        return f"{UNITS}/{self.service}"

    @property
    def program(self) -> str:
        return f"{PROGRAMS}/{self.name}"


def frame(unit: Unit) -> dict[str, tuple[str, int]]:
    """Unit and program: text and mode by path."""
    subpackage, _dot, module = unit.module.rpartition(".")
    program = _SCRIPT.format(
        library=LIBRARY,
        package=f"{PACKAGE}.{subpackage}",
        module=module,
        entry=unit.entry,
        settings=unit.settings_path,
    )
    definition = _UNIT.format(
        description=unit.description,
        type="notify" if unit.patient else "oneshot",
        order="\n".join(unit.order),
        program=unit.program,
        after=f"ExecStartPost={unit.after}\n" if unit.after else "",
        target=unit.target,
        limit=unit.limit_s,
    )
    return {unit.program: (program, 0o755), unit.path: (definition, 0o644)}


def folders(unit: Unit) -> list[str]:
    """Where files lie that change the unit from beside it, and stay over a boot."""
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
    """Why the next boot would not run what was installed; [] when it would."""
    problems = [
        problem
        for path, (text, mode) in frame(unit).items()
        for problem in _file_edits.unlike(path, text, mode)
    ]
    problems += [f"{path} changes {unit.service}" for path in additions(unit)]
    digests = recorded().get(unit.name, {})
    if not digests:
        problems.append(f"{RECORD} does not say what code {unit.service} was given")
    changed = [path for path, was in sorted(digests.items()) if _file_edits.digest_of(path) != was]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        problems.append(f"{changed[0]}{more} is not the code that {unit.service} was given")
    return problems


def recorded() -> dict[str, dict[str, str]]:
    """What RECORD holds; one that cannot be read knows nothing, and an installation writes it."""
    try:
        kept = json.loads(_host.read(RECORD) or "{}")
        return {str(name): dict(digests) for name, digests in kept.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def remember(unit: Unit, digests: Mapping[str, str]) -> None:
    """That the unit was given this code. Services share files: what was written last holds."""
    known = {
        name: {path: digests.get(path, was) for path, was in held.items()}
        for name, held in recorded().items()
    }
    _store({**known, unit.name: dict(digests)})


def forget(unit: Unit) -> None:
    _store({name: held for name, held in recorded().items() if name != unit.name})


def _store(known: Mapping[str, Mapping[str, str]]) -> None:
    if known:
        _host.write(RECORD, json.dumps(known, indent=2, sort_keys=True) + "\n", 0o600)
    else:
        _host.remove(RECORD)
