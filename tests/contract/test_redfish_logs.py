"""Output of a play with a BMC's password: on the terminal, in Ansible's log, in the host's log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.standin import bmc as standin

ROOT = Path(__file__).resolve().parents[2]
# Modules log through systemd's library where it exists. This stand-in writes to a file instead.
SYSTEMD = {
    "__init__.py": "",
    "daemon.py": "def booted(): return True",
    "journal.py": """\
import os
def sendv(*rows):
    with open(os.environ["STANDIN_JOURNAL"], "a") as log:
        log.write("".join(f"{row}\\n" for row in rows))
def send(**fields):
    sendv(*(f"{name}={value}" for name, value in fields.items()))
""",
}


def play(folder: Path, *tasks: dict[str, Any]) -> str:
    """Return all output of a play of the tasks, at the verbosity that shows module invocations."""
    library = folder / "library" / "systemd"
    library.mkdir(parents=True)
    for name, text in SYSTEMD.items():
        (library / name).write_text(text)
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    book = {"hosts": "all", "gather_facts": False, "vars": here, "tasks": tasks}
    (folder / "play.yml").write_text(json.dumps([book]))
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "host,", "-vvv", "--diff",
         str(folder / "play.yml")],
        capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "build" / "collections"),
             "ANSIBLE_HOME": str(folder / "ansible"), "ANSIBLE_NOCOLOR": "1",
             "ANSIBLE_LOG_PATH": str(folder / "ansible.log"),
             "IDRAC_PASSWORD": standin.PASSWORD, "PYTHONPATH": str(folder / "library"),
             "STANDIN_JOURNAL": str(folder / "journal")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.covers("HOST-3", "P3")
def test_the_password_of_a_bmc_is_in_no_log(bmc: standin.Bmc, tmp_path: Path) -> None:
    # Refusals of this BMC repeat the request.
    bmc.begin(echo=True)
    arguments = {
        "host": bmc.address, "ca_file": bmc.ca_file, "state": "present",
        "password": "{{ lookup('ansible.builtin.env', 'IDRAC_PASSWORD') }}",
    }  # fmt: skip
    output = play(
        tmp_path,
        {"gpuaas.slice.redfish_bios": {**arguments, "user": "root"}},
        {"gpuaas.slice.redfish_bios": {**arguments, "user": "stranger"}, "ignore_errors": True},
    )
    assert len(bmc.record()["patches"]) == 1 and "bmc_login_refused" in output
    # Terminal and host log show both invocations, without the password.
    assert output.count('"password": "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER"') == 2
    logged = (tmp_path / "journal").read_text()
    assert logged.count("PASSWORD=NOT_LOGGING_PARAMETER") == 2 and "USER=stranger" in logged
    left = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert [text for text in (output.encode(), *left) if standin.PASSWORD.encode() in text] == []
