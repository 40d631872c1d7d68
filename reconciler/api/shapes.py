"""The shape of a record as the API shows it, read from its table: see `views.record`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from pydantic import TypeAdapter

from reconciler.api.views import HIDDEN, is_moment
from reconciler.model.states import Described

Schema = dict[str, Any]


def ref(name: str) -> Schema:
    """A schema of the document, by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(of: Schema) -> Schema:
    """A list of them."""
    return {"type": "array", "items": of}


def closed(properties: Mapping[str, Schema], description: str = "") -> Schema:
    """An object with all of these and nothing else: what is not in the contract is not sent."""
    told = {"description": description} if description else {}
    return {
        "type": "object",
        **told,
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def record(table: sa.Table, description: str = "", **more: Schema) -> Schema:
    """A row of the table, and what the answer adds to it."""
    columns = {column.name: _column(column) for column in table.columns}
    shown = {name: schema for name, schema in columns.items() if name not in HIDDEN}
    return closed({**shown, **more}, description)


def page(name: str) -> Schema:
    """One page of a list, as every list route answers it."""
    following: Schema = {
        "type": ["string", "null"],
        "description": "The `cursor` of the next page; null on the last.",
    }
    return closed({"items": array(ref(name)), "next": following})


def states(kind: type[Described]) -> Schema:
    """An enum with the sentence that explains each of its values."""
    schema: Schema = TypeAdapter(kind).json_schema()
    lines = [f"- `{member.value}`: {member.meaning}" for member in kind]
    return {**schema, "description": "\n".join([f"{kind.__doc__}", "", *lines])}


def _column(column: sa.Column[Any]) -> Schema:
    kind = _kind(column)
    if not column.nullable:
        return kind
    return {**kind, "type": [kind["type"], "null"]} if "type" in kind else nullable(kind)


def _kind(column: sa.Column[Any]) -> Schema:
    listed = _one_of(column)
    if listed is not None:
        return ref(listed.__name__)
    if isinstance(column.type, sa.JSON):
        return {"type": "array" if column.info.get("holds") is list else "object"}
    if isinstance(column.type, sa.Double):
        return {"type": "string", "format": "date-time"} if is_moment(column.name) else _NUMBER
    return {"type": _TYPES[column.type.python_type]}


_NUMBER: Schema = {"type": "number"}
_TYPES = {str: "string", int: "integer", bool: "boolean"}


def _one_of(column: sa.Column[Any]) -> type[Described] | None:
    for constraint in column.table.constraints:
        if (
            isinstance(constraint, sa.CheckConstraint)
            and constraint.info.get("column") == column.name
        ):
            kind: type[Described] = constraint.info["states"]
            return kind
    return None
