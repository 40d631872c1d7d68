"""Disk fixtures for the tests of the storage modules."""

from __future__ import annotations

import runpy
from pathlib import Path

_bench = runpy.run_path(str(Path(__file__).parents[1] / "storage_bench.py"))
bench, loop = _bench["bench"], _bench["loop"]
