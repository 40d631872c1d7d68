"""Files that are marked slow by name: each exists, so that a moved file keeps its mark."""

from __future__ import annotations

from tests import conftest


def test_every_slow_file_exists() -> None:
    missing = [name for name in conftest.SLOW if not (conftest.ROOT / "tests" / name).exists()]
    assert missing == []
