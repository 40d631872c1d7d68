"""The class of a row against the table that its rows are read from."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from reconciler.db import rows, schema
from reconciler.db.engine import reading
from reconciler.db.schema import Row
from reconciler.model.errors import Problem


def row_classes(kind: type[Row]) -> set[type[Row]]:
    """The classes with tables among this class and the classes derived from it."""
    classes = {kind} if "TABLE" in vars(kind) else set()
    return classes.union(*(row_classes(derived) for derived in kind.__subclasses__()))


KINDS = sorted(row_classes(Row), key=lambda kind: kind.__name__)


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
