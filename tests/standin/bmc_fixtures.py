"""Fixtures of the stand-in BMC, registered by tests/conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.standin.bmc import Bmc, standing


@pytest.fixture(scope="module")
def bmc_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bmc]:
    with standing(tmp_path_factory.mktemp("bmc")) as bmc:
        yield bmc


@pytest.fixture
def bmc(bmc_process: Bmc) -> Iterator[Bmc]:
    """A reset BMC; after the test, no session may be left on it."""
    bmc_process.begin()
    yield bmc_process
    assert bmc_process.record()["open_sessions"] == 0
