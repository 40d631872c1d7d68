"""Whole runs: launched, watched, ended, killed. Each costs a few seconds of real Ansible."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from reconciler.runs import collect, lock
from reconciler.runs.collect import Phase, is_untouched
from reconciler.runs.launch import Site, launch
from reconciler.runs.paths import RunPaths, read_json
from reconciler.runs.spec import NodeAccess, RunError, RunSpec, SpecError
from tests.unit.reconciler.service.service import until

LIMIT_S = 45
MakeSpec = Callable[..., RunSpec]


@pytest.mark.covers("CTRL-9", "P1", "P2")
def test_a_result_comes_back_and_nothing_in_it_was_run(
    site: Site, spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    word = f"{{{{ lookup('pipe', 'touch {canary}') }}}} 'é' \n 😀"
    monkeypatch.setenv("GPUAAS_SECRET", "planted-secret")
    run_dir = launch(site, spec("run_ok", word=word))
    assert collect.observe(run_dir).phase is Phase.ALIVE
    with pytest.raises(RunError, match="run_not_over"):
        collect.discard(run_dir)

    outcome = collect.wait(run_dir, LIMIT_S).outcome

    assert outcome.ok, outcome
    assert outcome.result["evidence"] == {"word": word, "words": [word], "number": 7}
    assert not canary.exists()
    lines, offset = collect.progress(run_dir)
    assert [(line["event"], line["task"]) for line in lines] == [
        ("started", "Show what came in"),
        ("ok", "Show what came in"),
        ("started", "Say how it ended"),
        ("ok", "Say how it ended"),
    ]
    assert collect.progress(run_dir, offset) == ([], offset)
    assert "Show what came in" in collect.output(run_dir)
    _nothing_kept(run_dir, "planted-secret")
    collect.discard(run_dir)
    assert collect.observe(run_dir).phase is Phase.ABSENT


def _nothing_kept(run_dir: Path, secret: str) -> None:
    paths = RunPaths(run_dir)
    assert not paths.env.exists()
    assert paths.log.read_text() == ""
    for path in run_dir.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
        if path.is_file():
            assert secret not in path.read_text()


def test_a_refusal_comes_back_with_its_code(site: Site, spec: MakeSpec) -> None:
    outcome = collect.wait(launch(site, spec("run_refused")), LIMIT_S).outcome
    assert outcome is not None and not outcome.ok
    assert (outcome.status, outcome.problem, outcome.unreachable) == ("failed", "", False)
    assert outcome.result["error"]["code"] == "stale_fence"


def test_an_unreachable_node(site: Site, spec: MakeSpec) -> None:
    """SSH uses the address, because the name from MAAS may not resolve."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        node = NodeAccess("j27u15", "127.0.0.1", nobody.getsockname()[1])
        remote = dataclasses.replace(spec("run_remote"), node=node)
        outcome = collect.wait(launch(site, remote), LIMIT_S).outcome
    assert (outcome.status, outcome.result) == ("failed", None)
    assert outcome.unreachable
    assert outcome.problem.startswith("unreachable: ") and "Connection refused" in outcome.problem
    assert f"connect to host 127.0.0.1 port {node.port}" in outcome.problem
    assert is_untouched(outcome)


