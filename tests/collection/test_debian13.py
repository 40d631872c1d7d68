"""The modules on a host of Debian 13, whose Python 3.13 lacks parts that older versions have.

The host is a folder. Ansible sends each module through standard input to the folder's own Python,
which sees the processes and devices of this machine and writes files of the folder only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import ansible.module_utils
import pytest

from reconciler.runs import contract
from tests import small_debian
from tests.collection.conftest import Installed
from tests.deployed_machine import ALONE, NEEDS_ROOT

PYTHON = """#!/bin/sh
exec {alone} sh -ec '
for folder in dev proc sys; do mount --rbind "/$folder" "$0/$folder"; done
exec chroot "$0" /usr/bin/python3 "$@"' {root} "$@"
"""
# Imports every module; prints the version of Python and the names.
IMPORTS = """
import importlib, json, pkgutil, sys
sys.path.insert(0, "/c")
from ansible_collections.gpuaas.slice.plugins import modules
names = [name for _, name, _ in pkgutil.iter_modules(modules.__path__)]
for name in names:
    importlib.import_module(f"{modules.__name__}.{name}")
print(json.dumps([sys.version_info[:2], names]))
"""
# Prints the names of the compiled files.
KEPT = b"""
import json, marshal, pathlib
kept = pathlib.Path("/var/cache/gpuaas-modules").iterdir()
names = [marshal.loads(file.read_bytes()[32:]).co_filename for file in kept]
print(json.dumps([name.split(".zip/")[1] for name in names]))
"""
MACHINE_ID = "0123456789abcdef0123456789abcdef"
PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - gpuaas.slice.module_cache:
- import_playbook: gpuaas.slice.discover
- hosts: all
  gather_facts: false
  environment: { PYTHONPATH: /usr/local/lib/gpuaas-modules }
  tasks:
    - gpuaas.slice.image_cache_info:
      register: cache
    - gpuaas.slice.api_names: &names { names: { api.gpuaas.example: 192.0.2.20 } }
      check_mode: true
      register: planned
    - gpuaas.slice.api_names: *names
      register: written
    - gpuaas.slice.api_names: *names
      register: again
    - ansible.builtin.set_stats:
        data: { cache: "{{ cache }}", names: "{{ [planned, written, again] }}" }
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "root"
    small_debian.make("trixie", root, "base-files", "iproute2", "python3", variant="extract")
    (root / "etc/machine-id").write_text(f"{MACHINE_ID}\n")
    yield root
    shutil.rmtree(root)


@pytest.mark.covers("ECO-1")
@NEEDS_ROOT
def test_the_modules_run_on_debian_13(host: Path, installed: Installed, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(PYTHON.format(alone=" ".join(ALONE), root=host))
    python.chmod(0o755)

    shutil.copytree(installed.home / "collections", host / "c")
    shutil.copytree(Path(ansible.module_utils.__path__[0]), host / "c/ansible/module_utils")
    (host / "c/ansible/__init__.py").touch()
    done = subprocess.run(
        [python, "-I", "-"], input=IMPORTS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    modules = {path.stem for path in installed.path.glob("plugins/modules/*.py")}
    version, names = json.loads(done.stdout)
    assert version == [3, 13] and set(names) == modules

    (tmp_path / "play.yml").write_text(PLAY)
    output = installed.run(
        "ansible-playbook", str(tmp_path / "play.yml"), "-i", "localhost,", "-c", "local",
        "-e", f"ansible_python_interpreter={python}",
        "-e", f"slice_profile_file={installed.path / 'profiles' / 'lab.yml'}",
        ANSIBLE_SHOW_CUSTOM_STATS="true", ANSIBLE_PIPELINING="true",
    )  # fmt: skip
    stats = json.loads(output.rpartition("RUN: ")[2])
    discovery = contract.check_result(stats["slice_result"])["evidence"]["discovery"]
    assert discovery["identity"]["machine_id"] == MACHINE_ID
    assert stats["cache"]["images"] == [] and stats["cache"]["free_bytes"] > 0
    assert [result["changed"] for result in stats["names"]] == [True, True, False]
    assert stats["names"][-1]["resolved"] == {"api.gpuaas.example": ["192.0.2.20"]}
    assert "192.0.2.20\tapi.gpuaas.example\n" in (host / "etc/hosts").read_text()
    # Of the modules that found the cache each file was compiled once.
    kept = subprocess.run([python, "-I", "-"], input=KEPT, stdout=subprocess.PIPE, check=True)
    names = json.loads(kept.stdout)
    assert len(names) == len(set(names)) > 50
    assert "ansible_collections/gpuaas/slice/plugins/modules/api_names.py" in names
    assert "ansible/module_utils/basic.py" in names
