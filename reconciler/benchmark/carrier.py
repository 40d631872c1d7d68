"""Modules without files: the text that `bundle` sends is this one, followed by a call of `run`.

Runs on the measured machine, so: standard library only, Python 3.8 or newer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Carried(MetaPathFinder, InspectLoader):
    """Finds modules in a dictionary from full names to sources; what has children is a package."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target  # names are whole, so the way to them says nothing
        if fullname not in self._sources:
            return None
        package = self.is_package(fullname)
        return ModuleSpec(fullname, self, origin=f"<{fullname}>", is_package=package)

    def is_package(self, fullname: str) -> bool:
        return any(name.startswith(f"{fullname}.") for name in self._sources)

    def get_source(self, fullname: str) -> str:
        return self._sources[fullname]


def run(sources: Mapping[str, str], module: str, asked: Mapping[str, Any]) -> None:
    """Call `main` of the carried module and exit with what it returns."""
    sys.meta_path.insert(0, Carried(sources))
    sys.exit(importlib.import_module(module).main(dict(asked)))
