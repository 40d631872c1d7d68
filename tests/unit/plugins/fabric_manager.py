"""Fabric Manager behind tests/standin/fmpm, which is on the command gate's PATH."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _nvlink

STANDIN = Path(__file__).resolve().parents[2] / "standin" / "fmpm"
RUN = _command.run


class FabricManager:
    """The stand-in's state, which a test reads and sets."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fmpm-state.json"
        self.set(active=[])

    def set(self, **values: Any) -> None:
        self._file.write_text(json.dumps(self._state | values))

    @property
    def _state(self) -> dict[str, Any]:
        return dict(json.loads(self._file.read_text())) if self._file.exists() else {}

    @property
    def active(self) -> list[int]:
        return list(self._state["active"])

    @property
    def calls(self) -> list[list[str]]:
        """Argument lists so far, without the Fabric Manager's address."""
        return [words[2:] for words in self._state.get("calls", [])]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FabricManager:
    (tmp_path / "fmpm").symlink_to(STANDIN)
    monkeypatch.setattr(_command, "_PATH", f"{tmp_path}:{_command._PATH}")
    return FabricManager(tmp_path)


def be_short(patch: pytest.MonkeyPatch, faults: dict[str, str]) -> None:
    """Wait half a second for an operation that hangs, and normally for others: each of them starts
    the program, which takes longer on a busy machine.
    """
    for operation, fault in faults.items():
        if fault == "hang":
            name = "_ANSWER_S" if operation == "-l" else "_CHANGE_S"
            patch.setattr(_nvlink, name, 0.5)
