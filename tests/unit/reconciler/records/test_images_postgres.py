"""The key of image links, made by two workers at the same time, on PostgreSQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import sqlalchemy as sa

from reconciler.db.engine import transaction
from reconciler.records import images
from tests.unit.reconciler.lifecycle import test_races_postgres

pytestmark = pytest.mark.postgres
engine = test_races_postgres.engine


def test_two_first_links_have_one_key(engine: sa.Engine) -> None:
    together = Barrier(4)

    def link_key(_number: int) -> bytes:
        with transaction(engine) as conn:
            conn.execute(sa.select(1))
            together.wait(30)
            return images.link_key(conn)

    with ThreadPoolExecutor(4) as pool:
        keys = set(pool.map(link_key, range(4)))
    assert len(keys) == 1
    with transaction(engine) as conn:
        assert {images.link_key(conn)} == keys
    assert len(keys.pop()) == 32
