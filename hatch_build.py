"""Build hook of the wheel: adds the single-file programs for hosts, which are not in git."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Scripts(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # a checkout has them from `make scripts`
        sys.path.insert(0, self.root)
        from scripts import standalone  # noqa: PLC0415 (only the line above makes it importable)

        for file in standalone.write():
            place = Path("reconciler/_shipped") / file.relative_to(standalone.BUILD)
            build_data["force_include"][str(file)] = str(place)
