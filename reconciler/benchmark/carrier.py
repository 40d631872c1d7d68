"""Import of modules from memory, on the measured machine.

`bundle` sends this text, followed by a call of `run`. It uses the standard library only and runs on
Python 3.8 or newer.
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
    """Finder and loader of modules in a dictionary. A module with children is a package."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target  # not needed, because the names are complete
        if fullname not in self._sources:
            return None
        package = self.is_package(fullname)
        return ModuleSpec(fullname, self, origin=f"<{fullname}>", is_package=package)

    def is_package(self, fullname: str) -> bool:
        return any(name.startswith(f"{fullname}.") for name in self._sources)

    def get_source(self, fullname: str) -> str:
        return self._sources[fullname]


def run(sources: Mapping[str, str], module: str, request: Mapping[str, Any]) -> None:
    """Call `main` of the module and exit with its return value."""
    sys.meta_path.insert(0, Carried(sources))
    sys.exit(importlib.import_module(module).main(dict(request)))
