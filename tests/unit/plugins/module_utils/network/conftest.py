"""The rig of two guests, their host and the world around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.plugins.module_utils.network import rig as rigs


@pytest.fixture(scope="module")
def rig() -> Iterator[rigs.Rig]:
    with rigs.standing() as (machines, _patch):
        yield machines
