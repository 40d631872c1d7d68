"""Closure of imports below module_utils: the files that a machine without the collection needs."""

from __future__ import annotations

import ast
import importlib.util
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


def source(name: str) -> str:
    """Source text of a file of module_utils, such as `core._host`."""
    # The loader gives the source of files, of Ansible's module zip, and of a generated script.
    spec = importlib.util.find_spec(f"{PACKAGE}.{name}")
    get_source = getattr(spec.loader if spec else None, "get_source", None)
    text = get_source(f"{PACKAGE}.{name}") if get_source else None
    if text is None:
        raise ImportError(f"no source text of {name}")
    return str(text)


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
