"""Snapshot of a host's earlier state: the first record counts, even while it cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host_snapshot
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

pytestmark = pytest.mark.covers("HOST-15")


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def a_list(file: Path) -> None:
    file.write_text("[]\n")


def no_text(file: Path) -> None:
    file.write_bytes(b'{"a": "\xff"}')


@pytest.mark.parametrize("damage", [folder, loop, a_list, no_text], ids=lambda case: case.__name__)
def test_a_record_that_cannot_be_read_is_not_written_anew(
    tree: Path, damage: Callable[[Path], None]
) -> None:
    assert _host_snapshot.recall("x") is None
    for step in _host_snapshot.remember_steps("x", None, {"was": "on"}):
        _host_snapshot.apply(step)
    assert _host_snapshot.recall("x") == {"was": "on"}
    damage(tree / _host_snapshot.file_of("x").lstrip("/"))
    with pytest.raises(Refusal, match="before_unreadable"):
        _host_snapshot.recall("x")
