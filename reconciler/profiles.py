"""Hardware profiles: what a kind of machine has, and what its slices are sold as.

One file each, in a folder that the site may edit while the service runs: API and workers see a
change with their next request or task.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from reconciler.model import hardware
from reconciler.model.errors import Problem

# When and how large: what tells one state of a file from the next.
_State = tuple[int, int]


def hardware_profile(folder: Path, name: str) -> dict[str, Any]:
    """The hardware profile `name`; Problem `profile_unknown` when there is none that can be read,
    and `mgmt_attachment_unsupported` for one that no host can carry out.
    """
    known = _states(folder)
    if name not in known:
        raise Problem(
            "profile_unknown",
            422,
            expected=f"one of the hardware profiles {', '.join(sorted(known))}",
            found=name,
            remedy=f"choose one of these, or add {name}.yml to {folder}",
        )
    return _read(folder / f"{name}.yml", known[name])


def profile_skus(folder: Path) -> dict[str, str]:
    """What slices are sold as, by the name of the hardware profile; "" where it names none."""
    return dict(_skus(folder, tuple(sorted(_states(folder).items()))))


def _states(folder: Path) -> dict[str, _State]:
    found = {}
    for file in folder.glob("*.yml"):
        # One that went at this moment is none.
        with contextlib.suppress(FileNotFoundError):
            seen = file.stat()
            found[file.stem] = (seen.st_mtime_ns, seen.st_size)
    return found


@lru_cache(maxsize=32)
def _read(file: Path, _state: _State) -> dict[str, Any]:
    try:
        document: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as broken:
        document, found = None, " ".join(str(broken).split())[:300]
    else:
        found = type(document).__name__
    if not isinstance(document, dict):
        raise Problem(
            "profile_unknown",
            422,
            expected=f"a mapping in {file.name}",
            found=found,
            remedy="write the profile's entries into it, or remove the file",
        )
    hardware.check(document, file.stem)
    return document


@lru_cache(maxsize=8)
def _skus(folder: Path, states: tuple[tuple[str, _State], ...]) -> tuple[tuple[str, str], ...]:
    found = []
    for name, state in states:
        # Whoever works with a broken one is told so; it does not keep anybody else from launching.
        with contextlib.suppress(Problem):
            found.append((name, str(_read(folder / f"{name}.yml", state).get("sku") or "")))
    return tuple(found)
