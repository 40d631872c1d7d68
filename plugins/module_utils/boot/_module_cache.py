"""Compiled code of Ansible's modules on the host: the program that keeps it, and its folder."""

from __future__ import annotations

import shutil
import stat
from dataclasses import dataclass
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _file_edits,
    _host,
    _module_importer,
    _source_closure,
)

# Playbooks put it into the environment of their modules as PYTHONPATH.
LIBRARY = "/usr/local/lib/gpuaas-modules"
PROGRAM = f"{LIBRARY}/sitecustomize.py"
CODE = str(_module_importer.FOLDER)

_HEAD = "# Written by the gpuaas.slice collection; changed by its playbooks only.\n"
_MODE = 0o700


def text() -> str:
    """Content of PROGRAM."""
    return f"{_HEAD}{_source_closure.source('core._module_importer')}\n\ninstall()\n"


@dataclass(frozen=True)
class State:
    """program: digest, "" without it. folder: mode of CODE, "" without it. there: folders."""

    program: str
    folder: str
    there: tuple[str, ...]


def observe(_params: _change.Params) -> State:
    folder = _host.path(CODE)
    return State(
        program=_file_edits.digest_of(PROGRAM),
        folder=f"{stat.S_IMODE(folder.stat().st_mode):04o}" if folder.is_dir() else "",
        there=tuple(path for path in (LIBRARY, CODE) if _host.path(path).exists()),
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    if params.get("state") == "absent":
        steps = (_change.Step("remove_folder", path, "there", None) for path in state.there)
        return _change.Plan(tuple(steps))
    wanted = [
        _change.Step("write_program", PROGRAM, state.program, _file_edits.digest(text().encode())),
        _change.Step("make_folder", CODE, state.folder, f"{_MODE:04o}"),
    ]
    return _change.Plan(tuple(step for step in wanted if step.before != step.after))


def apply(_params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    target = _host.path(step.subject)
    if step.name == "remove_folder":
        shutil.rmtree(target)
    elif step.name == "write_program":
        _host.write(PROGRAM, text())
    else:
        target.mkdir(mode=_MODE, parents=True, exist_ok=True)
        target.chmod(_MODE)
    return None


SUBJECT = _change.Subject(observe, plan, apply)
