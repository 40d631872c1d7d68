"""Installation of missing packages: no questions, a sudo without environment, locks of apt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab import packages
from lab.command import LabError

PROGRAMS = {
    "dpkg-query": 'echo "zstd installed"; exit 1',
    "sudo": 'exec env -i PATH="$PATH" "$@"',
    "apt-get": 'echo "$1 ${DEBIAN_FRONTEND:-dialog}" >> "$(dirname "$0")/calls"; test -n "$2"',
}


# The first attempt of each command meets a lock.
LOCKED = """cd "$(dirname "$0")"; echo "$1" >> calls
[ -e "$1" ] || { touch "$1"; echo "E: Could not get lock /x/lock" >&2; exit 100; }"""


def stand_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, user: int, **programs: str
) -> list[str]:
    """Install the missing packages with these programs; return the calls of apt-get."""
    for name, line in (PROGRAMS | programs).items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("GPUAAS_CACHE", str(folder / "cache"))
    packages.ensure()
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("user", [0, 1000])
def test_the_installation_is_not_interactive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    calls = stand_in(tmp_path, monkeypatch, user)
    assert calls == ["update noninteractive", "install noninteractive"]


def test_a_lock_of_another_package_manager_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "LOCK_PAUSE_S", 0.01)
    calls = stand_in(tmp_path, monkeypatch, 0, **{"apt-get": LOCKED})
    assert calls == ["update", "update", "install", "install"]


def test_waiting_for_a_lock_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "LOCK_LIMIT_S", -1.0)
    with pytest.raises(LabError, match="Could not get lock"):
        stand_in(tmp_path, monkeypatch, 0, **{"apt-get": LOCKED})
