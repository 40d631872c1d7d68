"""Two real SSH servers, one of them hostile: no answer of a node reaches anything of another."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.plugins.connection import ssh as ansible_ssh
from ansible.vars.clean import clean_facts

from reconciler.runs import collect
from reconciler.runs.awx import request
from reconciler.runs.collect import Outcome
from reconciler.runs.launch import Site, launch
from reconciler.runs.paths import socket_directory
from reconciler.runs.spec import NodeAccess, RunSpec
from reconciler.runs.ssh import Reach, SshAccess
from reconciler.trust import ca
from tests.unit.reconciler.benchmark.sshd import USER, Boot, Machine, boot, new_key
from tests.unit.reconciler.runs.conftest import ROOT

__all__ = ["boot"]
pytestmark = pytest.mark.covers("HOST-13", "CTRL-9")

LIMIT_S = 120
# Logs each command of the controller, then answers it as the file `answer.py` says.
SERVER = """\
import os, sys
folder = {folder!r}
with open(folder + "/commands", "a") as log:
    log.write(os.environ.get("SSH_ORIGINAL_COMMAND", "a shell") + "\\n")
with open(folder + "/commands") as log:
    number = len(log.readlines())
exec(open(folder + "/answer.py").read())
"""
HONEST = 'os.execvp("/bin/sh", ["sh", "-c", os.environ["SSH_ORIGINAL_COMMAND"]])'
# Reads the module, does not run it, and answers in its name.
FORGED = """
import json
sys.stdin.buffer.read()
print(json.dumps({{"ping": "forged", **json.load(open({facts!r}))}}))
"""
OPTIONS: dict[str, Any] = yaml.safe_load(ansible_ssh.DOCUMENTATION)["options"]
# Every variable of the connection plugin, with and without the prefix that facts lose.
VARIABLES = sorted(
    name
    for option in OPTIONS.values()
    for entry in option.get("vars", ())
    if (name := entry["name"]).startswith("ansible_")
)


@dataclass
class Pair:
    """The hostile node A and the honest node B of a site."""

    folder: Path
    site: Site
    a: Machine
    b: Machine
    login: Path

    def access(self, machine: Machine) -> NodeAccess:
        node = "node-a" if machine is self.a else "node-b"
        return NodeAccess(node, "127.0.0.1", port=machine.port, user=USER)

    def spec(self, machine: Machine, run_id: str, playbook: str = "run_hostile") -> RunSpec:
        run = {"id": run_id, "node_id": self.access(machine).node_id, "correlation_id": "c-1"}
        variables = {"slice_run": run}
        return RunSpec(run_id, playbook, self.access(machine), variables, 60, "c-1")

    def run(self, site: Site, spec: RunSpec) -> Outcome:
        run_dir = launch(site, spec)
        outcome = collect.wait(run_dir, LIMIT_S).outcome
        assert outcome is not None, collect.output(run_dir)
        return outcome

    def answer(self, facts: Mapping[str, object]) -> None:
        """What node A answers to every module."""
        path = self.a.folder / "facts.json"
        path.write_text(json.dumps(facts))
        (self.a.folder / "answer.py").write_text(FORGED.format(facts=str(path)))

    def commands(self, machine: Machine) -> int:
        path = machine.folder / "commands"
        return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def pair(boot: Boot, site: Site, tmp_path: Path) -> Iterator[Pair]:
    trust = ca.open_trust(tmp_path)
    identity = ca.operator_identity(trust)
    login = tmp_path / "login"
    key = new_key(login)
    machines = []
    for node in ("node-a", "node-b"):
        folder = tmp_path / node
        server = tmp_path / f"{node}.py"
        server.write_text(SERVER.format(folder=str(folder)))

        def certify(host_key: str, node: str = node) -> str:
            return ca.certify_host(trust, host_key, node)

        operator = (trust.directory / "operator.pub").read_text().strip()
        settings = f"ForceCommand /usr/bin/python3 {server}"
        made = boot(node, login=f"{key}\n{operator}", settings=settings, certify=certify)
        (folder / "answer.py").write_text(HONEST)
        machines.append(made)
    access = SshAccess(identity.key, identity.certificate, identity.known_hosts)
    yield Pair(tmp_path, dataclasses.replace(site, ssh=access), *machines, login)
    for socket in _sockets(tmp_path):
        _close(socket)


def _sockets(state: Path) -> list[Path]:
    """The open shared connections of a site, whose paths a hostile host can work out as well."""
    folders = (socket_directory(state, name) for name in ("node-a", "node-b", "127.0.0.1"))
    awx = Path("/tmp").glob("gpuaas-ssh-*")
    return [path for folder in folders for path in folder.iterdir()] + list(awx)


def _close(socket: Path) -> None:
    words = ["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "127.0.0.1"]
    subprocess.run(words, check=False, capture_output=True, timeout=20)


Way = Callable[[Pair, Machine, str], Outcome]


def _runner(pair: Pair, machine: Machine, run_id: str) -> Outcome:
    return pair.run(pair.site, pair.spec(machine, run_id))


def _by_hand(pair: Pair, machine: Machine, run_id: str) -> Outcome:
    config = pair.folder / f"{run_id}.conf"
    known = pair.folder / f"{run_id}.known"
    known.write_text(machine.known_hosts_line())
    config.write_text(f"Host *\n  UserKnownHostsFile {known}\n")
    reach = Reach("127.0.0.1", USER, machine.port, pair.login, config)
    environment = reach.environment(pair.folder)
    site = dataclasses.replace(pair.site, ssh=None, environment=environment)
    return pair.run(site, pair.spec(machine, run_id))


def _awx(pair: Pair, machine: Machine, run_id: str) -> Outcome:
    """A job has none of our environment, and AWX may have switched facts on as variables."""
    spec = pair.spec(machine, run_id)
    known = pair.folder / "trust" / "known_hosts"
    words = ["-o", f"GlobalKnownHostsFile={known}", "-i", str(pair.login)]
    environment = {
        "ANSIBLE_INJECT_FACT_VARS": "True",
        "ANSIBLE_SSH_COMMON_ARGS": " ".join(words),
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(socket_directory(pair.folder, "node-b")),
    }
    site = dataclasses.replace(pair.site, ssh=None, environment=environment)
    variables = request.body(spec)["extra_vars"]
    return pair.run(site, dataclasses.replace(spec, variables=variables))


WAYS = pytest.mark.parametrize("way", [_runner, _by_hand, _awx])


@WAYS
def test_no_answer_changes_how_the_next_task_reaches_its_node(pair: Pair, way: Way) -> None:
    """Every variable of the connection plugin at once; B's connection is open all the time."""
    honest = _evidence(way(pair, pair.b, "run-b"))
    assert honest["answers"] == ["pong"] * 3 and pair.commands(pair.b) == 3
    (theirs,) = _sockets(pair.folder)
    made = pair.folder / "made-by-a-host"
    hostile = dict.fromkeys(VARIABLES, "hostile") | {
        "ansible_control_path": str(theirs),
        "ansible_control_path_dir": str(made),
        "ansible_host": "127.0.0.1",
        "ansible_port": pair.b.port,
        "ansible_ssh_port": pair.b.port,
        "ansible_host_key_checking": False,
        "ansible_ssh_extra_args": f"-o ControlPath={theirs}",
        "slice_default": "of the host",
    }
    pair.answer({"ansible_facts": hostile, "add_host": {"host_name": "node-b", "groups": ["all"]}})

    evidence = _evidence(way(pair, pair.a, "run-a"))

    assert evidence["answers"] == ["forged"] * 3
    assert (pair.commands(pair.a), pair.commands(pair.b)) == (3, 3)
    assert not made.exists()
    assert evidence["hosts"] == ["node-a"]
    if way is not _awx:
        assert set(evidence["variables"]) == set(honest["variables"])
        assert evidence["default"] == "of the role"


