"""Parity's probes without a kernel."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import (
    _dhcp_probe,
    _guest_probe,
    _namespace,
    _tcp_probe,
)


@contextlib.contextmanager
def nowhere(*_namespace: object) -> Iterator[int]:
    yield 0


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch, tree: Path) -> Path:
    """No namespace is entered, sockets are ordinary sockets, and TCP stops."""
    (tree / "run").mkdir(exist_ok=True)

    def plain(*_what: Any, **_how: Any) -> socket.socket:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    for name in ("named", "anonymous", "inside"):
        monkeypatch.setattr(_namespace, name, nowhere)
    monkeypatch.setattr(socket, "create_server", plain)
    monkeypatch.setattr(_guest_probe, "_egress_socket", plain)
    monkeypatch.setattr(_guest_probe, "_watch", plain)
    monkeypatch.setattr(_guest_probe, "_packet_socket", plain)
    monkeypatch.setattr(_guest_probe, "_forged", lambda *_a: ())
    monkeypatch.setattr(_guest_probe, "_sources", lambda _leaving, _target: ("192.0.2.1",))
    monkeypatch.setattr(_dhcp_probe, "open_socket", plain)
    monkeypatch.setattr(_dhcp_probe, "offered", lambda *_a, **_k: "10.100.0.254")
    monkeypatch.setattr(_guest_probe, "name_server_answers", lambda *_a: True)
    monkeypatch.setattr(_guest_probe, "reach", lambda *_a: 1.5)
    monkeypatch.setattr(_tcp_probe, "_exchange", lambda *_a: "stops")
    return tree
