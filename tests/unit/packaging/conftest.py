"""The wheel, built once for all tests that install it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.packaging.machine import ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a folder of its own."""
    folder = tmp_path_factory.mktemp("wheel")
    uv = Path(sys.executable).parent / "uv"
    words = [str(uv), "build", "-q", "--wheel", "--out-dir", str(folder), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built