@WAYS
def test_no_answer_puts_another_node_behind_the_path_of_a_connection(pair: Pair, way: Way) -> None:
    way(pair, pair.b, "run-b")
    (theirs,) = _sockets(pair.folder)
    _close(theirs)
    pair.answer({"ansible_facts": {"ansible_control_path": str(theirs)}})
    way(pair, pair.a, "run-a")

    evidence = _evidence(way(pair, pair.b, "run-b2"))

    assert evidence["answers"] == ["pong"] * 3
    assert (pair.commands(pair.a), pair.commands(pair.b)) == (3, 6)


# Runs the command of the controller on a machine that enrolled as this node.
ENROLLED = """
etc = folder + "/etc"
if not os.path.exists(etc):
    os.makedirs(etc + "/gpuaas")
    os.system(f"cp /etc/passwd /etc/group /etc/nsswitch.conf /etc/ld.so.cache {{etc}}")
    with open(etc + "/gpuaas/enrolment.env", "w") as file:
        file.write("GPUAAS_NODE_ID={node}\\nGPUAAS_API_URL=https://example\\n")
inside = f"mount --bind {{etc}} /etc && mount -t tmpfs none /var/lib && exec sh -c \\"$0\\""
words = ["unshare", "-m", "sh", "-c", inside, os.environ["SSH_ORIGINAL_COMMAND"]]
os.execvp(words[0], words)
"""
IMAGE = {
    "name": "ubuntu",
    "version": "1",
    "digest": "sha256:" + "0" * 64,
    "size_bytes": 1024,
    "url": "http://127.0.0.1:9/image",
}


