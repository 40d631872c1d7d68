"""Tuned profiles on a host: files for the next boot, current values, and the part in force.

One file per mechanism holds the settings of all requested profiles: those of the hardware profile,
and those that an operator opted in to on this host (`_tuning_opt_in`). A value is recorded before
its first change, and restored when no profile needs it any more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _hugepages, _tuning_opt_in
from ansible_collections.gpuaas.slice.plugins.module_utils.boot._tuning_profiles import (
    DEFINITIONS,
    Definition,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _command,
    _file_edits,
    _host,
    _host_snapshot,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

SYSCTL = "/etc/sysctl.d/60-gpuaas-slice-tuning.conf"
MODPROBE = "/etc/modprobe.d/gpuaas-slice-tuning.conf"
LIMITS = "/etc/security/limits.d/60-gpuaas-slice-tuning.conf"
FILES = (SYSCTL, MODPROBE, LIMITS)
OPTED_IN = _tuning_opt_in.FILE
MARKER = "# Written by the gpuaas.slice collection; changed by its playbooks only."
RECORD = "tuning"

# A login of an ordinary user shows the limit that every login gets.
_LOGIN = ["runuser", "nobody", "-s", "/bin/sh", "-c", "ulimit -S -l; ulimit -H -l"]

Params = Mapping[str, Any]


@dataclass(frozen=True)
class State:
    """files: content, None when absent. values: of every sysctl that a profile knows.

    recorded: names opted in to, None without a record. record: its content. lacking: reasons why
    this machine cannot provide a new opt-in.
    """

    files: Mapping[str, str | None]
    values: Mapping[str, str]
    before: Mapping[str, Any] | None
    recorded: tuple[str, ...] | None = None
    record: str | None = None
    lacking: tuple[Refusal, ...] = ()


def observe(params: Params) -> State:
    """Optional params besides `profiles`: state; opted_in, which replaces the recorded names;
    hugepages_1g, with opted_in.
    """
    before = _host_snapshot.recall(RECORD)
    keys = {key for definition in DEFINITIONS.values() for key in definition.sysctl} | set(
        before or {}
    )
    pages = _hugepages.request(params.get("opted_in") or [], params.get("hugepages_1g"))
    return State(
        files={path: _host.kept(path) for path in FILES},
        values={key: value(key) for key in sorted(keys)},
        before=before,
        recorded=_recorded(params),
        record=_host.kept(OPTED_IN),
        # A later step reserves the pages. If the opt-in were recorded before that step refuses it,
        # every later bootstrap would fail.
        lacking=tuple(_hugepages.refusals(pages)),
    )


def plan(params: Params, state: State) -> _change.Plan:
    names = _names(params, state)
    if refused := [*_tuning_opt_in.unknown(names), *state.lacking]:
        return _change.Plan(blockers=tuple(refused))
    chosen = [DEFINITIONS[name] for name in names]
    settings = {key: text for definition in chosen for key, text in definition.sysctl.items()}
    # Recorded first, so that the next run continues if a later step fails.
    steps = _recording(params, state)
    if settings:
        there = {key: state.values[key] for key in settings}
        steps += _host_snapshot.remember_steps(RECORD, state.before, there)
    texts = _texts(chosen)
    steps += [
        _change.Step("write_file", path, state.files[path], text)
        for path, text in texts.items()
        if text and state.files[path] != text.strip()
    ]
    steps += [
        _change.Step("remove_file", path, state.files[path], None)
        for path, text in texts.items()
        if not text and (state.files[path] or "").startswith(MARKER)
    ]
    # Values that no profile needs any more return to their recorded state.
    targets = {**(state.before or {}), **settings}
    steps += [
        _change.Step("set_sysctl", key, state.values[key], text)
        for key, text in sorted(targets.items())
        if state.values[key] != _words(text)
    ]
    if not settings:
        steps += _host_snapshot.forget_steps(RECORD, state.before)
    return _change.Plan(tuple(steps), tuple(_foreign(texts, state)))


def apply(_params: Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name in _host_snapshot.STEPS:
        _host_snapshot.apply(step)
    elif step.name == "write_file":
        _host.write(step.subject, step.after)
    elif step.name == "remove_file":
        _host.remove(step.subject)
    else:
        _command.run(["sysctl", "-q", "-w", f"{step.subject}={step.after}"])
    return None


def facts(params: Params, state: State) -> dict[str, Any]:
    """Settings that wait for a reboot: module options apply at load time, limits at login."""
    names = _names(params, state)
    chosen = [DEFINITIONS[name] for name in names if name in DEFINITIONS]
    pending = [problem for definition in chosen for problem in _options(definition)]
    return {"profiles": names, "pending": pending}


SUBJECT = _change.Subject(observe, plan, apply, facts)


def problems(profile: Mapping[str, Any]) -> dict[str, list[str]]:
    """Per requested tuned profile (hardware profile or opt-in), the settings that are not in force.

    They are read from the running kernel and from a login, never from the managed files.
    """
    return {name: _problems(name, profile) for name in requested_profiles(profile)}


def edited(profile: Mapping[str, Any]) -> list[str]:
    """Reasons why the next boot would not find the tuning files as written."""
    chosen = [DEFINITIONS[name] for name in requested_profiles(profile) if name in DEFINITIONS]
    texts = _texts(chosen).items()
    return [problem for path, text in texts if text for problem in _file_edits.unlike(path, text)]


def requested_profiles(profile: Mapping[str, Any]) -> list[str]:
    """The tuned profiles of this host: the hardware profile's, and those opted in to on
    this host.
    """
    return _tuning_opt_in.names(profile.get("tuning") or [])


def value(key: str) -> str:
    """The kernel's current value of a sysctl; "" when it does not exist."""
    return _words(_host.read(f"/proc/sys/{key.replace('.', '/')}") or "")


