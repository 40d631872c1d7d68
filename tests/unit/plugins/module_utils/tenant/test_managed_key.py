"""Managed key line in a real sshd: commands until its expiry, and nothing else."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _managed_key

from tests.unit.reconciler.benchmark.sshd import USER, Boot, Machine, boot, new_key

pytestmark = pytest.mark.covers("APP-4")
__all__ = ["boot"]

INSTANCE = "7c9e6679-7425-40de-944b-e07fc1f90ae7"


class Login:
    """A key, and the login by it."""

    def __init__(self, boot: Boot, folder: Path, ends_in_s: int) -> None:
        self.key = folder / "controller"
        self._public = new_key(self.key)
        self.machine: Machine = boot("host", login=self.line(ends_in_s))
        (folder / "known").write_text(self.machine.known_hosts_line())
        self.known_hosts = folder / "known"

    def line(self, ends_in_s: int) -> str:
        end = int(time.time()) + ends_in_s
        return _managed_key.line(INSTANCE, self._public, end).decode()

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        options = ["-F", "none", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes"]
        options += ["-o", f"UserKnownHostsFile={self.known_hosts}", "-i", str(self.key)]
        return subprocess.run(
            ["ssh", *options, "-p", str(self.machine.port), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def test_it_runs_commands_and_gets_neither_terminal_nor_forwarding(
    boot: Boot, tmp_path: Path
) -> None:
    login, at = Login(boot, tmp_path, 600), f"{USER}@127.0.0.1"
    ran = login(at, "echo it works")
    assert (ran.returncode, ran.stdout) == (0, "it works\n"), ran.stderr
    assert "PTY allocation request failed" in login("-tt", at, "true").stderr
    forwarded = login("-W", f"127.0.0.1:{login.machine.port}", at)
    assert forwarded.returncode != 0
    assert "administratively prohibited" in forwarded.stderr


def test_after_its_end_it_opens_nothing_until_it_is_renewed(boot: Boot, tmp_path: Path) -> None:
    # Two minutes, because only whole minutes are written.
    login, at = Login(boot, tmp_path, -120), f"{USER}@127.0.0.1"
    refused = login(at, "true")
    assert refused.returncode == 255
    assert "Permission denied" in refused.stderr
    (login.machine.folder / "authorized_keys").write_text(f"{login.line(120)}\n")
    assert login(at, "true").returncode == 0
