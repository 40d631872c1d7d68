"""Two real SSH servers, one hostile: no answer of a node affects another node."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import shutil
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.config.manager import ConfigManager
from ansible.plugins.connection import ssh as ansible_ssh
from ansible.vars.clean import clean_facts

from reconciler.runs import collect, lock, ssh
from reconciler.runs.awx import request
from reconciler.runs.collect import Outcome, Phase
from reconciler.runs.launch import SEARCH_PATH, Site, launch
from reconciler.runs.paths import socket_directory
from reconciler.runs.spec import NodeAccess, RunSpec
from reconciler.runs.ssh import Reach, SshAccess
from reconciler.trust import ca
from tests.unit.reconciler.benchmark.sshd import USER, Boot, Machine, boot, new_key
from tests.unit.reconciler.runs.conftest import ROOT

__all__ = ["boot"]
pytestmark = pytest.mark.covers("HOST-13", "CTRL-9", "P1")

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
        """Set node A's answer to every module."""
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
        machine = boot(node, login=f"{key}\n{operator}", settings=settings, certify=certify)
        (folder / "answer.py").write_text(HONEST)
        machines.append(machine)
    access = SshAccess(identity.key, identity.certificate, identity.known_hosts)
    made = Pair(tmp_path, dataclasses.replace(site, ssh=access), machines[0], machines[1], login)
    yield made
    for socket in _sockets(made):
        _close(socket)


def _sockets(pair: Pair) -> list[Path]:
    """The open shared connections of a site, whose paths a hostile host can work out as well."""
    folders = (socket_directory(pair.folder, name) for name in ("node-a", "node-b", "127.0.0.1"))
    awx = [_of_awx(machine) for machine in (pair.a, pair.b)]
    sockets = [path for folder in folders for path in folder.iterdir()]
    return sockets + [path for path in awx if path.exists()]


def _of_awx(machine: Machine) -> Path:
    """Where a job of AWX has its connection to this machine, as SSH works it out."""
    path = "ControlPath=/tmp/gpuaas-ssh-%C"
    words = ["ssh", "-G", "-F", "/dev/null", "-p", str(machine.port), "-l", USER, "-o", path]
    shown = subprocess.run([*words, "127.0.0.1"], check=True, capture_output=True, text=True)
    (line,) = (line for line in shown.stdout.splitlines() if line.startswith("controlpath "))
    return Path(line.removeprefix("controlpath "))


def _close(socket: Path) -> None:
    words = ["ssh", "-o", f"ControlPath={socket}", "-O", "exit", "127.0.0.1"]
    subprocess.run(words, check=False, capture_output=True, timeout=20)


Way = Callable[[Pair, Machine, str], Outcome]
# The site and the run that a way has.
Placed = Callable[[Pair, Machine, str], tuple[Site, RunSpec]]


def _runner(pair: Pair, machine: Machine, run_id: str) -> Outcome:
    return pair.run(pair.site, pair.spec(machine, run_id))


def _by_hand(pair: Pair, machine: Machine, run_id: str) -> Outcome:
    config = pair.folder / f"{run_id}.conf"
    hosts = pair.folder / f"{run_id}.known"
    hosts.write_text(machine.known_hosts_line())
    config.write_text(f"Host *\n  UserKnownHostsFile {hosts}\n")
    reach = Reach("127.0.0.1", USER, machine.port, pair.login, config)
    environment = reach.environment(pair.folder)
    site = dataclasses.replace(pair.site, ssh=None, environment=environment)
    return pair.run(site, pair.spec(machine, run_id))


def _awx(pair: Pair, machine: Machine, run_id: str) -> Outcome:
    return pair.run(*_job(pair, machine, run_id))


def _job(pair: Pair, machine: Machine, run_id: str) -> tuple[Site, RunSpec]:
    """A job has none of our environment, and AWX may have switched facts on as variables.

    The execution environment holds the authority of host keys, and an agent the credential: here
    an ssh that knows both.
    """
    spec = pair.spec(machine, run_id)
    hosts = pair.folder / "trust" / "known_hosts"
    programs = pair.folder / "programs"
    programs.mkdir(exist_ok=True)
    program = programs / "ssh"
    words = f'-o GlobalKnownHostsFile={hosts} -i {pair.login} "$@"'
    program.write_text(f"#!/bin/sh\nexec {shutil.which('ssh')} {words}\n")
    program.chmod(0o755)
    environment = {"ANSIBLE_INJECT_FACT_VARS": "True", "PATH": f"{programs}:{SEARCH_PATH}"}
    site = dataclasses.replace(pair.site, ssh=None, environment=environment)
    variables = request.body(spec)["extra_vars"]
    # It runs in AWX's checkout of this repository.
    start, bounded, rest = variables["ansible_ssh_args"].partition(request._BOUNDED_SSH)
    variables["ansible_ssh_args"] = f"{start}{ROOT}/{bounded}{rest}"
    return site, dataclasses.replace(spec, variables=variables)


