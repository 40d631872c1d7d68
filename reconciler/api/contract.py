"""Comparison of contracts/openapi.yaml with the running service.

`python -m reconciler.api.contract` lists every difference. The file is the authority. Besides prose
it holds nothing that the service does not describe: paths, methods, parameters, schemas, statuses
and roles are compared in both directions. `--write` takes the structure of the service over and
keeps the order and the prose of the file; review its changes like any other change of the
contract. `--prose` also takes descriptions from the docstrings of the service.
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
_PROSE = frozenset({"description", "summary", "title", "example", "examples"})
# Keys below these are names, even if such a name is "title" or "description".
_NAMES = frozenset(
    {"paths", "properties", "schemas", "parameters", "headers", "responses", "securitySchemes"}
)
# Lists without a meaningful order.
_SETS = frozenset({"required", "enum", "type", "anyOf", "oneOf", "token"})
# Collections up to this many characters are written on one line.
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


def differences(written: Document, running: Document) -> Iterator[str]:
    """Every place where the two documents differ in meaning."""
    yield from _compare("", _comparable(written), _comparable(running), names=False)


def merged(written: Document, running: Document, *, prose: bool = False) -> Document:
    """The structure of the service with the order and the prose of the file.

    prose: where the service has prose too, its prose is taken.
    """
    kept = {name: written[name] for name in _FILE_ONLY if name in written}
    structure: Document = _Merge(prose).mapping(_comparable(written), _comparable(running))
    version = structure.pop("openapi")
    return {"openapi": version, **kept, **structure}


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


def _comparable(document: Document) -> Document:
    return {name: part for name, part in document.items() if name not in _FILE_ONLY}


def _compare(where: str, written: Any, running: Any, *, names: bool) -> Iterator[str]:
    if isinstance(written, dict) and isinstance(running, dict):
        for name in [*written, *(name for name in running if name not in written)]:
            if name in _PROSE and not names:
                continue
            place = f"{where}/{name}"
            if name not in running:
                yield f"{place}: only in the contract"
            elif name not in written:
                yield f"{place}: only in the service"
            else:
                below = name in _NAMES and not names
                pair = _unordered(name, written[name]), _unordered(name, running[name])
                yield from _compare(place, *pair, names=below)
    elif isinstance(written, list) and isinstance(running, list) and len(written) == len(running):
        for index, (first, second) in enumerate(zip(written, running, strict=True)):
            yield from _compare(f"{where}/{index}", first, second, names=False)
    elif written != running:
        yield f"{where}: contract {_shorten(written)}, service {_shorten(running)}"


def _unordered(name: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if name == "parameters":
        return {_parameter_key(parameter): parameter for parameter in value}
    return sorted(value, key=str) if name in _SETS else value


def _parameter_key(parameter: Document) -> str:
    reference = parameter.get("$ref")
    return str(reference) if reference else f"{parameter['in']} {parameter['name']}"


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:120]}…"


class _Merge:
    """Merges the document of the service into that of the file."""

    def __init__(self, prose: bool) -> None:
        self._prose = prose

    def mapping(self, written: Document, running: Document, *, names: bool = False) -> Document:
        result: Document = {}
        for name in [*written, *(name for name in running if name not in written)]:
            prose = name in _PROSE and not names
            if name not in running:
                if prose:
                    result[name] = written[name]
            elif name not in written:
                result[name] = running[name]
            elif prose and isinstance(written[name], str):
                result[name] = running[name] if self._prose else written[name]
            else:
                below = name in _NAMES and not names
                result[name] = self._value(written[name], running[name], names=below)
        return result

    def _value(self, written: Any, running: Any, *, names: bool) -> Any:
        if isinstance(written, dict) and isinstance(running, dict):
            return self.mapping(written, running, names=names)
        if isinstance(written, list) and isinstance(running, list):
            return self._list(written, running)
        return running

    def _list(self, written: list[Any], running: list[Any]) -> list[Any]:
        if all(isinstance(part, dict) and ("in" in part or "$ref" in part) for part in running):
            present = {
                _parameter_key(part): part
                for part in written
                if isinstance(part, dict) and ("in" in part or "$ref" in part)
            }
            return [
                self._value(present.get(_parameter_key(part), part), part, names=False)
                for part in running
            ]
        return written if sorted(written, key=str) == sorted(running, key=str) else running


def main() -> int:
    """0 when contract and service agree, otherwise 1 and every difference."""
    parser = argparse.ArgumentParser(prog="python -m reconciler.api.contract")
    parser.add_argument("--write", action="store_true", help="take the service's structure over")
    parser.add_argument("--prose", action="store_true", help="take the service's prose over too")
    arguments = parser.parse_args()
    written, running = contract(), service()
    if arguments.write or arguments.prose:
        head = [line for line in CONTRACT.read_text("utf-8").splitlines() if line.startswith("#")]
        text = dump(merged(written, running, prose=arguments.prose))
        CONTRACT.write_text("\n".join([*head, text]), "utf-8")
        written = contract()
    lines = list(differences(written, running))
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
