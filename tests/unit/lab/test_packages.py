"""Packages are installed without questions, through a sudo that hands on no environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab import packages

PROGRAMS = {
    "dpkg-query": 'echo "zstd installed"; exit 1',
    "sudo": 'exec env -i PATH="$PATH" "$@"',
    "apt-get": 'echo "$1 ${DEBIAN_FRONTEND:-dialog}" >> "$(dirname "$0")/said"; test -n "$2"',
}


@pytest.mark.parametrize("user", [0, 1000])
def test_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    for name, line in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("GPUAAS_CACHE", str(tmp_path / "cache"))
    packages.ensure()
    said = (tmp_path / "said").read_text().splitlines()
    assert said == ["update noninteractive", "install noninteractive"]
