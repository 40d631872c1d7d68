"""The class of a row against the table that its rows are read from."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.db import rows, schema
from reconciler.db.engine import reading
from reconciler.db.schema import Allocation, Row, Slot
from reconciler.model.errors import Problem


def row_classes(kind: type[Row]) -> set[type[Row]]:
    """The classes with tables among this class and the classes derived from it."""
    classes = {kind} if "TABLE" in vars(kind) else set()
    return classes.union(*(row_classes(derived) for derived in kind.__subclasses__()))


KINDS = sorted(row_classes(Row), key=lambda kind: kind.__name__)
# The column allows null, but an allocation is written only once it has a place, and nothing takes
# its node away. Readers need no branch for a row that cannot be.
NEVER_NULL = {(Allocation, "node_id")}
# Read from other tables with the row, and empty unless the reader asks for them.
BESIDE = {Slot: ("last_proof",), Allocation: ("claims", "task_ids")}

of_each = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def without_null(hint: Any) -> tuple[Any, bool]:
    """The type of a field without its null, and whether it has one."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint, False
    (plain,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    return plain, True


def column_fields(kind: type[Row]) -> list[str]:
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    beside = BESIDE.get(kind, ())
    assert tuple(names[len(names) - len(beside) :]) == beside
    return names[: len(names) - len(beside)]


@of_each
def test_fields_are_the_columns_in_their_order(kind: type[Row]) -> None:
    assert column_fields(kind) == [column.name for column in kind.TABLE.columns]


@of_each
def test_a_field_is_of_its_columns_type_and_may_be_null_where_the_column_may(
    kind: type[Row],
) -> None:
    hints = typing.get_type_hints(kind)
    for column in kind.TABLE.columns:
        plain, nullable = without_null(hints[column.name])
        if (kind, column.name) not in NEVER_NULL:
            assert nullable == column.nullable, column
        stored = column.info.get("holds", column.type.python_type)
        assert (typing.get_origin(plain) or plain) is stored, column


def test_every_class_reads_a_table_of_its_own() -> None:
    assert len({kind.TABLE.name for kind in KINDS}) == len(KINDS)
    assert {kind.TABLE for kind in KINDS} <= set(schema.metadata.sorted_tables)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if "id" in kind.TABLE.c], ids=lambda kind: kind.__name__
)
def test_a_row_that_is_not_there_is_named_by_its_entity(engine: sa.Engine, kind: type[Row]) -> None:
    with reading(engine) as conn, pytest.raises(Problem) as caught:
        rows.get(conn, kind, "7")
    assert caught.value.code == f"{kind.ENTITY}_not_found"
    assert kind.ENTITY in caught.value.expected
    assert "'7'" in caught.value.found
