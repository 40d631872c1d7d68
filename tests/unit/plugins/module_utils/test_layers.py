"""Layers of the private utilities: no subpackage imports a subpackage that builds on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _source_closure

UTILS = Path(__file__).resolve().parents[4] / "plugins" / "module_utils"
# Each may import those before it.
LAYERS = (
    "core", "disk", "network", "fabric", "slice", "tenant", "boot", "topology", "parity",
    "firmware",
)  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_subpackage_imports_only_what_lies_below(name: str) -> None:
    below = set(LAYERS[: LAYERS.index(name) + 1])
    for file in (UTILS / name).glob("*.py"):
        imported = _source_closure.imported(file.read_text(encoding="utf-8"))
        assert {other.partition(".")[0] for other in imported} <= below, file.name


def test_every_subpackage_has_its_layer() -> None:
    folders = {path.name for path in UTILS.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == set(LAYERS) and not list(UTILS.glob("*.py"))
