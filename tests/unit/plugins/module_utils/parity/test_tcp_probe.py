"""TCP probe: its verdict without a service, and with other data than its own."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _namespace, _tcp_probe

pytestmark = pytest.mark.covers("HOST-10")


def test_a_service_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def refuse() -> Iterator[int]:
        raise Refusal("namespace_refused", expected="a", found="no permission", remedy="c")
        yield

    monkeypatch.setattr(_namespace, "anonymous", refuse)
    with socket.socket() as client:
        text = _tcp_probe.problem(client)
    assert text.startswith("the probe's own service cannot be made: namespace_refused")


def test_an_answer_of_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_probe, "_receive", lambda _handle: b"HTTP/1.1 400 Bad Request")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        text = _tcp_probe._exchange(client, server)
    assert text.endswith("stops after 0 of 8 messages: other data arrives than was sent")
