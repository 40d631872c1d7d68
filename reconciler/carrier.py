"""In-memory importer for code that is sent to a machine as a single text.

The text of this file comes first, the sources follow, and `install` and `run` end it. The programs
of `scripts/standalone.py` and the harness of `benchmark/capture.py` are made so. It runs on the
other machine: standard library only, Python 3.8 or newer.
"""

from __future__ import annotations

import importlib
import linecache
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any


class Carried(MetaPathFinder, InspectLoader):
    """Modules by their full names; a name with others below it is a package.

    data: further texts by name, for `__loader__.get_data(name)`.
    """

    def __init__(self, sources: Mapping[str, str], data: Mapping[str, str]) -> None:
        self._sources = sources
        self._data = data

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target  # names are whole, so the way to them says nothing
        package = self.is_package(fullname)
        if not package and fullname not in self._sources:
            return None
        return ModuleSpec(fullname, self, origin=fullname, is_package=package)

    def is_package(self, fullname: str) -> bool:
        return any(name.startswith(f"{fullname}.") for name in self._sources)

    def get_source(self, fullname: str) -> str:
        return self._sources.get(fullname, "")

    def get_code(self, fullname: str) -> CodeType:
        text = self.get_source(fullname)
        # A traceback then shows the line and not only its number.
        linecache.cache[fullname] = (len(text), None, text.splitlines(True), fullname)
        return compile(text, fullname, "exec", dont_inherit=True)

    def get_data(self, name: str) -> bytes:
        return self._data[name].encode()


def install(sources: Mapping[str, str], data: Mapping[str, str] | None = None) -> None:
    sys.meta_path.insert(0, Carried(sources, data or {}))
    # The interpreter's own hook looks for lines in files only.
    sys.excepthook = traceback.print_exception


def run(entry: str, *arguments: Any) -> None:
    """Call `module:function` and exit with what it returns."""
    module, _colon, function = entry.partition(":")
    sys.exit(getattr(importlib.import_module(module), function)(*arguments))
