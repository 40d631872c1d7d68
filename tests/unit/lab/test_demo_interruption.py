"""Interrupted demonstration: real processes, stand-ins for QEMU, the service and a run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.state import process_start

ROOT = Path(__file__).resolve().parents[3]
# Longer than the limit of these tests, so that a leftover process is still running and detected.
SLEEP = "sleep 120"
STARTED = ("qemu", "service", "run", "stubborn")
# QEMU goes to the background of a shell that ends. A run forks away from its starter into a session
# of its own. The process `stubborn` ignores SIGTERM and SIGINT.
DEMO = f"""
import subprocess, sys
from pathlib import Path
from rich.console import Console
from lab.demo import __main__ as demo
from lab.demo.report import Report
from lab.demo.stage import Stage

folder = Path(sys.argv[1])
demo.interruption._GRACE_S = 0.5

def start(name, trap=""):
    work = f'{{trap}} echo $$ > "$0.new"; mv "$0.new" "$0"; while :; do {SLEEP}; done'
    words = ["sh", "-c", '"$@" &', "sh", "sh", "-c", work, str(folder / name)]
    subprocess.run(words, start_new_session=True, check=True)

def first(stage):
    start("qemu")
    return {{}}

def second(stage):
    start("run")
    start("stubborn", "trap '' TERM INT;")
    service = ["sh", "-c", 'echo $$ > "$0"; exec {SLEEP}', str(folder / "service")]
    subprocess.run(service)

report = Report(folder / "demo.json", Console(stderr=True))
steps = [("host", "boot", first), ("bootstrap", "run", second), ("never", "", first)]
ended = demo.play(Stage(folder / "demo"), report, steps)
sys.exit(0 if ended else demo.interruption.EXIT_CODE)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    demo = subprocess.Popen(
        [sys.executable, "-c", DEMO, tmp_path],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pids = [_pid(tmp_path / name, demo) for name in STARTED]
    assert all(process_start(pid) for pid in pids)
    demo.send_signal(number)
    # Impatience changes nothing.
    time.sleep(0.2)
    demo.send_signal(number)
    _out, lines = demo.communicate(timeout=60)
    assert demo.returncode == 130, lines
    assert [name for name, pid in zip(STARTED, pids, strict=True) if process_start(pid)] == []
    assert "Traceback" not in lines
    assert lines.splitlines()[-1].startswith("interrupted: the service, its runs and the lab host")
    document = json.loads((tmp_path / "demo.json").read_text())
    assert not document["ok"]
    assert [(step["name"], step["ok"]) for step in document["steps"]] == [
        ("host", True),
        ("bootstrap", False),
    ]


def _pid(file: Path, demo: subprocess.Popen[str]) -> int:
    """The process that wrote its number there."""
    deadline = time.monotonic() + 60
    while not file.exists() or not file.read_text().strip():
        assert demo.poll() is None, demo.communicate()[1]
        assert time.monotonic() < deadline, f"{file.name} was not started"
        time.sleep(0.05)
    return int(file.read_text())
