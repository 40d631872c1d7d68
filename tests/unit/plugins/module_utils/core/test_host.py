"""File tree of a host: the formats of its files."""

from __future__ import annotations

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8", [0, 1, 2, 3, 8]), ("", []), ("5\n", [5]), ("0-1,4-5", [0, 1, 4, 5])],
)
def test_numbers(text: str, expected: list[int]) -> None:
    assert _host.numbers(text) == expected
