"""Boot service: a systemd oneshot unit that runs the collection's code at every boot.

The host needs no Ansible for it. The required sources are copied below LIBRARY under their real
names, and a short script calls `boot(<settings file>)` of one module. A boot and a playbook
therefore run the same observe, plan, apply and verify.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _boot_files,
    _change,
    _command,
    _file_edits,
    _host,
    _object_names,
    _repairs,
    _source_closure,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

LIBRARY, PACKAGE = _boot_files.LIBRARY, _boot_files.PACKAGE
STEPS = ("install_service", "start_service", "remove_service")

Unit = _boot_files.Unit

# A guardian rests four times as long as its round took, so that a slow machine is left to others,
# but never for longer than this.
_REST, _LONGEST_REST_S = 4, 5.0

# Address of systemd's notification socket, taken from the environment at the first use.
_NOTIFY: dict[str, str] = {}


@dataclass(frozen=True)
class Service:
    """systemd's state of a unit.

    started_at: seconds since the epoch, 0 when it does not run. outdated: whether its file or a
    drop-in has changed since systemd read it.
    """

    active: bool
    enabled: bool
    started_at: int
    outdated: bool = False


@dataclass(frozen=True)
class Installed:
    """State of a unit on the host. differing: files with wrong content, and drop-ins of the unit.
    traces: leftovers of an interrupted removal. written_at: last change of its code, in seconds
    since the epoch.
    """

    differing: tuple[str, ...]
    present: tuple[str, ...]
    service: Service
    traces: tuple[str, ...] = ()
    written_at: int = 0


def observe(unit: Unit) -> Installed:
    differing = [path for path, expected in _files(unit).items() if not _is(path, expected)]
    if _boot_files.recorded().get(unit.name) != _digests(unit):
        differing.append(_boot_files.RECORD)
    return Installed(
        differing=(*differing, *_boot_files.additions(unit)),
        present=tuple(p for p in _unit_files(unit) if _host.path(p).exists()),
        service=services([unit.service])[unit.service],
        traces=tuple(_traces(unit)),
        written_at=_written_at(unit),
    )


def plan(unit: Unit, installed: Installed) -> list[_change.Step]:
    """Steps that install the service for every boot and mark it as done in the current boot."""
    steps = []
    service = installed.service
    if installed.differing or not service.enabled or service.outdated:
        before = {"differing": list(installed.differing), "enabled": service.enabled}
        after = {"differing": [], "enabled": True}
        steps.append(_change.Step("install_service", f"{unit.service} files", before, after))
    # A guardian that runs has the former code in memory, and would restore its state. A run that
    # was killed, or another unit of the shared library, may have written the code before. It reads
    # the settings in each round.
    code = set(installed.differing) - {unit.settings_path, _boot_files.RECORD}
    older = 0 < service.started_at < installed.written_at
    outdated = unit.guardian and (bool(code) or older)
    if outdated or not service.active:
        state = "with former files" if service.active else "inactive"
        steps.append(_change.Step("start_service", unit.service, state, "active"))
    return steps


def plan_removal(unit: Unit, installed: Installed) -> list[_change.Step]:
    there = [*installed.present, *installed.traces]
    return [_change.Step("remove_service", unit.service, there, [])] if there else []


def apply(unit: Unit, step: _change.Step) -> None:
    """Do a step of STEPS."""
    if step.name == "install_service":
        install(unit)
        # One reload for both: it takes systemd a second, or fifteen on an emulated host. Without
        # any, systemd shows the unit as disabled.
        _command.run(["systemctl", "enable", "--no-reload", unit.service])
        _command.run(["systemctl", "daemon-reload"])
    elif step.name == "start_service":
        # restart, not start: a failed or partial earlier start must not count as the current start.
        _command.run(["systemctl", "restart", unit.service], timeout=200)
    elif step.name == "remove_service":
        _command.run(["systemctl", "disable", "--now", "--no-reload", unit.service], ok=(0, 1, 5))
        for absolute in _unit_files(unit):
            _host.remove(absolute)
        _remove_folders(unit)
        _boot_files.forget(unit)
        # The last unit takes the library with it.
        if not _units_left():
            shutil.rmtree(_host.path(LIBRARY), ignore_errors=True)
        _command.run(["systemctl", "daemon-reload"])


def install(unit: Unit) -> None:
    """Write the unit's files and record their digests; remove all drop-ins of the unit.

    Equal files keep their time, by which guardians are restarted.
    """
    for absolute, (text, mode) in _files(unit).items():
        if not _is(absolute, (text, mode)):
            _host.write(absolute, text, mode)
    for absolute in _boot_files.additions(unit):
        _host.remove(absolute)
    _remove_folders(unit)
    _boot_files.remember(unit, _digests(unit))


def present(*units: Unit) -> list[Unit]:
    """Those that are installed on this host, also without their settings."""
    return [unit for unit in units if _host.path(unit.path).exists()]


def services(names: Iterable[str]) -> dict[str, Service]:
    """Several units in one call; a unit that does not exist is inactive and not enabled."""
    units = list(names)
    properties = "--property=ActiveState,UnitFileState,ActiveEnterTimestamp,NeedDaemonReload"
    shown = _command.run(["systemctl", "show", "--timestamp=unix", properties, "--", *units])
    blocks = [dict(_pairs(block)) for block in shown.out.strip().split("\n\n")]
    if len(blocks) != len(units):
        raise Refusal(
            "systemd_answer_unreadable",
            expected=f"{len(units)} units from systemctl show",
            found=f"{len(blocks)}",
            remedy="run `systemctl show` for these units by hand",
        )
    return {name: _service(block) for name, block in zip(units, blocks, strict=True)}


def settings(path: str) -> dict[str, Any]:
    """The settings of a boot service, as bootstrap recorded them. A lost file is refused too,
    because no default is a value that the host had.
    """
    again = "run the bootstrap playbook again, which records the profile's values"
    recorded = _host.document(path, code="settings_unreadable", remedy=again)
    if recorded is None:
        expected = f"a JSON object in {path}"
        raise Refusal("settings_unreadable", expected=expected, found="no such file", remedy=again)
    return recorded


def _settings_of(path: str, *, required: bool) -> dict[str, Any]:
    try:
        return settings(path)
    except Refusal:
        if required:
            raise
        return {}


def boot(
    subject: _change.Subject,
    settings_path: str,
    *,
    wait_for: tuple[str, ...] = (),
    required: bool = False,
    patience: float = 90,
    meanwhile: _change.Subject | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Body of a boot script: drive `subject` by the settings file; 0 when done and verified.

    wait_for: refusal codes that are expected early in a boot, such as that of a card whose driver
    is still loading. They are retried for `patience` seconds, less than the unit's TimeoutStartSec,
    or the refusal would not be logged. Doubts with these codes are awaited too, but only after all
    required parts are ready and systemd was notified. A remaining doubt is logged and is no
    failure. required: whether `subject` needs the settings; otherwise it gets {} for lost settings.
    meanwhile: a subject that is driven in each round of waiting.
    """
    deadline = time.monotonic() + patience
    while True:
        failure, doubts = _attempt(subject, settings_path, required=required)
        if failure is None:
            break
        if failure.code not in wait_for or time.monotonic() > deadline:
            _warn(doubts)
            log(str(failure))
            return 1
        if meanwhile:
            _attempt(meanwhile, settings_path, required=required, again=True)
        sleep(2)
    notify("READY=1")
    # The required parts are in place and the unit is running. Only a guardian applies them again;
    # later drift is reported by parity, and a failure no longer ends the unit.
    while any(doubt.code in wait_for for doubt in doubts) and time.monotonic() <= deadline:
        sleep(2)
        failure, doubts = _attempt(_optional(subject), settings_path, required=required, again=True)
        if failure:
            doubts = [*doubts, failure]
    _warn(doubts)
    return 0


