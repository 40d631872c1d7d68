"""Disk fixtures for the tests of the storage modules."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command

_bench = runpy.run_path(str(Path(__file__).parents[1] / "storage_bench.py"))
bench, loop = _bench["bench"], _bench["loop"]


@pytest.fixture
def calls(bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs that ran; the mounts of the bench follow mount and umount."""
    invocations: list[str] = []

    def run(argv: Any, **_options: Any) -> _command.Result:
        invocations.append(" ".join(argv))
        if argv[0] == "umount":
            bench.unmount(argv[-1])
        elif argv[0] == "mount":
            bench.mount("259:2", argv[-1], argv[-2])
        return _command.Result(0, "", "")

    monkeypatch.setattr(_command, "run", run)
    return invocations