@pytest.mark.covers("I4")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
def test_a_module_refuses_the_run_of_another_node(pair: Pair) -> None:
    """The host that answers for node A enrolled as node B: readings and changes are refused."""
    (pair.a.folder / "answer.py").write_text(ENROLLED.format(node="node-b"))
    profile = yaml.safe_load((ROOT / "profiles" / "lab.yml").read_text())
    site = dataclasses.replace(pair.site, playbooks=None)
    for playbook, more in {"discover": {}, "cache_image": {"slice_image": IMAGE}}.items():
        spec = pair.spec(pair.a, f"run-{playbook}", playbook)
        run = {**spec.variables["slice_run"], "task_id": "t", "kind": "k"}
        variables = {"slice_run": run, "slice_profile": profile, **more}
        outcome = pair.run(site, dataclasses.replace(spec, variables=variables))
        assert outcome.result is not None and not outcome.ok, outcome
        error = outcome.result["error"]
        assert (error["code"], error["found"]) == ("wrong_node", "a run for node-a")
        assert "node-b" in error["expected"] and error["remedy"]


@pytest.mark.covers("I4")
def test_an_outcome_of_another_node_does_not_count(pair: Pair) -> None:
    pair.answer({"answered_by": "node-b"})
    outcome = pair.run(pair.site, pair.spec(pair.a, "run-a"))
    assert (outcome.status, outcome.result, outcome.touched) == ("failed", None, True)
    assert outcome.problem == "wrong_node: node-b answered for node-a"


def test_a_job_of_awx_leaves_no_variable_of_the_connection_to_a_host() -> None:
    """Ansible removes some variables from facts; the launch request gives each of the others."""
    facts = dict.fromkeys(VARIABLES, "hostile")
    left = set(clean_facts(facts))
    spec = RunSpec("run-1", "discover", NodeAccess("node-1", "192.0.2.7"), {}, 60, "c-1")
    given = request.body(spec)["extra_vars"]
    # With ControlPath among the arguments, Ansible reads neither of these.
    moot = {"ansible_control_path", "ansible_control_path_dir"}
    assert "ControlPath=" in given["ansible_ssh_args"]
    assert left - set(given) == moot


def _evidence(outcome: Outcome) -> dict[str, Any]:
    assert outcome.ok and outcome.result is not None, outcome
    return dict(outcome.result["evidence"])