def test_ssh_that_ends_while_a_module_is_sent_still_says_why(
    site: Site, spec: MakeSpec, tmp_path: Path
) -> None:
    """Ansible then tells of its own broken pipe; whether the host was silent must not be lost."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\nexec 0<&-\nsleep 1\n"
        "echo 'ssh: connect to host 192.0.2.1 port 22: Connection refused' >&2\nexit 255\n"
    )
    ssh.chmod(0o755)
    environment = {"ANSIBLE_SSH_EXECUTABLE": str(ssh), "ANSIBLE_SSH_RETRIES": "0"}
    node = NodeAccess("node-1", "192.0.2.1")
    remote = dataclasses.replace(spec("run_large"), node=node)
    outcome = collect.wait(
        launch(dataclasses.replace(site, environment=environment), remote), LIMIT_S
    ).outcome
    assert outcome.unreachable
    assert "Broken pipe" not in outcome.problem and "Connection refused" in outcome.problem
    assert is_untouched(outcome)


@pytest.mark.covers("I12")
def test_the_deadline_ends_a_run_and_all_it_started(
    site: Site, spec: MakeSpec, tmp_path: Path
) -> None:
    run_dir = launch(site, spec("run_slow", deadline_s=4, began=str(tmp_path / "began")))
    outcome = collect.wait(run_dir, LIMIT_S).outcome
    assert (outcome.status, outcome.result) == ("timeout", None)
    _nothing_runs(run_dir)


@pytest.mark.covers("CTRL-8", "CTRL-9")
def test_launched_at_once_from_many_sides_it_runs_once_and_can_be_canceled(
    site: Site, spec: MakeSpec, tmp_path: Path
) -> None:
    began = tmp_path / "began"
    slow = spec("run_slow", began=str(began))
    threads = [threading.Thread(target=launch, args=(site, slow)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run_dir = launch(site, slow)
    until(began.exists)
    with pytest.raises(SpecError, match="run_id_reused"):
        launch(site, spec("run_slow", began="elsewhere"))

    collect.cancel(run_dir)

    outcome = collect.wait(run_dir, LIMIT_S).outcome
    assert outcome.status == "canceled"
    _nothing_runs(run_dir)
    assert began.read_text() == "began\n"
    assert launch(site, slow) == run_dir, "a run that is over is not started again"
    assert collect.observe(run_dir).phase is Phase.FINISHED


@pytest.mark.covers("CTRL-9", "I13")
def test_a_killed_process_is_lost_and_ends_with_all_it_started(
    site: Site, spec: MakeSpec, tmp_path: Path
) -> None:
    began = tmp_path / "began"
    run_dir = launch(site, spec("run_slow", began=str(began)))
    until(began.exists)
    os.kill(_pid(run_dir), signal.SIGKILL)
    until(lambda: collect.observe(run_dir).phase is not Phase.ALIVE)

    state = collect.observe(run_dir)

    assert state.phase is Phase.LOST
    assert (state.outcome.status, state.outcome.result) == ("lost", None)
    assert list(lock.processes(run_dir)) == []
    launch(site, spec("run_slow", began=str(began)))
    assert collect.observe(run_dir).phase is Phase.LOST, "nobody knows what it did: never again"
    assert not RunPaths(run_dir).variables.exists()


@pytest.mark.covers("CTRL-9")
def test_it_outlives_the_one_who_launched_it(site: Site, spec: MakeSpec, tmp_path: Path) -> None:
    began = tmp_path / "began"
    code = f"""
import os
from pathlib import Path
from reconciler.runs.launch import Site, launch
from reconciler.runs.spec import NodeAccess, RunSpec
site = Site(Path({str(tmp_path)!r}), Path({str(site.collections_path)!r}), None,
            Path({str(site.playbooks)!r}))
launch(site, RunSpec("run-1", "run_slow", NodeAccess("node-1", "localhost"),
                     {{"began": {str(began)!r}}}, 60, "corr-1"))
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=LIMIT_S)
    assert done.returncode == -signal.SIGKILL
    run_dir = launch(site, spec("run_slow", began=str(began)))
    until(began.exists)
    assert collect.observe(run_dir).phase is Phase.ALIVE
    os.kill(_pid(run_dir), signal.SIGTERM)
    outcome = collect.wait(run_dir, LIMIT_S).outcome
    assert outcome.status == "canceled"
    assert began.read_text() == "began\n"


@pytest.mark.covers("CTRL-8")
def test_canceled_before_it_began_it_never_begins(
    site: Site, spec: MakeSpec, tmp_path: Path
) -> None:
    run_dir = tmp_path / "runs" / "run-1"
    run_dir.mkdir(parents=True, mode=0o700)
    collect.cancel(run_dir)
    launch(site, spec("run_ok", word=""))
    outcome = collect.wait(run_dir, LIMIT_S).outcome
    assert (outcome.status, outcome.problem) == ("canceled", "never_began")


def test_the_process_of_a_run_loads_neither_http_client_nor_settings() -> None:
    """Both take longer to load than all the rest, and each run would wait for them."""
    names = "('httpx', 'reconciler.settings')"
    code = f"import sys, reconciler.runs.process; print([n for n in {names} if n in sys.modules])"
    words = [sys.executable, "-P", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert done.stdout == "[]\n"


def test_a_process_that_cannot_be_read_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_PROC", tmp_path)
    (tmp_path / "12").mkdir()
    assert list(lock.processes(tmp_path)) == []
    (tmp_path / "12/environ").symlink_to("environ")
    with pytest.raises(OSError, match="symbolic links"):
        list(lock.processes(tmp_path))


def test_a_process_that_begins_a_program_is_not_missed(tmp_path: Path) -> None:
    """The kernel shows it without variables for that moment, as it shows its own threads."""
    environment = {**os.environ, lock.MARK: str(tmp_path)}
    for _ in range(50):
        with subprocess.Popen(["sleep", "600"], env=environment) as process:
            try:
                assert list(lock.processes(tmp_path)) == [process.pid]
            finally:
                process.kill()


def _nothing_runs(run_dir: Path) -> None:
    """The process itself takes a moment to go after its last word."""
    until(lambda: not lock.held(RunPaths(run_dir).lock))
    until(lambda: not list(lock.processes(run_dir)))


def _pid(run_dir: Path) -> int:
    began = read_json(RunPaths(run_dir).process)
    return int(began["pid"])
