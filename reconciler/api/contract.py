"""Comparison of contracts/openapi.yaml with the running service.

`python -m reconciler.api.contract` lists every difference, in both directions and including
descriptions. The file also holds what describes the API as a whole: `info`, `tags` and `servers`.
`--write` takes everything else over from the service and keeps the order of the file; review its
changes like any other change of the contract.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml

from reconciler.api.app import create_app
from reconciler.settings import PROJECT, Settings

Document = dict[str, Any]

CONTRACT = PROJECT / "contracts" / "openapi.yaml"
# Only the file has these.
_FILE_ONLY = ("info", "tags", "servers", "externalDocs")
# Collections up to this many characters are written on a line.
_LINE = 88
_WIDTH = 110


def service() -> Document:
    """The OpenAPI document of the service; it needs no database."""
    engine = sa.create_engine("sqlite://")
    try:
        # Some names are strings of a database library's own type; JSON makes them plain.
        document: Document = json.loads(json.dumps(create_app(Settings(), engine).openapi()))
        return document
    finally:
        engine.dispose()


def contract(file: Path = CONTRACT) -> Document:
    """The contract as written in the file."""
    document: Document = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return document


def generated(written: Document, running: Document) -> Document:
    """The document of the service with the head and the order of the file."""
    head = {name: written[name] for name in _FILE_ONLY if name in written}
    document: Document = _in_order(written, running | head)
    return document


def differences(written: Document, running: Document) -> Iterator[str]:
    """Every place where the two documents differ."""
    first, second = dict(_places(written)), dict(_places(generated(written, running)))
    for place in first | second:
        if place not in second:
            yield f"{place}: only in the contract"
        elif place not in first:
            yield f"{place}: only in the service"
        elif first[place] != second[place]:
            yield f"{place}: contract {first[place]!s:.120}, service {second[place]!s:.120}"


def dump(document: Document) -> str:
    """YAML without anchors, in the document's order."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH)


class _Dumper(yaml.SafeDumper):
    """Writes short collections, and lists of required names, in flow style."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, indentless and flow)

    def represent_mapping(self, *arguments: Any, **options: Any) -> yaml.MappingNode:
        node = super().represent_mapping(*arguments, **options)
        for key, value in node.value:
            if key.value == "required" and isinstance(value, yaml.SequenceNode):
                value.flow_style = True
        parts = [part for pair in node.value for part in pair]
        node.flow_style = bool(parts) and _is_short(parts)
        return node

    def represent_sequence(self, *arguments: Any, **options: Any) -> yaml.SequenceNode:
        node = super().represent_sequence(*arguments, **options)
        node.flow_style = _is_short(node.value)
        return node


def _is_short(parts: list[yaml.Node]) -> bool:
    return sum(map(_length, parts)) <= _LINE


def _length(node: yaml.Node) -> int:
    if isinstance(node, yaml.CollectionNode):
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        return sum(map(_length, parts)) if node.flow_style else _LINE + 1
    return _LINE + 1 if "\n" in node.value else len(node.value) + 4


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _in_order(written: Any, running: Any) -> Any:
    """`running` with its names, and its lists of the same items, in the order of `written`."""
    if isinstance(written, dict) and isinstance(running, dict):
        names = [*(name for name in written if name in running), *running]
        return {name: _in_order(written.get(name), running[name]) for name in dict.fromkeys(names)}
    if isinstance(written, list) and isinstance(running, list):
        if sorted(written, key=str) == sorted(running, key=str):
            return written
        pairs = zip(written, running, strict=False)
        return [_in_order(*pair) for pair in pairs] + running[len(written) :]
    return running


def _places(part: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a document under its place; a list of plain values counts as a value."""
    if isinstance(part, list) and any(isinstance(item, dict) for item in part):
        part = dict(enumerate(part))
    if not isinstance(part, dict) or not part:
        yield where, part
        return
    for name, value in part.items():
        yield from _places(value, f"{where}/{name}")


def main() -> int:
    """0 when contract and service agree, otherwise 1 and every difference."""
    parser = argparse.ArgumentParser(prog="python -m reconciler.api.contract")
    parser.add_argument("--write", action="store_true", help="take the service's document over")
    arguments = parser.parse_args()
    written, running = contract(), service()
    if arguments.write:
        head = [line for line in CONTRACT.read_text("utf-8").splitlines() if line.startswith("#")]
        text = dump(generated(written, running))
        CONTRACT.write_text("\n".join([*head, text]), "utf-8")
        written = contract()
    lines = list(differences(written, running))
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