def _own(pair: Pair, machine: Machine, run_id: str) -> tuple[Site, RunSpec]:
    return pair.site, pair.spec(machine, run_id)


WAYS = pytest.mark.parametrize("way", [_runner, _by_hand, _awx])


@WAYS
def test_no_answer_changes_how_the_next_task_reaches_its_node(pair: Pair, way: Way) -> None:
    """Every variable of the connection plugin at once; B's connection is open all the time."""
    honest = _evidence(way(pair, pair.b, "run-b"))
    assert honest["answers"] == ["pong"] * 3 and pair.commands(pair.b) == 3
    (theirs,) = _sockets(pair)
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


@pytest.mark.covers("P6")
@WAYS
def test_no_answer_puts_another_node_behind_the_path_of_a_connection(pair: Pair, way: Way) -> None:
    way(pair, pair.b, "run-b")
    (theirs,) = _sockets(pair)
    _close(theirs)
    pair.answer({"ansible_facts": {"ansible_control_path": str(theirs)}})
    way(pair, pair.a, "run-a")

    evidence = _evidence(way(pair, pair.b, "run-b2"))

    assert evidence["answers"] == ["pong"] * 3
    assert (pair.commands(pair.a), pair.commands(pair.b)) == (3, 6)


@pytest.mark.covers("P6")
def test_no_host_key_is_trusted_at_its_first_use(pair: Pair, boot: Boot) -> None:
    """Certified as the node by another authority, and by ours as another node."""
    trusted = pair.folder / "trust" / "known_hosts"
    before = trusted.read_text()
    operator = (pair.folder / "trust" / "operator.pub").read_text().strip()
    authority = ca.open_trust(pair.folder / "other")
    false = boot(
        "false", login=operator, certify=lambda key: ca.certify_host(authority, key, "node-a")
    )
    for run_id, port in (("run-false", false.port), ("run-other", pair.b.port)):
        spec = pair.spec(pair.a, run_id)
        spec = dataclasses.replace(spec, node=dataclasses.replace(spec.node, port=port))
        outcome = pair.run(pair.site, spec)
        assert (outcome.unreachable, outcome.touched, outcome.result) == (True, False, None)
        assert "Host key verification failed" in outcome.problem
    assert pair.commands(pair.b) == 0
    assert trusted.read_text() == before


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


ENDLESS = """
import time
sys.stdin.buffer.read()
{stream}.write({start!r})
while True:
    {stream}.write({text!r} * {times})
    {stream}.flush()
    time.sleep({pause})
"""


@pytest.mark.covers("I12")
@pytest.mark.parametrize(
    ("placed", "stream", "start"),
    [
        (_own, "sys.stdout", '{"ping": "'),
        (_own, "sys.stdout", ""),
        (_own, "sys.stderr", ""),
        (_job, "sys.stdout", '{"ping": "'),
        (_job, "sys.stderr", ""),
    ],
)
def test_an_endless_answer_is_cut_off_before_it_is_held(
    pair: Pair, placed: Placed, stream: str, start: str
) -> None:
    endless = ENDLESS.format(stream=stream, start=start, text="a-\x1b[K", times=100_000, pause=0)
    (pair.a.folder / "answer.py").write_text(endless)
    outcome, peaks = _watch(*placed(pair, pair.a, "run-a"))
    assert (outcome.status, outcome.touched, outcome.unreachable) == ("failed", True, False)
    assert max(peaks) < 160
    assert "answer_too_large" in collect.output(pair.folder / "runs" / "run-a")


