"""Closure of imports below module_utils: the files that a machine without the collection needs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

PACKAGE = "ansible_collections.gpuaas.slice.plugins.module_utils"


def closure(entry: str, source: Callable[[str], str]) -> dict[str, str]:
    """`entry` and every file that it imports, directly or not: source text by name (`core._host`).

    source: returns the text of a name.
    """
    texts: dict[str, str] = {}
    queue = [entry]
    while queue:
        name = queue.pop()
        if name not in texts:
            texts[name] = source(name)
            queue += imported(texts[name])
    return texts


def imported(text: str) -> Iterator[str]:
    """Names of the module_utils files that a source text imports."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = f"{node.module}."
        if not module.startswith(f"{PACKAGE}."):
            continue
        name = module.removeprefix(f"{PACKAGE}.")
        # Only files begin with an underscore; `from ….core import _host` names a package first.
        if name.rstrip(".").rpartition(".")[2].startswith("_"):
            yield name.rstrip(".")
        else:
            yield from (f"{name}{alias.name}" for alias in node.names)
