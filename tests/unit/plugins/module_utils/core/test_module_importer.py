"""Modules of a zip file with compiled code that is kept, in Pythons of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _module_cache
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host

# As Ansible's: a module within packages, which runs as the main program.
SOURCES = {
    "pack/__init__.py": "",
    "pack/util.py": "ANSWER = {answer}\n\n\ndef fail():\n    raise ValueError(ANSWER)\n",
    "pack/module.py": "from . import util\n\nprint(__name__, util.ANSWER)\n",
}
# Prints the compiled files, the module's output, and a traceback.
RUN = """
import contextlib, io, json, os, runpy, sys, traceback
compiled = []
sys.addaudithook(lambda event, args: event == "compile" and compiled.append(str(args[1])))
sys.path.insert(0, sys.argv[1])
out = io.StringIO()
with contextlib.redirect_stdout(out):
    runpy.run_module("pack.module", run_name="__main__", alter_sys=True)
from pack import util
try:
    util.fail()
except ValueError:
    shown = traceback.format_exc()
print(json.dumps({"compiled": [name.split(".zip/")[1] for name in compiled if ".zip/" in name],
                  "output": out.getvalue(), "file": util.__file__, "shown": shown,
                  "path": sys.path, "environment": os.environ["PYTHONPATH"]}))
"""


class Site:
    """A host with the cache, below the folder of the test."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.library, self.code = _host.path(_module_cache.LIBRARY), _host.path(_module_cache.CODE)
        self.install()

    def install(self) -> None:
        assert drive() == ["write_program", "make_folder"]
        # The program has the paths of a host.
        program = _host.path(_module_cache.PROGRAM)
        text = program.read_text().replace(_module_cache.CODE, str(self.code))
        program.write_text(text.replace(_module_cache.LIBRARY, str(self.library)))

    def run(self, answer: object = 42) -> list[str]:
        """Run the module from a zip file in a folder of its own, as each task does; return the
        files that were compiled.
        """
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.tree))
        with zipfile.ZipFile(folder / "payload.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in SOURCES.items():
                archive.writestr(name, text.format(answer=answer) if "{" in text else text)
        done = subprocess.run(
            [sys.executable, "-c", RUN, folder / "payload.zip"],
            env={**os.environ, "PYTHONPATH": f"{self.library}:/site"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        result: dict[str, Any] = json.loads(done.stdout)
        assert result["output"] == f"__main__ {answer}\n"
        assert result["file"] == f"{folder}/payload.zip/pack/util.py"
        # Ansible finds out by the file of a frame which collection a deprecation belongs to.
        assert f'File "{folder}/payload.zip/pack/util.py", line 5, in fail' in result["shown"]
        assert "raise ValueError(ANSWER)" in result["shown"]
        assert str(self.library) not in result["path"] and "/site" in result["path"]
        assert result["environment"] == "/site"
        return sorted(result["compiled"])


def drive(**params: str) -> list[str]:
    outcome = _change.drive(_module_cache.SUBJECT, params, check_mode=False)
    assert outcome.failure is None
    return outcome.done


@pytest.fixture
def site(tree: Path) -> Site:
    return Site(tree)


def test_a_source_is_compiled_once(site: Site) -> None:
    assert site.run() == sorted(SOURCES)
    assert site.run() == []
    # A changed source of the same name is compiled anew.
    assert site.run(answer=43) == ["pack/util.py"]
    assert site.run() == []


@pytest.mark.parametrize("damage", [b"", b"\0" * 400, slice(-9), slice(0, 3)], ids=repr)
def test_damaged_code_is_compiled_again(site: Site, damage: bytes | slice) -> None:
    site.run()
    for file in site.code.iterdir():
        file.write_bytes(damage if isinstance(damage, bytes) else file.read_bytes()[damage])
    assert site.run() == sorted(SOURCES)
    assert site.run() == []


def test_code_is_kept_for_root_alone_and_not_without_end(site: Site) -> None:
    for number in range(1000):
        (site.code / f"old-{number}").touch()
    site.run()
    files = list(site.code.iterdir())
    assert len(files) == len(SOURCES)
    assert {file.stat().st_mode & 0o777 for file in (*files, site.code)} == {0o600, 0o700}


def test_modules_that_run_at_once(site: Site) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(site.run, range(6)))
    assert [site.run(answer) for answer in range(6)] == [[]] * 6


def test_a_host_without_the_folder_goes_on(site: Site) -> None:
    site.code.rmdir()
    assert site.run() == site.run() == sorted(SOURCES)
    site.code.touch()
    assert site.run() == sorted(SOURCES)


def test_python_keeps_no_copy_of_the_program(site: Site) -> None:
    site.run()
    assert sorted(file.name for file in site.library.iterdir()) == [
        "__pycache__",
        "sitecustomize.py",
    ]
    assert (site.library / "__pycache__").read_bytes() == b""


def test_installed_once_and_removed_whole(tree: Path) -> None:
    before = set(tree.rglob("*"))
    assert drive() == ["write_program", "make_folder"]
    assert drive() == []
    _host.path(_module_cache.CODE).chmod(0o755)
    _host.write(f"{_module_cache.LIBRARY}/zipimport.py", "raise SystemExit\n")
    assert drive() == ["write_program", "make_folder"]
    (_host.path(_module_cache.CODE) / "code").touch()
    assert drive(state="absent") == ["remove_folder", "remove_folder"]
    assert drive(state="absent") == []
    after = set(tree.rglob("*"))
    assert {path.name for path in after - before} <= {"usr", "local", "lib", "var", "cache"}


def test_a_link_in_place_of_a_folder_is_replaced_and_its_target_left_alone(tree: Path) -> None:
    target = tree / "elsewhere"
    target.mkdir(mode=0o755)
    for path in (_module_cache.LIBRARY, _module_cache.CODE):
        _host.path(path).parent.mkdir(parents=True, exist_ok=True)
        _host.path(path).symlink_to(target)
    assert drive() == ["write_program", "make_folder"]
    assert list(target.iterdir()) == [] and target.stat().st_mode & 0o777 == 0o755
    assert drive() == []
    shutil.rmtree(_host.path(_module_cache.CODE))
    _host.path(_module_cache.CODE).symlink_to(tree / "nowhere")
    assert drive(state="absent") == ["remove_folder", "remove_folder"]
    assert drive(state="absent") == []


def test_a_cache_that_cannot_be_installed_is_a_doubt(tree: Path) -> None:
    _host.path("/usr").mkdir(exist_ok=True)
    _host.path("/usr/local").touch()
    outcome = _change.drive(_module_cache.SUBJECT, {}, check_mode=False)
    assert outcome.failure is None and len(outcome.doubts) == 1
