"""A discovery document as a prepared host gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reconciler.model.bundle import Bundle

DATA = Path(__file__).resolve().parents[3] / "data"


@pytest.fixture
def document() -> dict[str, Any]:
    """After bootstrap and storage transition: three disks are free, the fourth is still shared."""
    document: dict[str, Any] = json.loads((DATA / "prepared-discovery.json").read_text())
    return document


@pytest.fixture
def recorded() -> dict[str, Any]:
    """As recorded on a host before bootstrap."""
    recorded: dict[str, Any] = json.loads((DATA / "lab-discovery.json").read_text())
    return recorded


@pytest.fixture
def bundle(document: dict[str, Any]) -> Bundle:
    """The first candidate."""
    return Bundle.of(document["candidates"][0]["bundle"])
