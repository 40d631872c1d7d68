"""The built archive of the collection, installed away from the checkout."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Installed:
    """members: the files of the archive. path: the only installed collection.

    core: folder of an unpacked ansible-core that is used instead of the environment's, by this
    python.
    """

    members: tuple[str, ...]
    home: Path
    core: Path | None = None
    python: str = sys.executable

    @property
    def path(self) -> Path:
        return self.home / "collections" / "ansible_collections" / "gpuaas" / "slice"

    def run(self, *argv: str, **environment: str) -> str:
        """The output of an Ansible program; away from the checkout, and without its ansible.cfg."""
        if self.core:
            environment["PYTHONPATH"] = str(self.core)
        return run(self.home, *argv, python=self.python, **environment)

    def discovered(self) -> dict[str, Any]:
        """The result of a playbook with blocks, argument specifications, a module, its private
        utilities and a profile. It reads this machine.
        """
        output = self.run(
            "ansible-playbook", "gpuaas.slice.discover", "-i", "localhost,", "-c", "local",
            "-e", f"ansible_python_interpreter={sys.executable}",
            "-e", f"slice_profile_file={self.path / 'profiles' / 'lab.yml'}",
            ANSIBLE_SHOW_CUSTOM_STATS="true",
        )  # fmt: skip
        result: dict[str, Any] = json.loads(output.rpartition("RUN: ")[2])["slice_result"]
        return result

    def json(self, *argv: str) -> dict[str, Any]:
        document = json.loads(self.run(*argv))
        assert isinstance(document, dict)
        return document


def run(
    home: Path, program: str, *argv: str, python: str = sys.executable, **environment: str
) -> str:
    words = ["-m", "ansible", program.removeprefix("ansible-")]
    done = subprocess.run(
        [python, *words, *argv],
        cwd=home,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
            "ANSIBLE_HOME": str(home / "ansible"),
            "ANSIBLE_COLLECTIONS_PATH": str(home / "collections"),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Made once for all workers of a session, whose folders are beside each other."""
    base = tmp_path_factory.getbasetemp()
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "galaxy"
    home.mkdir(exist_ok=True)
    target = home / "collections"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            subprocess.run([ROOT / "scripts" / "collection-archive", home], check=True)
            (archive,) = home.glob("gpuaas-slice-*.tar.gz")
            words = ("collection", "install", str(archive), "-p", f"{target}.new", "--offline")
            # Left by an interrupted worker.
            shutil.rmtree(f"{target}.new", ignore_errors=True)
            run(home, "ansible-galaxy", *words)
            Path(f"{target}.new").rename(target)
    (archive,) = home.glob("gpuaas-slice-*.tar.gz")
    with tarfile.open(archive) as opened:
        members = tuple(member.name for member in opened if member.isfile())
    return Installed(members, home)
