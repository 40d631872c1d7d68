"""The sockets of the API and of the operators' listener, which is on loopback only."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from reconciler.service import listeners
from reconciler.settings import PROJECT, Settings
from tests.bench.fleet.service import free_port
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.service.service import alive, serving, until


@pytest.mark.covers("CTRL-1")
def test_no_answer_waits_for_an_acknowledgement() -> None:
    """Nagle's algorithm would hold each answer's body back for 40 ms."""
    with (
        listeners.api_sockets(Settings(listen="127.0.0.1:0")) as (taken,),
        socket.create_connection(taken.getsockname()[:2]),
    ):
        accepted, _ = taken.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.slow
@pytest.mark.covers("CTRL-13")
def test_make_run_ends_with_an_address_and_a_login_that_works(tmp_path: Path) -> None:
    target = re.search(r"^run:.*\n\t@\$\(GPUAAS\) (.*)$", (PROJECT / "Makefile").read_text(), re.M)
    assert target
    words = [str(Path(sys.executable).with_name("gpuaas")), *target[1].split()]
    environment = {"GPUAAS_STATE_DIR": str(tmp_path), "GPUAAS_LISTEN": "127.0.0.1:0"}
    process = subprocess.Popen(
        words,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "log in with " in line:
                break
        # A line of the log may come between the two.
        shown = "".join(lines)
        address = re.search(r"console on (http://127\.0\.0\.1:\d+)/console$", shown, re.M)
        token = re.search(r"log in with (gpuaas_[\w-]{43})$", lines[-1].rstrip())
        assert address and token, lines
        with httpx.Client(base_url=address[1], timeout=120, trust_env=False) as browser:
            until(lambda: browser.get("/readyz").is_success)
            form = {"token": token[1]}
            entered = browser.post("/console/login", data=form, headers={"Origin": address[1]})
            assert entered.status_code == 303
            first = browser.get("/console/", follow_redirects=True)
            assert (first.status_code, first.url.path) == (200, "/console/fleet")
    finally:
        # Without the lines of an orderly end.
        process.kill()
        rest = process.communicate(timeout=60)[0]
    assert [line for line in rest.splitlines() if " gpuaas.api.request " not in line] == []


@pytest.mark.covers("CTRL-10")
def test_the_operators_listener_lives_and_ends_with_the_service(selling: Stack) -> None:
    listen = f"127.0.0.1:{free_port()}"
    with serving(selling.settings.state_dir, GPUAAS_OPERATOR_LISTEN=listen) as service:
        pid = service.start()
        until(service.ready)
        with httpx.Client(base_url=f"http://{listen}", trust_env=False, timeout=60) as local:
            whole = local.get("/health").json()
            assert whole["processes"] == {"api": 1, "worker": 1, "loops": 1}
            assert local.get("/status/leader").json()["pid"] == pid
            assert local.get("/metrics").status_code == 200
        # The same routes want a token where others can ask.
        for route in ("/health", "/status/leader", "/metrics"):
            answer = httpx.get(f"{service.url}{route}", trust_env=False, timeout=60)
            assert answer.status_code == 401
        os.kill(pid, signal.SIGTERM)
        until(lambda: not alive(pid))
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://{listen}/healthz", trust_env=False)
        assert "Traceback" not in service.log()
