"""Result file build/bench.json: every bench adds its keys and leaves those of the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[2] / "build" / "bench.json"


def add(figures: dict[str, Any], path: Path = PATH) -> None:
    """Save and print the measured figures.

    Two benches measure `clone`, so its figures are joined.
    """
    existing = json.loads(path.read_text()) if path.exists() else {}
    merged = existing | figures
    if "clone" in figures:
        merged["clone"] = existing.get("clone", {}) | figures["clone"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(merged, indent=1) + "\n")
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
