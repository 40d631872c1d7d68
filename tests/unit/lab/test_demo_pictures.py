"""Pictures that the demonstration takes of the console, in a real browser."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.command import LabError
from lab.demo import pictures
from lab.demo.stage import NODE as stage_node
from tests.unit.reconciler.api.conftest import databases, selling
from tests.unit.reconciler.api.stack import NODE, Stack
from tests.unit.reconciler.console.test_browser import site

__all__ = ["databases", "selling", "site"]


def test_pictures_are_taken_and_a_page_that_fails_is_named(
    selling: Stack, site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage: Any = SimpleNamespace(
        service=SimpleNamespace(url=site), secrets=selling.secrets, folder=tmp_path
    )
    assert pictures.after(stage, "host") == []
    assert stage_node == NODE
    assert pictures.after(stage, "parity") == ["fleet.png", "node.png", "parity.png"]
    sizes = [(tmp_path / name).stat().st_size for name in ("fleet.png", "node.png", "parity.png")]
    assert min(sizes) > 10_000
    monkeypatch.setattr(pictures, "NODE", "other")
    with pytest.raises(LabError, match="/console/nodes/other/timeline: expected 200; found 404"):
        pictures.after(stage, "recover")
