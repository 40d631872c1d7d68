"""OpenStack Placement as the peer: gunicorn, a child provider per slot, the same PostgreSQL.

Its environment is under build/peers. A bench creates it if it is missing, and so does `python -m
tests.bench.fleet.openstack`. A claim there is two requests: candidates, then the allocation,
repeated when another client was quicker. It writes no task, no history and no audit row, so it is
the leaner side.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg

from tests.bench.fleet.service import free_port, wait
from tests.bench.fleet.wire import Wire, expect
from tests.postgresql import Server

HOME = Path(__file__).resolve().parents[3] / "build" / "peers" / "placement"
PACKAGES = ("openstack-placement==16.*", "gunicorn", "psycopg2-binary")
# A resource class that Placement has built in: a physical GPU.
CLASS = "PGPU"
WORKERS = 2
HEADERS = {"X-Auth-Token": "admin", "OpenStack-API-Version": "placement 1.39"}
# Candidates offered to a client. With a single candidate all clients would want the same slot.
OFFERED = 10


class NotInstalled(Exception):
    """The peer is missing and cannot be installed."""


def is_installed() -> bool:
    """Return whether its environment is completely installed."""
    words = [str(HOME / "bin" / "python"), "-c", "import gunicorn, placement, psycopg2"]
    with contextlib.suppress(OSError):
        return subprocess.run(words, check=False, capture_output=True).returncode == 0
    return False


def install() -> None:
    """Create the environment if it is missing."""
    if is_installed():
        return
    sys.stderr.write(f"installing OpenStack Placement in {HOME}\n")
    try:
        venv.create(HOME, with_pip=True, clear=True)
        pip = [str(HOME / "bin" / "pip"), "install", "--quiet", *PACKAGES]
        subprocess.run(pip, check=True, stderr=subprocess.PIPE, text=True)
    except (OSError, subprocess.CalledProcessError) as failure:
        output = getattr(failure, "stderr", "") or str(failure)
        raise NotInstalled(
            f"expected {' '.join(PACKAGES)} from the package index, to measure against; found: "
            f"{output.strip()[-500:]}. Run it where the index is reached, or without the peer: "
            "--no-peer"
        ) from failure


@contextlib.contextmanager
def serving(server: Server, database: str, nodes: int, slots: int) -> Iterator[str]:
    """Run Placement over a fleet of this size, in this empty database."""
    with tempfile.TemporaryDirectory(prefix="gpuaas-placement-") as name:
        folder = Path(name)
        url = f"postgresql+psycopg2://gpuaas@/{database}?host={server.folder}"
        (folder / "placement.conf").write_text(
            f"[api]\nauth_strategy = noauth2\n[placement_database]\nconnection = {url}\n"
            "[placement]\nrandomize_allocation_candidates = true\n"
        )
        environment = {**os.environ, "OS_PLACEMENT_CONFIG_DIR": str(folder)}
        manage = [str(HOME / "bin" / "placement-manage"), "--config-dir", name, "db", "sync"]
        subprocess.run(manage, check=True, env=environment, capture_output=True)
        port = free_port()
        words = [str(HOME / "bin" / "gunicorn"), "--workers", str(WORKERS)]
        words += ["--bind", f"127.0.0.1:{port}", "placement.wsgi.api:application"]
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
        try:
            address = f"http://127.0.0.1:{port}"
            wait(f"{address}/", process, log)
            # Its classes are in the database only after its first answer.
            httpx.get(f"{address}/resource_classes", headers=HEADERS, timeout=60).raise_for_status()
            _fleet(server, database, nodes, slots)
            yield address
        finally:
            process.terminate()
            process.wait(timeout=30)


def claim(address: str, client: int, claims: int) -> list[float]:
    """Claim as a single client; return the seconds of each claim."""
    times = []
    with Wire(address, HEADERS) as wire:
        for _ in range(claims):
            began = time.perf_counter()
            turn = client
            while not _try(wire, turn):
                turn += 1
            times.append(time.perf_counter() - began)
    return times


def _try(wire: Wire, turn: int) -> bool:
    answer = wire.ask("GET", f"/allocation_candidates?resources={CLASS}:1&limit={OFFERED}")
    offers = json.loads(expect(answer, 200))["allocation_requests"]
    body = {
        "allocations": offers[turn % len(offers)]["allocations"],
        "project_id": "bench",
        "user_id": "bench",
        "consumer_generation": None,
        "consumer_type": "INSTANCE",
    }
    done = wire.ask("PUT", f"/allocations/{uuid.uuid4()}", body)
    if done[0] == httpx.codes.CONFLICT:
        return False
    expect(done, 204)
    return True


def _fleet(server: Server, database: str, nodes: int, slots: int) -> None:
    """Write the fleet into the database, because its API would take longer than all the rest."""
    with psycopg.connect(host=str(server.folder), user="gpuaas", dbname=database) as conn:
        row = conn.execute("SELECT id FROM resource_classes WHERE name = %s", [CLASS]).fetchone()
        if row is None:
            raise RuntimeError(f"Placement does not know {CLASS}")
        provider = (
            "INSERT INTO resource_providers (id, uuid, name, generation, root_provider_id,"
            " parent_provider_id) VALUES (%s, %s, %s, 0, %s, %s)"
        )
        roots, children = [], []
        for number in range(nodes):
            root = 1 + number * (slots + 1)
            roots.append((root, str(uuid.uuid4()), f"node-{number}", root, None))
            for index in range(slots):
                name = f"node-{number}-{index}"
                children.append((root + 1 + index, str(uuid.uuid4()), name, root, root))
        inventory = (
            "INSERT INTO inventories (resource_provider_id, resource_class_id, total, reserved,"
            " min_unit, max_unit, step_size, allocation_ratio) VALUES (%s, %s, 1, 0, 1, 1, 1, 1.0)"
        )
        with conn.cursor() as cursor:
            cursor.executemany(provider, roots)
            cursor.executemany(provider, children)
            cursor.executemany(inventory, [(child[0], row[0]) for child in children])
        conn.commit()
        conn.autocommit = True
        conn.execute("VACUUM ANALYZE")


if __name__ == "__main__":
    try:
        install()
    except NotInstalled as problem:
        raise SystemExit(str(problem)) from problem
    sys.stdout.write(f"OpenStack Placement is in {HOME}\n")
