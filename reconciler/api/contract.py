"""The written contract against the running service: `python -m reconciler.api.contract`.

`contracts/openapi.yaml` is the authority. It says more than the service can (prose), and nothing
else: every path, method, parameter, document, status and role is compared, both ways. `--write`
takes the service's structure over and keeps the contract's prose and order; what it changed is then
reviewed as any other change of the contract.
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
# Said by the contract alone.
_OWN = ("info", "tags", "servers", "externalDocs")
_PROSE = frozenset({"description", "summary", "title", "example", "examples"})
# What stands below these are names, even where one of them is "title" or "description".
_NAMES = frozenset(
    {"paths", "properties", "schemas", "parameters", "headers", "responses", "securitySchemes"}
)
# What fits into this many characters stands on one line.
_LINE = 72
# Lists in which the order means nothing.
_SETS = frozenset({"required", "enum", "type", "anyOf", "oneOf", "token"})


def service() -> Document:
    """What the running service says of itself; the database is not needed for that."""
    engine = sa.create_engine("sqlite://")
    try:
        # As a reader of it gets it: names are plain text, not the database library's.
        document: Document = json.loads(json.dumps(create_app(Settings(), engine).openapi()))
        return document
    finally:
        engine.dispose()


def contract(file: Path = CONTRACT) -> Document:
    """The written contract."""
    document: Document = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return document


def differences(written: Document, running: Document) -> Iterator[str]:
    """Every place where the two do not mean the same."""
    yield from _compare("", _without_own(written), _without_own(running), names=False)


def merged(written: Document, running: Document) -> Document:
    """The service's structure with the contract's own prose and order."""
    own = {name: written[name] for name in _OWN if name in written}
    structure: Document = _merge(_without_own(written), _without_own(running), names=False)
    version = structure.pop("openapi")
    return {"openapi": version, **own, **structure}


def dump(document: Document) -> str:
    """YAML for people: no anchors, in the order in which it is written."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


class _Dumper(yaml.SafeDumper):
    """Short things on one line, and what is the same in two places in both."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, indentless and flow)

    def represent_mapping(self, *arguments: Any, **options: Any) -> yaml.MappingNode:
        node = super().represent_mapping(*arguments, **options)
        pairs = [part for pair in node.value for part in pair]
        node.flow_style = bool(pairs) and _short_enough(pairs)
        return node

    def represent_sequence(self, *arguments: Any, **options: Any) -> yaml.SequenceNode:
        node = super().represent_sequence(*arguments, **options)
        node.flow_style = _short_enough(node.value)
        return node


def _short_enough(parts: list[yaml.Node]) -> bool:
    length = sum(_length(part) for part in parts)
    return length <= _LINE


def _length(node: yaml.Node) -> int:
    if isinstance(node, yaml.CollectionNode):
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        return sum(map(_length, parts)) if node.flow_style else _LINE + 1
    return _LINE + 1 if "\n" in node.value else len(node.value) + 4


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _without_own(document: Document) -> Document:
    return {name: part for name, part in document.items() if name not in _OWN}


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
                pair = _sorted(name, written[name]), _sorted(name, running[name])
                yield from _compare(place, *pair, names=below)
    elif isinstance(written, list) and isinstance(running, list) and len(written) == len(running):
        for index, (one, other) in enumerate(zip(written, running, strict=True)):
            yield from _compare(f"{where}/{index}", one, other, names=False)
    elif written != running:
        yield f"{where}: contract {_short(written)}, service {_short(running)}"


def _sorted(name: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if name == "parameters":
        return {_parameter(one): one for one in value}
    return sorted(value, key=str) if name in _SETS else value


def _parameter(parameter: Document) -> str:
    reference = parameter.get("$ref")
    return str(reference) if reference else f"{parameter['in']} {parameter['name']}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:120]}…"


def _merge(written: Any, running: Any, *, names: bool) -> Any:
    if isinstance(written, dict) and isinstance(running, dict):
        result: Document = {}
        for name in [*written, *(name for name in running if name not in written)]:
            prose = name in _PROSE and not names
            if name not in running:
                if prose:
                    result[name] = written[name]
            elif name not in written or (prose and isinstance(written[name], str)):
                result[name] = written.get(name, running[name])
            else:
                below = name in _NAMES and not names
                result[name] = _merge(written[name], running[name], names=below)
        return result
    if isinstance(written, list) and isinstance(running, list):
        return _merge_lists(written, running)
    return running


def _merge_lists(written: list[Any], running: list[Any]) -> list[Any]:
    if all(isinstance(one, dict) and ("in" in one or "$ref" in one) for one in running):
        known = {_parameter(one): one for one in written}
        return [_merge(known.get(_parameter(one), one), one, names=False) for one in running]
    return written if sorted(written, key=str) == sorted(running, key=str) else running


def main() -> int:
    """The program: 0 when the two agree, 1 with every difference when they do not."""
    parser = argparse.ArgumentParser(prog="python -m reconciler.api.contract")
    parser.add_argument("--write", action="store_true", help="take the service's structure over")
    written, running = contract(), service()
    if parser.parse_args().write:
        head = [line for line in CONTRACT.read_text("utf-8").splitlines() if line.startswith("#")]
        CONTRACT.write_text("\n".join([*head, dump(merged(written, running))]), "utf-8")
        written = contract()
    found = list(differences(written, running))
    for line in found:
        sys.stdout.write(f"{line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
