"""Real captures of this machine, a stand-in for ssh, and machines that send false captures."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reconciler.benchmark import document
from reconciler.benchmark.capture import capture, program, sources
from reconciler.benchmark.harness.probe import Request
from reconciler.benchmark.target import Target, command
from reconciler.model.errors import Problem
from reconciler.runs.ssh import SshAccess
from tests.unit.reconciler.service.service import until

pytestmark = pytest.mark.covers("HOST-12")

TINY = Request(
    label='it\'s "here" $(id) </script>',
    kind="host",
    cpu_steps=20_000,
    memory_bytes=1 << 20,
    repetitions=3,
    seconds=1,
)
HOST = Target(host="10.100.0.10", user="gpuuser")

Tool = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A capture of this machine; the fio target does not exist."""
    folder = tmp_path_factory.mktemp("capture")
    progress: list[str] = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        request = dataclasses.replace(TINY, fio_target=str(folder / "none"))
        result = capture(Target(), request, progress.append)
    finally:
        os.chdir(before)
    assert list(folder.iterdir()) == [], "the capture leaves no files"
    assert progress[:2] == ["cpu: at most 120 s", "cpu: ok"]
    return result


def test_this_machine_is_measured(real: dict[str, Any]) -> None:
    probes = {each["probe"]: each for each in real["probes"]}
    for name, metrics in (("cpu", 3), ("memory", 2)):
        assert probes[name]["status"] == "ok", probes[name]["reason"]
        assert len(probes[name]["metrics"]) == metrics
        assert all(len(each["samples"]) == 3 for each in probes[name]["metrics"])
    shared = probes["cpu"]["metrics"][2]
    assert shared["workers"] == real["vcpus"] == len(os.sched_getaffinity(0))
    assert probes["cpu"]["tool"] == {"name": "cpython", "version": sys.version.split()[0]}
    assert real["host"]["kernel"] == os.uname().release
    assert real["label"] == TINY.label, "a label is never code"


def test_probes_without_figures_give_their_reason(real: dict[str, Any]) -> None:
    probes = {each["probe"]: each for each in real["probes"]}
    assert probes["rdma"]["reason"]["code"] == "not_requested"
    assert probes["disk"]["reason"]["code"] in ("tool_missing", "target_missing")
    for name in ("disk", "rdma"):
        assert (probes[name]["status"], probes[name]["metrics"]) != ("ok", [])
        assert probes[name]["metrics"] == []


def test_a_label_must_fit_the_machine() -> None:
    wrong = dataclasses.replace(TINY, vcpus=4096)
    with pytest.raises(Problem) as caught:
        capture(Target(), wrong, lambda _line: None)
    assert caught.value.code == "vcpus_differ"
    assert str(len(os.sched_getaffinity(0))) in caught.value.found


def test_the_harness_is_standard_library_and_old_python() -> None:
    for name, source in sources().items():
        tree = ast.parse(source, name, feature_version=(3, 8))
        imported = {
            node.module.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
        } | {
            alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert imported <= sys.stdlib_module_names | {"reconciler"}, name


def test_over_ssh_it_comes_by_standard_input(tool: Tool) -> None:
    arguments = tool("ssh", 'for last; do :; done; exec sh -c "$last"')
    result = capture(HOST, TINY, lambda _line: None)
    assert (result["label"], result["probes"][0]["status"]) == (TINY.label, "ok")
    words = arguments.read_text().splitlines()
    assert words[-4:] == ["gpuuser", "--", "10.100.0.10", "python3 -I -B -"]
    assert "StrictHostKeyChecking=yes" in words


def _effective(target: Target) -> dict[str, str]:
    """Settings of the real ssh client for this command."""
    text = subprocess.run(
        ["ssh", "-G", *command(target)[1:]], capture_output=True, text=True, check=True
    ).stdout
    return dict(line.split(" ", 1) for line in text.splitlines() if " " in line)


def test_no_configuration_makes_it_trust_an_unknown_host(tmp_path: Path) -> None:
    lax = tmp_path / "config"
    lax.write_text("Host *\nStrictHostKeyChecking no\nForwardAgent yes\nProxyJump j22u15\n")
    settings = _effective(dataclasses.replace(HOST, config=lax, key=tmp_path / "a key"))
    assert settings["stricthostkeychecking"] == "true"
    assert (settings["batchmode"], settings["forwardagent"]) == ("yes", "no")
    assert settings["proxyjump"] == "j22u15", "the operator's route stays"
    assert settings["identityfile"] == str(tmp_path / "a key")


def test_an_enrolled_node_needs_its_certificate(tmp_path: Path) -> None:
    access = SshAccess(tmp_path / "key", tmp_path / "cert", tmp_path / "hosts")
    settings = _effective(dataclasses.replace(HOST, access=access, alias="node-1"))
    assert settings["stricthostkeychecking"] == "true"
    assert settings["hostkeyalias"] == "node-1"
    assert settings["userknownhostsfile"] == str(tmp_path / "hosts")


def test_sudo_needs_no_terminal() -> None:
    assert command(dataclasses.replace(HOST, sudo=True))[-1] == "sudo -n python3 -I -B -"
    assert command(Target(sudo=True))[:2] == ["sudo", "-n"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"host": "-oProxyCommand=id"}, "host_invalid"),
        ({"host": "a b"}, "host_invalid"),
        ({"user": "-l"}, "user_invalid"),
    ],
)
def test_a_name_is_never_an_option(change: dict[str, str], code: str) -> None:
    with pytest.raises(Problem, match=code):
        command(dataclasses.replace(HOST, **change))


