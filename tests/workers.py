"""Test sessions on several workers of pytest-xdist, as a pytest plugin.

`--dist loadgroup`: a worker plays all lab tests in their order, the others play the rest. The
plugin's own groups are not used, because pytest 9 ignores how pytest-xdist 3.8 names them.

An interrupted session leaves no process behind. pytest-xdist kills its workers then, and the
fixtures of a killed worker end nothing: a lab host, a reconciler or a database server would go on.
They are known by a mark in their environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LAB = "tests/lab/"
MARK = "SLICE_TEST_SESSION"
# Time for a server to save its state before it ends.
_GRACE_S = 5.0


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[MARK] = str(uuid.uuid4())
        config.pluginmanager.register(Failures(config))


class Failures:
    """Prints each failure when it happens: a session that is cut off has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal: Any = self._plugins.get_plugin("terminalreporter")
        if report.failed and terminal:
            terminal.write_line(f"\n{report.nodeid}\n{report.longreprtext}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # Not installed where tests run in a single process.
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415

    class StoryScheduling(LoadScopeScheduling):
        """The largest group is played first, so the lab tests begin at once."""

        def _split_scope(self, nodeid: str) -> str:
            return LAB if nodeid.startswith(LAB) else nodeid

    return StoryScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


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
