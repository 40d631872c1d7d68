"""Workers of a pool in a booted slice: their image, a job's answer, and the end of their token.

Plays on the host that test_upkeep.py left: two slots, bound and available. The guest
reaches the service by https, through a proxy whose authority its tenant's cloud-config trusts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import yaml

from lab import slice_image
from lab.demo import slice_steps
from lab.demo.stage import Stage
from lab.distro import this_distro
from lab.paths import REPOSITORY
from reconciler.lifecycle import guest_pool
from tests.lab.conftest import Chapter
from tests.lab.proof import differences
from tests.standin.bmc import authority

T = TypeVar("T")
POOL = "lab"
# The guest has 768.
MEMORY_MIB = 400
# The worker's program starts in two layers of emulation.
LIMIT_S = 1800


@pytest.fixture
def certificate(stage: Stage, tmp_path: Path) -> Iterator[Path]:
    """Certificate of the proxy between the service and its hosts and guests."""
    assert stage.service is not None
    gateway = stage.host().gateway
    certificate, key = authority(tmp_path, "api", f"IP:{gateway}")
    words = [sys.executable, "-m", "tests.lab.tls_proxy", certificate, key, str(stage.service.port)]
    proxy = subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert proxy.stdout is not None
    port = int(proxy.stdout.readline())
    public, network = stage.service.environment["GPUAAS_PUBLIC_URL"], stage.profile()["network"]
    allowed = [*network["allowed_networks"], f"{gateway}/32"]
    # Its operator lets the host trust the authority, too; it loads images by the same links.
    file = "/usr/local/share/ca-certificates/lab-api.crt"
    script = f"cat > {file}; update-ca-certificates"
    stage.on_host("sh", "-c", f"'{script}'", stdin=certificate.read_text())
    _use_network(stage, {**network, "allowed_networks": allowed})
    # A launch with a pool reads the applied network settings from the newest parity report.
    assert stage.task(stage.path("/parity"))["failures"] == 0
    try:
        _serve_at(stage, f"https://{gateway}:{port}")
        yield certificate
    finally:
        _use_network(stage, network)
        _serve_at(stage, public)
        proxy.kill()
        proxy.communicate()
    stage.on_host("sh", "-c", f"'rm {file}; update-ca-certificates --fresh'")


def _use_network(stage: Stage, network: dict[str, Any]) -> None:
    """Change the profile's network, and the settings of the host, as the bootstrap does."""
    stage.use(network=network)
    names = ("bridge", "address", "subnet", "tmfifo", "egress_probe")
    arguments = {name: network[name] for name in (*names, "allowed_networks", "denied_networks")}
    done = stage.module("ovs_nat", arguments)
    assert not done["failed"], done


def _serve_at(stage: Stage, url: str) -> None:
    assert stage.service is not None
    stage.service.stop()
    stage.service.environment["GPUAAS_PUBLIC_URL"] = url
    stage.service.start()


@pytest.fixture
def image_id(stage: Stage) -> str:
    """The image with the workers' program, as the recipe builds it."""
    assert stage.service is not None
    folder = REPOSITORY / "build" / "images"
    built = slice_image.build("base", this_distro(), slice_image.Runtime(), folder, worker=True)
    words = built.register.split()[1:]
    registered = stage.service.cli("--output", "json", *words, "--compression", "zstd")
    return str(json.loads(registered)["id"])


@pytest.mark.covers("ORCH-1", "ORCH-3")
def test_a_pool_works_in_a_slice_from_its_launch_to_its_release(
    stage: Stage, story: Chapter, certificate: Path, image_id: str
) -> None:
    story.needs("prepared")
    stage.use(deadlines={**stage.profile()["deadlines"], "ready": 2700})
    wish = {"models": ["digits"], "memory_mib": MEMORY_MIB, "project_id": stage.facts["project"]}
    pool = stage.api().post("/pools", {"name": POOL, "target": "allocation", **wish})
    trust = {"ca_certs": {"trusted": [certificate.read_text()]}}
    user_data = f"#cloud-config\n{yaml.safe_dump(trust)}"
    slice_steps.provision(stage, image_id=image_id, worker_pool=POOL, user_data=user_data)

    def shown() -> dict[str, Any]:
        document: dict[str, Any] = stage.api().get(f"/pools/{pool['id']}")
        return document

    def serving() -> list[dict[str, Any]]:
        return [worker for worker in shown()["workers"] if worker["models"]]

    assert shown()["allocation_id"] == stage.facts["allocation"]["id"]
    (worker,) = _until(serving)
    # The guest's systemd runs it as a user of its own, limits its memory, and restarts it.
    main = int(_unit(stage, "MainPID"))
    assert worker["pid"] == main
    assert int(_unit(stage, "MemoryMax")) == MEMORY_MIB << 20
    owner = slice_steps.in_guest(stage, f"ps -o user= -p {main}").strip()
    assert owner not in ("root", slice_steps.USER)
    _answers(stage, [0, 1, 1, 0, 0, 0, 0], 1)
    slice_steps.in_guest(stage, f"sudo kill -9 {main}")
    _until(lambda: {each["pid"] for each in serving()} - {main})
    _answers(stage, [1, 1, 1, 0, 0, 0, 0], 7)

    secret = slice_steps.in_guest(stage, f"sudo cat {guest_pool.TOKEN}").strip()
    assert _opens(stage, secret)
    evidence = slice_steps.release(stage)
    assert (evidence["allocation"], evidence["slots"]) == ("released", ["available"])
    assert shown()["allocation_id"] is None
    assert not _opens(stage, secret)
    stage.api().post(f"/pools/{pool['id']}/stop")
    assert differences(stage) == set()


def _answers(stage: Stage, segments: list[int], digit: int) -> None:
    """A job of the tenant has this result, at its first attempt."""
    assert stage.member is not None
    member, path = stage.member, f"/projects/{stage.facts['project']}/jobs"
    job = member.post(path, {"model": "digits", "input": {"segments": [segments]}})

    def ended() -> dict[str, Any]:
        document: dict[str, Any] = member.get(f"{path}/{job['id']}")
        return {} if document["status"] in ("pending", "running") else document

    document = _until(ended)
    assert document["status"] == "done", document
    assert (document["result"]["digit"], document["attempts"]) == ([digit], 1)


def _opens(stage: Stage, secret: str) -> bool:
    """Whether a worker's token is accepted. The empty registration itself is refused."""
    assert stage.service is not None
    url = f"{stage.service.url}/api/v1/worker/register"
    answer = httpx.post(url, headers={"Authorization": f"Bearer {secret}"}, json={}, timeout=30)
    assert answer.status_code in (401, 422), answer.text
    return answer.status_code == 422


def _unit(stage: Stage, name: str) -> str:
    """A property of the worker's unit in the guest."""
    command = f"systemctl show --value -p {name} gpuaas-worker@1.service"
    return slice_steps.in_guest(stage, command).strip()


def _until(look: Callable[[], T]) -> T:
    """Wait until `look` returns a true value, and return it."""
    end = time.monotonic() + LIMIT_S
    while not (seen := look()):
        assert time.monotonic() < end, f"nothing in {LIMIT_S} s"
        time.sleep(2)
    return seen
