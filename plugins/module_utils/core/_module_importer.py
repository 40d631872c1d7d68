"""Importer that keeps the compiled code of Ansible's modules on the host.

Ansible sends a module and its utilities as a zip file of sources. zipimport compiles each of them
twice, once only to learn the name of its file, and keeps nothing. `boot/_module_cache.py` writes
this file to the host as `sitecustomize` in a folder of its own, which the playbooks name in the
environment of their modules. Python runs it before all else, so it needs the standard library only.
Before Python 3.10, zipimport takes only the main module from here.
"""

from __future__ import annotations

import _imp
import contextlib
import hashlib
import marshal
import os
import sys
import zipimport
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType

# Playbooks put it into the environment of their modules as PYTHONPATH.
LIBRARY = "/usr/local/lib/gpuaas-modules"
# Only root reads and writes it. Code of other users' modules is not kept.
FOLDER = Path("/var/cache/gpuaas-modules")
# At this many files all are removed; most then belong to former releases. A release has about 250.
_MOST = 1000
_VERSION = MAGIC_NUMBER + bytes([sys.flags.optimize])
_DIGEST = hashlib.sha256().digest_size


class Importer(zipimport.zipimporter):
    """Python modules of a zip file, with code that was compiled from exactly this source."""

    def get_filename(self, fullname: str) -> str:
        name = fullname.rpartition(".")[2]
        within = f"{name}/__init__.py" if self.is_package(fullname) else f"{name}.py"
        return f"{self.archive}/{self.prefix}{within}"

    def get_code(self, fullname: str) -> CodeType:
        filename = self.get_filename(fullname)
        source = self.get_data(filename)
        file = FOLDER / hashlib.sha256(_VERSION + source).hexdigest()
        code = _load(file)
        if code is None:
            code = compile(source, filename, "exec", dont_inherit=True)
            _store(file, code)
        # As importlib does with its own files: each run has another folder for the zip file.
        _imp._fix_co_filename(code, filename)  # type: ignore[attr-defined]
        return code


def install() -> None:
    """Use the importer in this process, and not in Python programs that it starts."""
    sys.path_hooks[:] = [
        Importer if hook is zipimport.zipimporter else hook for hook in sys.path_hooks
    ]
    sys.path[:] = [path for path in sys.path if path != LIBRARY]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path != LIBRARY)


def _load(file: Path) -> CodeType | None:
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, data = content[:_DIGEST], content[_DIGEST:]
    # A host that lost power may have half a file, and marshal trusts what it reads.
    if hashlib.sha256(data).digest() != digest:
        return None
    code: CodeType = marshal.loads(data)  # noqa: S302  (only root writes the folder)
    return code


def _store(file: Path, code: CodeType) -> None:
    """Write the code; on a full disk or without the folder, do nothing."""
    data = marshal.dumps(code)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        files = list(FOLDER.iterdir())
        for old in files if len(files) >= _MOST else ():
            old.unlink(missing_ok=True)
        draft.touch(0o600)
        draft.write_bytes(hashlib.sha256(data).digest() + data)
        draft.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
