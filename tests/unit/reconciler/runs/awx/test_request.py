"""SSH options of an AWX job, tried with a real sshd."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ansible import constants
from ansible.plugins import loader

from reconciler.runs.awx import client, request
from reconciler.runs.spec import NodeAccess
from reconciler.trust import ca
from tests.unit.plugins.inventory.inventories import answering
from tests.unit.reconciler.benchmark.sshd import SSHD, USER, machine, new_key
from tests.unit.reconciler.runs.awx.conftest import spec
from tests.unit.reconciler.runs.conftest import ROOT

pytestmark = [
    pytest.mark.covers("CTRL-9", "HOST-13"),
    pytest.mark.skipif(SSHD is None, reason="no sshd"),
]


def test_a_host_key_that_was_revoked_is_refused_by_a_job_too(tmp_path: Path) -> None:
    trust = ca.open_trust(tmp_path)
    login = new_key(tmp_path / "login")
    # The execution environment has our CA and nothing else of ours.
    image = tmp_path / "ssh_known_hosts"
    image.write_text(ca.known_hosts(trust).read_text())

    def connect(at: NodeAccess) -> tuple[int, str]:
        job = replace(spec(), node=at)
        given = shlex.split(request.body(job)["extra_vars"]["ansible_ssh_args"])
        program, words = given[:3], given[3:]
        assert program == ["-I", "-S", request._BOUNDED_SSH]
        alone = ["-o", "ControlPath=none", "-o", f"GlobalKnownHostsFile={image}"]
        to = ["-i", f"{tmp_path}/login", "-p", str(at.port), "-l", at.user, at.address, "true"]
        # The first value of an option counts.
        argv = ["ssh", *alone, *words, *to]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
        return done.returncode, done.stderr

    def certified(key: str) -> str:
        return ca.certify_host(trust, key, "node-1")

    with machine(tmp_path / "host", login=login, certify=certified) as host:
        at = NodeAccess("node-1", "127.0.0.1", port=host.port, user=USER)
        another = " ".join(new_key(tmp_path / "another").split()[:2])
        assert connect(at)[0] == 0
        assert connect(replace(at, revoked=(another,)))[0] == 0
        code, why = connect(replace(at, revoked=(another, " ".join(host.key.split()[:2]))))
        assert (code, "revoked" in why) == (255, True), why


def option_variables() -> set[str]:
    """Each variable that Ansible reads for a connection by SSH with sudo, or for a module."""
    plugins = (("connection", "ssh"), ("become", "sudo"), ("shell", "sh"))
    names = {name for option in constants.MAGIC_VARIABLE_MAPPING.values() for name in option}
    for kind, name in plugins:
        getattr(loader, f"{kind}_loader").get(name, class_only=True)
        names |= set(constants.config.get_plugin_vars(kind, name))
    for definition in constants.config.get_configuration_definitions().values():
        names |= {entry["name"] for entry in definition.get("vars", ())}
    # Of facts that no playbook gathers, of Windows and of Ansible's own tests.
    names -= {"ansible_facts_modules", "ansible_interpreter_python_fallback", "_z_test_entry"}
    names -= {"ansible_win_async_startup_timeout", "_ansible_coverage_remote_output"}
    names -= {"ansible_deprecation_warnings"}
    # `test_check.py` has these.
    names -= request._SECRETS
    return {name for name in names if name.startswith(("ansible_", "_ansible_"))}


def test_the_inventory_of_awx_names_no_program_and_no_machine(tmp_path: Path) -> None:
    """A module is run by the real program, with an inventory that sets every other variable."""
    trust = ca.open_trust(tmp_path)
    login = new_key(tmp_path / "login")
    image = tmp_path / "ssh_known_hosts"
    image.write_text(ca.known_hosts(trust).read_text())
    trap, sprung = tmp_path / "trap", tmp_path / "sprung"
    trap.write_text(f"#!/bin/sh\ntouch {sprung}\nexit 1\n")
    trap.chmod(0o755)
    hostile: dict[str, object] = dict.fromkeys(option_variables(), str(trap))
    options = f"-o ProxyCommand={trap} -o PermitLocalCommand=yes -o LocalCommand={trap}"
    hostile |= {name: options for name in hostile if name.endswith("_args")}
    hostile |= {"ansible_connection": "local", "ansible_ssh_port": 9, "ansible_ssh_retries": 9}
    # Ansible expands a variable wherever it reads a variable.
    template = f"{{{{ lookup('ansible.builtin.pipe', '{trap}') }}}}"

    def certified(key: str) -> str:
        return ca.certify_host(trust, key, "node-1")

    with machine(tmp_path / "host", login=login, certify=certified) as host:
        at = NodeAccess("node-1", "127.0.0.1", port=host.port, user=USER)
        variables = request.body(replace(spec(), node=at))["extra_vars"]
        assert option_variables() <= variables.keys()
        alone = ["-o", f"GlobalKnownHostsFile={image}", "-i", str(tmp_path / "login")]
        program, arguments = request._BOUNDED_SSH, variables["ansible_ssh_args"]
        variables["ansible_ssh_args"] = arguments.replace(program, f"{program} {shlex.join(alone)}")
        variables["ansible_python_interpreter"] = sys.executable
        variables["ansible_become"] = False
        given = tmp_path / "variables.json"
        given.write_text(json.dumps(variables))
        for values in (hostile, dict.fromkeys(hostile, template)):
            hosts = tmp_path / "hosts.json"
            hosts.write_text(json.dumps({"all": {"hosts": {"node-1": values}}}))
            program = Path(sys.executable).parent / "ansible"
            done = subprocess.run(
                [program, "-i", hosts, "-e", f"@{given}", "-m", "ansible.builtin.ping", "node-1"],
                # AWX's checkout of the project.
                cwd=ROOT,
                env={**os.environ, "ANSIBLE_HOME": str(tmp_path / "ansible")},
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert "Accepted publickey" in host.log, done.stdout + done.stderr
            assert '"ping": "pong"' in done.stdout, done.stdout + done.stderr
            assert not sprung.exists()


PAGE = {"next": "/again", "results": [{"id": 1, "name": "gpuaas.slice.discover"}]}


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b" " * 2_000_000, "more than 1000000 bytes"),
        (b"[" * 500_000, "not JSON"),
        (PAGE, "does not end, page 3"),
        ({**PAGE, "results": []}, "does not end, page 1"),
    ],
)
def test_an_answer_without_an_end_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: object, found: str
) -> None:
    monkeypatch.setattr(client.Client, "LARGEST", 1_000_000)
    monkeypatch.setattr(client, "_MOST_PAGES", 3)
    token = tmp_path / "token"
    token.write_text("t" * 20)
    with answering() as service:
        service.answers = {"awx": answer}
        access = client.AwxAccess(service.url("awx"), token)
        with client.Client(access) as awx, pytest.raises(client.Silent) as silent:
            list(awx.every("/job_templates/"))
    assert found in silent.value.found
