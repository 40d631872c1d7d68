"""Compiled code of Ansible's modules on the host: the program that keeps it, and its folder."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _change,
    _host,
    _module_importer,
    _source_closure,
)

LIBRARY = _module_importer.LIBRARY
CODE = str(_module_importer.FOLDER)
PROGRAM = f"{LIBRARY}/sitecustomize.py"
# A file in place of Python's folder of this name. A compiled copy of the program would be used
# unseen, and a damaged one would never be replaced.
NO_COPY = f"{LIBRARY}/__pycache__"

_HEAD = "# Written by the gpuaas.slice collection; changed by its playbooks only.\n"
_MODE = 0o700
# End of the name that a folder has while it is removed.
_ASIDE = ".removed"


@dataclass(frozen=True)
class State:
    """library: whether it has exactly our files. code: mode of the folder CODE, "" if it is no
    folder of ours. present: paths that exist.
    """

    library: bool
    code: str
    present: tuple[str, ...]


def text() -> str:
    """Content of PROGRAM."""
    return f"{_HEAD}{_source_closure.source('core._module_importer')}\n\ninstall()\n"


def observe(_params: _change.Params) -> State:
    return State(
        library=_files(_host.path(LIBRARY)) == {PROGRAM: text().encode(), NO_COPY: b""},
        code=_mode(_host.path(CODE)),
        present=tuple(
            path
            for path in (LIBRARY, CODE, f"{LIBRARY}{_ASIDE}", f"{CODE}{_ASIDE}")
            if _host.is_there(path)
        ),
    )


def plan(params: _change.Params, state: State) -> _change.Plan:
    if params.get("state") == "absent":
        return _change.Plan(
            tuple(_change.Step("remove_folder", path, "present", None) for path in state.present)
        )
    steps = []
    if not state.library:
        before = "other files" if LIBRARY in state.present else None
        steps.append(_change.Step("write_program", PROGRAM, before, "this release's", soft=True))
    if state.code != f"{_MODE:04o}":
        steps.append(_change.Step("make_folder", CODE, state.code, f"{_MODE:04o}", soft=True))
    return _change.Plan(tuple(steps))


def apply(_params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == "make_folder" and step.before:
        _host.path(CODE).chmod(_MODE)
    elif step.name == "make_folder":
        _remove(CODE)
        _host.path(CODE).mkdir(mode=_MODE, parents=True)
    elif step.name == "write_program":
        _remove(LIBRARY)
        _host.write(NO_COPY, "")
        _host.write(PROGRAM, text())
    else:
        _remove(step.subject)
    return None


def _files(folder: Path) -> dict[str, bytes]:
    """Content by path; b"?" of what is no file."""
    if not folder.is_dir() or folder.is_symlink():
        return {}
    return {
        f"{LIBRARY}/{entry.name}": entry.read_bytes() if entry.is_file() else b"?"
        for entry in folder.iterdir()
    }


def _mode(folder: Path) -> str:
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return ""
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return f"{stat.S_IMODE(status.st_mode):04o}" if ours else ""


def _remove(path: str) -> None:
    """Remove a folder, or what stands in its place, while other modules write into it."""
    target = _host.path(path)
    if not target.is_dir() or target.is_symlink():
        target.unlink(missing_ok=True)
        return
    # The importer makes no folder, so nothing is written to the new name.
    aside = target.with_name(f"{target.name}{_ASIDE}")
    shutil.rmtree(aside, ignore_errors=True)
    target.rename(aside)
    shutil.rmtree(aside)


SUBJECT = _change.Subject(observe, plan, apply)
