"""Clean end of an interrupted test session on several workers, as a pytest plugin.

pytest-xdist kills its workers then, and the fixtures of a killed worker end nothing: a lab host, a
reconciler or a database server would go on. They are known by a mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

MARK = "GPUAAS_TEST_SESSION"
# For a server that writes something down before it ends.
_GRACE_S = 5.0


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[MARK] = str(uuid.uuid4())


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        return
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for number, grace_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        for pid in marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + grace_s
        while any(marked(mark)) and time.monotonic() < end:
            time.sleep(0.1)


def marked(mark: bytes) -> Iterator[int]:
    """The processes with the mark. Not this one: /proc shows the environment of its start."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
