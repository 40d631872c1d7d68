"""Modules of a zip file with compiled code that is kept, in Pythons of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _module_cache
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host

# As Ansible's: a module below packages without code, which runs as the main program.
SOURCES = {
    "pack/__init__.py": "",
    "pack/util.py": "ANSWER = {answer}\n\n\ndef fail():\n    raise ValueError(ANSWER)\n",
    "pack/module.py": "from . import util\n\nprint(__name__, util.ANSWER)\n",
}
# Prints the files that are compiled meanwhile, and what the module has printed.
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
print(json.dumps({"compiled": [name for name in compiled if "pack" in name], "said": out.getvalue(),
                  "file": util.__file__, "shown": shown, "path": os.environ.get("PYTHONPATH")}))
"""


class Site:
    """Folder of a host with the cache, below the tree of the test."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        assert _change.drive(_module_cache.SUBJECT, {}, check_mode=False).failure is None
        program = _host.path(_module_cache.PROGRAM)
        self.kept = _host.path(_module_cache.CODE)
        # The program has the path on a host.
        text = program.read_text().replace(_module_cache.CODE, str(self.kept))
        program.write_text(text)

    def run(self, answer: object = 42) -> dict[str, Any]:
        """Run the module from a zip file in a folder of its own, as each task does."""
        folder = self.tree / f"run-{len(list(self.tree.glob('run-*')))}"
        folder.mkdir()
        with zipfile.ZipFile(folder / "payload.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in SOURCES.items():
                archive.writestr(name, text.format(answer=answer) if "{" in text else text)
        done = subprocess.run(
            [sys.executable, "-c", RUN, folder / "payload.zip"],
            env={**os.environ, "PYTHONPATH": str(_host.path(_module_cache.LIBRARY))},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        result: dict[str, Any] = json.loads(done.stdout)
        assert result["said"] == f"__main__ {answer}\n"
        assert result["file"] == f"{folder}/payload.zip/pack/util.py"
        assert "raise ValueError(ANSWER)" in result["shown"]
        # Programs that the module starts have their own.
        assert result["path"] is None
        return result


@pytest.fixture
def site(tree: Path) -> Site:
    return Site(tree)


def test_a_source_is_compiled_once(site: Site) -> None:
    assert sorted(site.run()["compiled"]) == sorted(SOURCES)
    assert site.run()["compiled"] == []
    # Another source of the same name is another code.
    assert site.run(answer=43)["compiled"] == ["pack/util.py"]
    assert site.run()["compiled"] == []


@pytest.mark.parametrize("damage", [b"", b"\0" * 400, slice(-9), slice(0, 3)], ids=repr)
def test_damaged_code_is_compiled_again(site: Site, damage: bytes | slice) -> None:
    site.run()
    for file in site.kept.iterdir():
        file.write_bytes(damage if isinstance(damage, bytes) else file.read_bytes()[damage])
    assert len(site.run()["compiled"]) == len(SOURCES)
    assert site.run()["compiled"] == []


def test_code_is_kept_for_root_alone_and_not_without_end(site: Site) -> None:
    for number in range(1000):
        (site.kept / f"old-{number}").touch()
    site.run()
    files = list(site.kept.iterdir())
    assert len(files) == len(SOURCES)
    assert {file.stat().st_mode & 0o777 for file in (*files, site.kept)} == {0o600, 0o700}


def test_a_host_without_the_folder_goes_on(site: Site) -> None:
    site.kept.rmdir()
    assert len(site.run()["compiled"]) == len(SOURCES)
    assert len(site.run()["compiled"]) == len(SOURCES)
    site.kept.touch()
    assert len(site.run()["compiled"]) == len(SOURCES)


def test_installed_once_and_removed_whole(tree: Path) -> None:
    def done(**params: str) -> list[str]:
        return _change.drive(_module_cache.SUBJECT, params, check_mode=False).done

    before = sorted(tree.rglob("*"))
    assert done() == ["write_program", "make_folder"]
    assert done() == []
    _host.write(_module_cache.PROGRAM, "raise SystemExit\n")
    _host.path(_module_cache.CODE).chmod(0o755)
    assert done() == ["write_program", "make_folder"]
    (_host.path(_module_cache.CODE) / "code").touch()
    assert done(state="absent") == ["remove_folder", "remove_folder"]
    assert done(state="absent") == []
    left = {path for path in tree.rglob("*") if path not in before}
    assert {path.name for path in left} <= {"usr", "local", "lib", "var", "cache"}
