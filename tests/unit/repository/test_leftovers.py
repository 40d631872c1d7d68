"""Processes left by an interrupted test session on several workers: all must have ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.state import process_start

ROOT = Path(__file__).resolve().parents[3]
# Started like QEMU: without a parent, in a separate session.
TEST = """
import subprocess, time

def test_that_is_interrupted():
    words = ["sh", "-c", "sleep 300 & echo $! > new; mv new pid"]
    subprocess.run(words, start_new_session=True)
    time.sleep(300)
"""


@pytest.mark.slow
def test_an_interrupted_session_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = ["-q", "-p", "no:cacheprovider", "-p", "xdist", "-p", "tests.leftovers", "-n", "1"]
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    file = tmp_path / "pid"
    deadline = time.monotonic() + 60
    while not file.exists():
        assert session.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    pid = int(file.read_text())
    assert process_start(pid)
    session.send_signal(signal.SIGINT)
    assert session.wait(60) == pytest.ExitCode.INTERRUPTED
    assert process_start(pid) is None
