"""The id of a request reaches the host's log: real runs, and a journal that only writes to a file.

A host's log entries come from Ansible's own module code. The journal's Python binding, which it
uses, is replaced by a stand-in.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from reconciler.runs import collect
from reconciler.runs.awx import request
from reconciler.runs.launch import Site, launch
from tests.unit.reconciler.runs.conftest import MakeSpec

LIMIT_S = 120
JOURNAL = """\
def sendv(*_fields):
    raise OSError("nothing here is sent like this")


def send(MESSAGE, **_fields):
    with open({file!r}, "a", encoding="utf-8") as handle:
        handle.write(MESSAGE + "\\n")
"""


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """The lines that a host of these runs has logged; beside it, a folder for PYTHONPATH."""
    lines = tmp_path / "journal"
    binding = tmp_path / "python" / "systemd"
    binding.mkdir(parents=True)
    (binding / "__init__.py").touch()
    (binding / "daemon.py").write_text("def booted():\n    return 1\n")
    (binding / "journal.py").write_text(JOURNAL.format(file=str(lines)))
    return lines


@pytest.mark.covers("CTRL-8")
@pytest.mark.parametrize("launcher", ["runner", "awx"])
def test_a_host_logs_whose_request_it_was(
    site: Site, spec: MakeSpec, journal: Path, launcher: str
) -> None:
    environment = {"PYTHONPATH": str(journal.parent / "python")}
    run = spec("run_logged")
    if launcher == "awx":
        # A job has none of our environment: the id is in the variables of its launch.
        name = "ansible_target_log_info"
        value = request.body(run)["extra_vars"][name]
        run = spec("run_logged", **{name: value})
        environment["ANSIBLE_TARGET_LOG_INFO"] = ""
    given = dataclasses.replace(site, environment=environment)
    run_dir = launch(given, run)
    assert collect.wait(run_dir, LIMIT_S).outcome is not None
    lines = journal.read_text().splitlines()
    assert [line for line in lines if "ping" in line], collect.output(run_dir)
    assert all("run=run-1 correlation_id=corr-1 Invoked with" in line for line in lines), lines
