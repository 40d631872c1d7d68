"""Mode of a host, as its marker names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host, _host_mode


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"mode": "slice"}', True), ('{"mode": "baremetal"}', False), ("[", False)],
)
def test_slice_mode_is_said_in_a_file(tree: Path, text: str, expected: bool) -> None:
    assert not _host_mode.is_slice()
    _host.write(_host_mode.MARKER, text)
    assert _host_mode.is_slice() is expected
