"""The operators' listener of a real process: there while the service is, and only on loopback."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from tests.bench.fleet.service import free_port
from tests.unit.reconciler.api.stack import Stack
from tests.unit.reconciler.service.service import alive, serving, until

pytestmark = pytest.mark.covers("CTRL-10")


def test_it_lives_and_ends_with_the_service(selling: Stack) -> None:
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
