"""Importer that keeps the compiled code of Ansible's modules on the host.

Ansible sends a module and its utilities as a zip file of sources. zipimport compiles each of them
twice, once only to learn the name of its file, and keeps nothing; that is more than half of the
time until a module begins. `boot/_module_cache.py` writes this file to the host as `sitecustomize`
in a folder of its own, and the playbooks name that folder in their modules' environment. Python
runs it before all else, so it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import sys
import zipimport
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType

# Only root reads and writes it. Code of other users' modules is not kept.
FOLDER = Path("/var/cache/gpuaas-modules")
# Files in FOLDER. A release has about 250; beyond this all go, because most are of former releases.
_MOST = 1000
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
        # Within the zip file, because each run has another folder for it.
        name = filename[len(self.archive) + 1 :]
        key = hashlib.sha256(b"\0".join((MAGIC_NUMBER, name.encode(), source))).hexdigest()
        code = _kept(FOLDER / key)
        if code is None:
            code = compile(source, name, "exec", dont_inherit=True)
            _keep(FOLDER / key, code)
        return code


def install() -> None:
    """Use the importer in this process; Python programs that it starts have their own site."""
    os.environ.pop("PYTHONPATH", None)
    sys.path_hooks[:] = [
        Importer if hook is zipimport.zipimporter else hook for hook in sys.path_hooks
    ]


def _kept(path: Path) -> CodeType | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, data = content[:_DIGEST], content[_DIGEST:]
    # A host that lost power may have half a file, and marshal trusts what it reads.
    if hashlib.sha256(data).digest() != digest:
        return None
    code: CodeType = marshal.loads(data)  # noqa: S302  (only root writes the folder)
    return code


def _keep(path: Path, code: CodeType) -> None:
    """A host whose disk is full, or without the folder, goes on without."""
    data = marshal.dumps(code)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        files = list(FOLDER.iterdir())
        for file in files if len(files) >= _MOST else ():
            file.unlink(missing_ok=True)
        draft.touch(0o600)
        draft.write_bytes(hashlib.sha256(data).digest() + data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