@pytest.mark.covers("I12")
def test_what_a_run_leaves_on_the_disk_is_bounded(pair: Pair) -> None:
    pair.answer({"failed": True, "msg": "x" * 4_000_000, "warnings": ["y" * 500_000]})
    assert pair.run(pair.site, pair.spec(pair.a, "run-a")).status == "failed"
    files = [path for path in (pair.folder / "runs" / "run-a").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2 << 20


@pytest.mark.covers("I12")
def test_a_slow_endless_answer_ends_with_the_deadline(pair: Pair) -> None:
    endless = ENDLESS.format(stream="sys.stdout", start="", text="x", times=1, pause=0.1)
    (pair.a.folder / "answer.py").write_text(endless)
    limits = set()
    run_dir = launch(pair.site, dataclasses.replace(pair.spec(pair.a, "run-a"), deadline_s=6))
    while (state := collect.observe(run_dir)).phase is Phase.ALIVE:
        limits |= {_data_limit(pid) for pid in lock.processes(run_dir)}
        time.sleep(0.1)
    assert state.outcome.status == "timeout"
    assert limits - {""} == {str(320 * 1024 * 1024)}, "each process of a run has a limit"


@pytest.mark.covers("I12")
@pytest.mark.parametrize("stream", ["sys.stdout", "sys.stderr"])
def test_an_endless_answer_to_the_question_whether_a_host_lives_is_not_held(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """The service asks it by itself, and the time of a host that refuses its certificate."""
    endless = f"while True: {stream}.write('x' * 1_000_000)"
    (pair.a.folder / "answer.py").write_text(endless)
    monkeypatch.setattr(ssh, "_PROBE_LIMIT_S", 20)
    assert pair.site.ssh is not None
    tracemalloc.start()
    try:
        answer = ssh.probe(pair.site.ssh, pair.access(pair.a))
        held = tracemalloc.get_traced_memory()[1]
        at = ssh.read_clock(pair.site.ssh, pair.access(pair.a), 20)
    finally:
        tracemalloc.stop()
    assert "answer_too_large" in answer
    assert at is None
    assert held < 20 << 20


@pytest.mark.parametrize("placed", [_own, _job])
def test_no_answer_forges_an_event_or_an_escape_sequence(pair: Pair, placed: Placed) -> None:
    event = {"uuid": "1", "event": "playbook_on_task_start", "event_data": {"task": "forged"}}
    forged = f"\x1b[K{base64.b64encode(json.dumps(event).encode()).decode()}\x1b[9D\x1b[K"
    pair.answer({"warnings": [forged, "\x1b[2J"], "msg": forged, "deprecations": [{"msg": forged}]})
    outcome = pair.run(*placed(pair, pair.a, "run-a"))
    assert outcome.ok
    run_dir = pair.folder / "runs" / "run-a"
    assert "\x1b" not in collect.output(run_dir)
    assert "\u241b[K" in collect.output(run_dir)
    tasks = {line["task"] for line in collect.progress(run_dir)[0]}
    assert len(tasks) == 4 and "forged" not in tasks
    text = json.dumps({"failed": True, "msg": forged}) + forged
    answer = f"sys.stderr.write({text!r})\nsys.exit(255)"
    (pair.a.folder / "answer.py").write_text(answer)
    pair.run(*placed(pair, pair.a, "run-a2"))
    assert "\x1b" not in collect.output(pair.folder / "runs" / "run-a2")
    assert "forged" not in (pair.folder / "runs" / "run-a2" / "progress.jsonl").read_text()


def test_no_answer_is_a_template_whatever_it_calls_itself(pair: Pair) -> None:
    tags = [{"__ansible_type": "TrustedAsTemplate"}]
    word = {"__ansible_type": "_AnsibleTaggedStr", "value": "{{ 7 * 7 }}", "tags": tags}
    for number, ping in enumerate(("{{ 7 * 7 }}", word)):
        pair.answer({"ping": ping})
        outcome = pair.run(pair.site, pair.spec(pair.a, f"run-{number}"))
        assert "49" not in json.dumps(outcome.result and outcome.result["evidence"]["answers"])


def _watch(site: Site, spec: RunSpec) -> tuple[Outcome, list[int]]:
    """The outcome of a run, and the most memory of each of its processes in MiB."""
    peaks: dict[int, int] = {}
    run_dir = launch(site, spec)
    while (state := collect.observe(run_dir)).phase is Phase.ALIVE:
        for pid in lock.processes(run_dir):
            peaks[pid] = max(peaks.get(pid, 0), _peak_mib(pid))
        time.sleep(0.1)
    assert state.outcome is not None
    return state.outcome, list(peaks.values())


def _peak_mib(pid: int) -> int:
    return sum(int(words[1]) for words in _lines(pid, "status") if words[0] == "VmHWM:") // 1024


def _data_limit(pid: int) -> str:
    return "".join(
        words[4] for words in _lines(pid, "limits") if words[:3] == ["Max", "data", "size"]
    )


def _lines(pid: int, name: str) -> list[list[str]]:
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return []
    return [line.split() for line in lines if line.strip()]


def test_a_job_of_awx_leaves_no_variable_of_the_connection_to_a_host() -> None:
    """Ansible removes some variables from facts; the launch request gives each of the others."""
    facts = dict.fromkeys(VARIABLES, "hostile")
    left = set(clean_facts(facts))
    spec = RunSpec("run-1", "discover", NodeAccess("node-1", "192.0.2.7"), {}, 60, "c-1")
    given = request.body(spec)["extra_vars"]
    assert "ControlPath=" in given["ansible_ssh_args"]
    assert not left - set(given)
    # A job reads this file of AWX's project. Other facts would replace variables of the run.
    project = ConfigManager(conf_file=str(ROOT / "ansible.cfg"))
    assert project.get_config_value("INJECT_FACTS_AS_VARS") is False


def _evidence(outcome: Outcome) -> dict[str, Any]:
    assert outcome.ok and outcome.result is not None, outcome
    return dict(outcome.result["evidence"])
