"""Test sessions: the worker of the lab tests, leftovers of an interruption, and slow files."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.state import process_start
from tests import conftest

ROOT = Path(__file__).resolve().parents[3]
# Started like QEMU: without a parent, in a separate session.
TEST = """
import subprocess, time

def test_that_is_interrupted():
    words = ["sh", "-c", "sleep 300 & echo $! > new; mv new pid"]
    subprocess.run(words, start_new_session=True)
    time.sleep(300)
"""


# Each test writes down its name and its worker.
UNIT = """
import os, pathlib, pytest

def write(name):
    line = os.environ["PYTEST_XDIST_WORKER"] + " " + name + chr(10)
    with pathlib.Path(os.environ["LOG"]).open("a") as log:
        log.write(line)

@pytest.mark.parametrize("number", range({count}))
def test_{name}(number):
    write(f"{name} {{number}}")
"""


def environment(**more: str) -> dict[str, str]:
    """No plugins but those that are named."""
    return {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **more}


def test_one_worker_plays_all_lab_tests_first_and_in_order(tmp_path: Path) -> None:
    files = {"lab/test_b": 3, "lab/test_a": 3, "unit/test_c": 20, "unit/test_d": 20}
    for place, count in files.items():
        file = tmp_path / "tests" / f"{place}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(UNIT.format(count=count, name=place[-1]))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    words = ["-q", "-p", "no:cacheprovider", "-p", "xdist", "-p", "tests.workers", "-n", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--dist", "loadgroup"],
        cwd=tmp_path,
        env=environment(LOG=str(tmp_path / "log")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert len(lines) == 46
    (player,) = {worker for worker, name, _number in lines if name in "ab"}
    played = [f"{name}{number}" for worker, name, number in lines if worker == player]
    assert played[:6] == ["a0", "a1", "a2", "b0", "b1", "b2"]


@pytest.mark.slow
def test_an_interrupted_session_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = ["-q", "-p", "no:cacheprovider", "-p", "xdist", "-p", "tests.workers", "-n", "1"]
    # A shell's background ignores SIGINT, and these tests may run there.
    heard = ["env", "--default-signal=INT"]
    session = subprocess.Popen(
        [*heard, sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
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
    finally:
        session.kill()
        session.wait()


def test_every_slow_file_exists() -> None:
    """A file that was moved keeps its mark."""
    missing = [name for name in conftest.SLOW if not (ROOT / "tests" / name).exists()]
    assert missing == []
