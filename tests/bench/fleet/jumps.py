"""Logins and transfers through the gateway and OpenSSH's jump host, for tests.bench.gateway."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from reconciler.gateway.sessions import Limits
from tests.bench import document
from tests.bench.gateway import OPTIONS
from tests.unit.reconciler.benchmark.sshd import USER
from tests.unit.reconciler.gateway.conftest import (
    MANY,
    World,
    boot,
    databases,
    records,
    selling,
    terminal,
    world,
)

__all__ = ["boot", "databases", "records", "selling", "terminal", "world"]
MIB = 1 << 20
_END_S = 600


@pytest.fixture
def limits() -> Limits:
    """Time limits of production, instead of the tests' short limits."""
    return Limits()


def test_gateway(world: World, tmp_path: Path) -> None:
    """Measure both sides in turns, and keep the figures."""
    options = json.loads(os.environ[OPTIONS])
    lines = {"ours": world.ssh(), "plain": plain(world), "peer": peer(world, tmp_path)}
    logins: dict[str, list[float]] = {side: [] for side in lines}
    rates: dict[str, list[float]] = {side: [] for side in lines}
    for line in lines.values():
        run([*line, "true"])
    for _ in range(options["logins"]):
        for side, line in lines.items():
            logins[side].append(run([*line, "true"])[0])
    for _ in range(options["transfers"]):
        for side, line in lines.items():
            size = options["mib"] * MIB
            rates[side].append(run([*line, f"head -c {size} /dev/zero"], size)[1])
    login = {side: statistics.median(values) for side, values in logins.items()}
    rate = {side: statistics.median(values) for side, values in rates.items()}
    figures: dict[str, Any] = {
        "login_ratio": round(login["ours"] / login["peer"], 3),
        "throughput_ratio": round(rate["ours"] / rate["peer"], 3),
        "plain_login_ratio": round(login["plain"] / login["peer"], 3),
        "plain_throughput_ratio": round(rate["plain"] / rate["peer"], 3),
        "logins": options["logins"],
        "transfers": options["transfers"],
        "mib": options["mib"],
    }
    for side in lines:
        figures[f"{side}_login_ms"] = round(login[side] * 1000, 1)
        figures[f"{side}_mib_s"] = round(rate[side], 1)
    document.add({"gateway": figures}, Path(options["output"]))


def plain(world: World) -> list[str]:
    """The command line of a client through the gateway, with an order of ciphers of its own."""
    config = world.config()
    plain_config = config.with_name("plain_config")
    plain_config.write_text(re.sub(r"(?m)^ *Ciphers .*\n", "", config.read_text()))
    return world.ssh(config=plain_config)


def peer(world: World, folder: Path) -> list[str]:
    """The command line of a client that jumps through OpenSSH's server."""
    login = world.key.with_name(f"{world.key.name}.pub").read_text().strip()
    jump = world.boot("jump", login=login, settings=MANY)
    hosts = folder / "peer_known_hosts"
    hosts.write_text(jump.known_hosts_line() + world.guest.known_hosts_line())
    common = (
        f"    HostName 127.0.0.1\n    User {USER}\n    IdentityFile {world.key}\n"
        f"    IdentitiesOnly yes\n    UserKnownHostsFile {hosts}\n    StrictHostKeyChecking yes\n"
    )
    config = folder / "peer_config"
    config.write_text(
        f"Host jump\n    Port {jump.port}\n{common}"
        f"Host guest\n    Port {world.guest.port}\n    ProxyJump jump\n{common}"
    )
    return world.ssh(config=config, host="guest")


def run(line: list[str], size: int = 0) -> tuple[float, float]:
    """Seconds of a command that prints so many bytes, and MiB/s behind the first of them."""
    began = time.perf_counter()
    with subprocess.Popen(line, stdout=subprocess.PIPE) as client:
        first = len(client.stdout.read(1))
        started, received = time.perf_counter(), first
        while part := client.stdout.read(MIB):
            received += len(part)
        ended = time.perf_counter()
        status = client.wait(_END_S)
    assert (status, received) == (0, size)
    return time.perf_counter() - began, (received - first) / MIB / (ended - started)