def _word(params: Params) -> Sequence[str] | None:
    """New content of the record; None leaves the record unchanged."""
    return [] if params.get("state") == "absent" else params.get("opted_in")


def _names(params: Params, state: State) -> list[str]:
    if params.get("state") == "absent":
        return []
    word = _word(params)
    return _tuning_opt_in.names(params["profiles"], state.recorded or () if word is None else word)


def _recorded(params: Params) -> tuple[str, ...] | None:
    """Names in the record. A damaged record is overwritten if the caller gives the new content."""
    try:
        return _tuning_opt_in.recorded()
    except Refusal:
        if _word(params) is None:
            raise
        return None


def _recording(params: Params, state: State) -> list[_change.Step]:
    word = _word(params)
    if word is None:
        return []
    if not word:
        there = state.record is not None
        return [_change.Step("remove_file", OPTED_IN, state.record, None)] if there else []
    if tuple(word) == state.recorded:
        return []
    return [_change.Step("write_file", OPTED_IN, state.record, _tuning_opt_in.text(word))]


def _problems(name: str, profile: Mapping[str, Any]) -> list[str]:
    definition = DEFINITIONS.get(name)
    if definition is None:
        return [f"this collection has no tuned profile {name}"]
    differing = [
        f"{key} is {value(key) or 'not there'}, not {text}"
        for key, text in definition.sysctl.items()
        if value(key) != _words(text)
    ]
    pages = _hugepages.request([name], profile.get("hugepages_1g"))
    return [
        *differing,
        *_options(definition),
        *_limits(definition),
        *(_hugepages.problems(pages) if pages else []),
    ]


def _options(definition: Definition) -> list[str]:
    """Options of loaded modules; a module that is not loaded takes its options when it loads."""
    differing = []
    for module, options in definition.modprobe.items():
        for name, expected in options.items():
            have = _host.read(f"/sys/module/{module}/parameters/{name}")
            if have is not None and have != expected:
                differing.append(
                    f"{module} {name} is {have}, not {expected}, until it is loaded again"
                )
    return differing


def _limits(definition: Definition) -> list[str]:
    if not definition.memlock:
        return []
    try:
        have = _command.run(_LOGIN).out.split()
    except Refusal as refusal:
        return [f"memlock of a login is unknown: {refusal.code}"]
    return [] if have == [definition.memlock] * 2 else [f"memlock of a login is {' '.join(have)}"]


def _texts(chosen: Sequence[Definition]) -> dict[str, str | None]:
    """Content of each file; None for a file that no profile needs."""
    sysctl = [f"{key} = {text}" for definition in chosen for key, text in definition.sysctl.items()]
    modprobe = [
        f"options {module} {' '.join(f'{name}={text}' for name, text in options.items())}"
        for definition in chosen
        for module, options in definition.modprobe.items()
    ]
    # `*` does not include root.
    limits = [
        f"{who} - memlock {definition.memlock}"
        for definition in chosen
        if definition.memlock
        for who in ("*", "root")
    ]
    rows = {SYSCTL: sysctl, MODPROBE: modprobe, LIMITS: limits}
    return {p: "\n".join([MARKER, *lines]) + "\n" if lines else None for p, lines in rows.items()}


def _foreign(texts: Mapping[str, str | None], state: State) -> list[Refusal]:
    """Refuse to overwrite a file with a managed name that this collection did not write."""
    return [
        Refusal(
            "file_not_ours",
            expected=f"no {path}, or one that begins with our marker",
            found="another file",
            remedy="move it to a name of its own",
        )
        for path, text in state.files.items()
        if texts[path] and text is not None and not text.startswith(MARKER)
    ]


def _words(text: str) -> str:
    """Values with blanks as separators; the kernel prints tabs."""
    return re.sub(r"\s+", " ", str(text)).strip()