def watch(
    settings_path: str,
    restore: Callable[[dict[str, Any], int], Iterable[str]],
    *,
    trouble: str,
    required: bool = False,
    period_s: float = 2.0,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Body of a guardian after its boot: restore what differs, for ever, with pauses of period_s
    seconds, or longer where a round takes its time.

    restore: gets the settings and the number of the round, and gives each step once it is done.
    trouble: what a failure means, for the journal. required: whether a round needs the settings.
    Otherwise it gets {} for lost ones.
    """
    silent, turn = "", 0
    while True:
        began = time.monotonic()
        try:
            for step in restore(_settings_of(settings_path, required=required), turn):
                log(f"restored: {step}")
                _repairs.note([step])
            silent = ""
        except (Refusal, OSError, ValueError, KeyError) as broken:
            # The same problem is logged once.
            if str(broken) != silent:
                silent = str(broken)
                log(f"{trouble}: {silent}")
        notify("WATCHDOG=1")
        sleep(max(period_s, min(_REST * (time.monotonic() - began), _LONGEST_REST_S)))
        turn += 1


def _attempt(
    subject: _change.Subject, settings_path: str, *, required: bool, again: bool = False
) -> tuple[Refusal | None, list[Refusal]]:
    """Drive once; returns the failure or None, and the doubts.

    again: all required parts are ready, so an empty run is not logged, and no failure ends the
    unit.
    """
    try:
        recorded = _settings_of(settings_path, required=required)
        outcome = _change.drive(subject, recorded, check_mode=False)
    except Refusal as refusal:
        return refusal, []
    except (OSError, ValueError) as broken:
        if not again:
            raise
        return _unforeseen(broken), []
    if outcome.done or not (outcome.failure or again):
        log(f"done: {', '.join(outcome.done) or 'nothing to do'}")
    return outcome.failure, outcome.doubts


def _optional(subject: _change.Subject) -> _change.Subject:
    """The same subject with its soft steps only; a blocker still prevents them."""

    def plan(params: _change.Params, state: object) -> _change.Plan:
        planned = subject.plan(params, state)
        return dataclasses.replace(
            planned, steps=tuple(step for step in planned.steps if step.soft)
        )

    return dataclasses.replace(subject, plan=plan)


@functools.cache
def sources(module: str) -> dict[str, str]:
    """`module` and every file of module_utils that it imports, directly or not: source text by
    name.
    """
    return _source_closure.closure(module, _source_closure.source)


def _unit_files(unit: Unit) -> tuple[str, ...]:
    """The files of this unit alone; the library is shared with the other units."""
    settings = () if unit.borrowed else (unit.settings_path,)
    return (unit.path, *unit.programs, *settings, *_boot_files.additions(unit))


def _traces(unit: Unit) -> Iterator[str]:
    """The unit's part of shared files; the last unit removes the library."""
    recorded = _boot_files.recorded()
    # An empty record belongs to no unit, so any unit removes it.
    if unit.name in recorded or (not recorded and _host.path(_boot_files.RECORD).exists()):
        yield _boot_files.RECORD
    if not _units_left() and _host.path(LIBRARY).exists():
        yield LIBRARY


def _units_left() -> bool:
    return bool(_host.matching(_boot_files.UNITS, "gpuaas-*.service"))


def _remove_folders(unit: Unit) -> None:
    """Remove the folders of the unit's drop-ins and of its hook. A folder that is not empty
    stays.
    """
    hooks = PurePosixPath(_object_names.START_HOOK).parents[:2] if unit.start_hook else ()
    for absolute in (*_boot_files.folders(unit), *map(str, hooks)):
        with contextlib.suppress(OSError):
            _host.path(absolute).rmdir()


def _files(unit: Unit) -> dict[str, tuple[str, int]]:
    given = {path: (text, 0o644) for path, text in _given(unit).items()}
    return {**given, **_boot_files.frame(unit)}


def _given(unit: Unit) -> dict[str, str]:
    """Code and settings."""
    modules = (unit.module, *((unit.start_hook,) if unit.start_hook else ()))
    texts = {name: text for module in modules for name, text in sources(module).items()}
    names = {name: f"{PACKAGE}.{name}".replace(".", "/") for name in texts}
    given = {f"{LIBRARY}/{names[name]}.py": text for name, text in texts.items()}
    if not unit.borrowed:
        given[unit.settings_path] = json.dumps(unit.settings, indent=2, sort_keys=True) + "\n"
    return given


def _written_at(unit: Unit) -> int:
    now = time.time()
    files = (_host.path(path) for path in _files(unit) if path != unit.settings_path)
    times = [file.stat().st_mtime for file in files if file.exists()]
    # A time in the future, from before a change of the clock, would be later than any start.
    return int(max((each for each in times if each <= now), default=0))


def _digests(unit: Unit) -> dict[str, str]:
    return {path: _file_edits.digest(text.encode()) for path, text in _given(unit).items()}


def _is(absolute: str, expected: tuple[str, int]) -> bool:
    text, mode = expected
    return _file_edits.digest_of(absolute) == _file_edits.digest(text.encode()) and not (
        stat.S_IMODE(_host.path(absolute).stat().st_mode) ^ mode
    )


def _pairs(block: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _eq, value in (line.partition("=") for line in block.split("\n"))]


def _service(block: Mapping[str, str]) -> Service:
    stamp = block.get("ActiveEnterTimestamp", "").removeprefix("@")
    active = block.get("ActiveState") in ("active", "reloading")
    return Service(
        active=active,
        enabled=block.get("UnitFileState") in ("enabled", "enabled-runtime", "static", "alias"),
        started_at=int(stamp) if active and stamp.isdigit() else 0,
        outdated=block.get("NeedDaemonReload") == "yes",
    )


def notify(state: str) -> None:
    """Send systemd a state of this unit, such as `READY=1`, if it requested that."""
    # Programs started from here are not the unit's main process and must not notify.
    address = _NOTIFY.setdefault("address", os.environ.pop("NOTIFY_SOCKET", ""))
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            # An @ stands for the leading zero byte of an abstract socket name.
            channel.sendto(state.encode(), address.replace("@", "\0", 1))


def _unforeseen(broken: Exception) -> Refusal:
    return Refusal(
        "system_error",
        expected="the optional steps to be carried out",
        found=f"{type(broken).__name__}: {broken}",
        remedy="repair the named cause; all other parts of this service are in place",
    )


def _warn(doubts: Iterable[Refusal]) -> None:
    for doubt in doubts:
        log(f"WARN {doubt}")


def log(text: str) -> None:
    """A line of the unit's journal."""
    # The journal takes one message per line; a newline in it would start a second, forged message.
    sys.stdout.write(text.replace("\n", " ") + "\n")
    sys.stdout.flush()