def test_a_host_that_does_not_answer() -> None:
    with pytest.raises(Problem) as caught:
        capture(Target(host="127.0.0.1", port=9), TINY, lambda _line: None)
    assert caught.value.code == "target_unreachable"
    assert "refused" in caught.value.found


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("echo no python3 >&2; exit 127", "harness_failed"),
        ("echo '[]'", "capture_invalid"),
        ("echo '{\"schema\": NaN}'", "NaN is not a figure"),
        ('echo \'{"schema": 1, "workload": 1e999}\'', "1e999 is not a figure"),
        ("echo '{\"schema\": 1}'", "capture_invalid"),
        ("yes '['", "capture_invalid"),
        ('echo \'{"refusal": {"code": "vcpus_differ"}}\'; exit 3', "vcpus_differ"),
        ('echo \'{"refusal": {"code": "[2J written"}}\'; exit 3', "^refused:"),
    ],
)
def test_invalid_answers_are_refused(tool: Tool, answer: str, code: str) -> None:
    tool("ssh", answer)
    with pytest.raises(Problem, match=code):
        capture(HOST, TINY, lambda _line: None)


def test_a_capture_must_match_its_request(tool: Tool, real: dict[str, Any], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    request = dataclasses.replace(TINY, vcpus=real["vcpus"])
    digest = {"digest": f"sha256:{'0' * 64}", "python": "3"}
    for change in ({"kind": "vm"}, {"harness": digest}, {"vcpus": real["vcpus"] + 1}):
        other.write_text(json.dumps(real | change))
        tool("ssh", f"cat '{other}'")
        with pytest.raises(Problem, match="capture_invalid"):
            capture(HOST, request, lambda _line: None)


def test_time_runs_out(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reconciler.benchmark.capture.longest_s", lambda _request: 0.2)
    monkeypatch.setattr("reconciler.benchmark.capture._SLACK_S", 0)
    tool("ssh", "exec sleep 30")
    with pytest.raises(Problem, match="capture_timeout"):
        capture(HOST, TINY, lambda _line: None)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.parametrize("way", ["signal", "pipe", "socket"])
def test_a_capture_that_is_called_off_leaves_no_process(tmp_path: Path, way: str) -> None:
    """sshd closes the output of its commands, a pipe or a socket, and sends them no signal."""
    file = tmp_path / "program"
    file.write_text(program(dataclasses.replace(TINY, cpu_steps=10**9)))
    if way == "socket":
        ours, theirs = (end.detach() for end in socket.socketpair())
    else:
        ours, theirs = os.pipe()
    with (
        file.open() as text,
        subprocess.Popen(
            [sys.executable, "-I", "-B", "-"],
            stdin=text,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
        ) as process,
    ):
        os.close(theirs)

        def probes() -> list[int]:
            """A probe and its workers, when all are there."""
            tree = _children(process.pid)
            tree += [worker for probe in tree for worker in _children(probe)]
            return tree if len(tree) == 1 + len(os.sched_getaffinity(0)) else []

        tree = until(probes)
        if way == "signal":
            process.terminate()
        else:
            os.close(ours)
        assert process.wait(timeout=60) == 1
    if way == "signal":
        os.close(ours)
    # Their new parent reaps them.
    until(lambda: not any(_alive(pid) for pid in tree))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_file_is_whole_or_refused(real: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "a.json"
    document.save(real, file)
    assert document.load(file) == real
    file.write_text(file.read_text()[:-20])
    for path in (file, tmp_path / "none.json"):
        with pytest.raises(Problem) as caught:
            document.load(path)
        assert caught.value.code in ("capture_invalid", "file_invalid")
    with pytest.raises(Problem):
        document.save(real, file / "below a file")
