"""Pools in slices: files of the guest, rights of the launch, and the end of the token."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from ansible_collections.gpuaas.slice.plugins.module_utils.network import _baseline_files
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _pool_workers

from reconciler.db import rows
from reconciler.db.engine import reading, transaction
from reconciler.db.schema import Allocation, Pool, PoolWorker, Slot, Task, metadata
from reconciler.lifecycle import guest_pool, host, slices
from reconciler.lifecycle import launch as launching
from reconciler.model.errors import Problem
from reconciler.model.hardware import NEVER, PRIVATE, Offer
from reconciler.model.states import TaskKind, TaskState
from reconciler.pools import pools, remote
from reconciler.profiles import profile_offers
from reconciler.records import images, leasing, nodes, queue
from reconciler.runs import contract
from reconciler.runs.awx import request
from reconciler.runs.spec import RunSpec
from reconciler.settings import Settings
from reconciler.work import worker
from reconciler.work.kinds import HANDLERS
from reconciler.work.loops import tend_remote_workers
from tests.unit.reconciler.conftest import ADMIN, Site, code
from tests.unit.reconciler.pools.conftest import Workers
from tests.unit.reconciler.service.service import forge, serving, until

pytestmark = pytest.mark.covers("ORCH-1", "ORCH-3")

PUBLIC = "https://gpu.example"


def started(site: Site, name: str = "g", **options: Any) -> Pool:
    wish = {"models": ["m"], "memory_mib": 256, "project_id": site.project, "target": "allocation"}
    with transaction(site.engine) as conn:
        return pools.start(conn, pools.NewPool(name, **(wish | options)), ADMIN, most=9)


def with_kit(site: Site) -> None:
    """Slices of the lab, with an image that contains the program."""
    fields = {"name": "kit", "version": "1", "digest": f"sha256:{'b' * 64}", "size_bytes": 1}
    with transaction(site.engine) as conn:
        nodes.change(conn, "n1", ADMIN, profile="lab")
        url = "https://images.invalid/kit.raw"
        image = images.register(conn, ADMIN, **fields, url=url, runtime=[guest_pool.KIT])
    site.image = image.id


def launch(site: Site, pool: str = "g", *, api: str = "8.8.8.8", node_id: str = "") -> str:
    offers = profile_offers(Settings().profiles_dir)
    with transaction(site.engine) as conn:
        wish = site.launch(worker_pool=pool, offers=offers, api=[api], node_id=node_id)
        return str(launching.allocate(conn, wish, ADMIN).id)


def reported(site: Site, node_id: str, networks: dict[str, list[str]], number: int = 0) -> None:
    """Parity passes; the host has applied these networks."""
    with transaction(site.engine) as conn:
        host.record_parity(conn, node_id, site.parity(number) | {"networks": networks}, ADMIN)


def leased(site: Site) -> Task:
    with transaction(site.engine) as conn:
        (task,) = leasing.lease(conn, "worker")
    return task


def prepared(site: Site, folder: Path, task: Task) -> RunSpec:
    settings = Settings(state_dir=folder, public_url=PUBLIC)
    handler = HANDLERS[TaskKind.SLICE_VM_PROVISION]
    return worker.prepare(site.engine, settings, handler, task, queue.run_id(task))


def written(spec: RunSpec) -> dict[str, str]:
    """Content by path of the guest's files."""
    files = spec.variables["slice_seed"]["user_data"]["write_files"]
    return {file["path"]: file["content"] for file in files}


def pool_of(site: Site, secret: str) -> Pool | None:
    with reading(site.engine) as conn:
        return remote.authenticate(conn, secret.strip())


@pytest.fixture
def site(on_either: Site) -> Site:
    with_kit(on_either)
    return on_either


def test_a_run_carries_a_token_of_its_own_that_no_record_has(site: Site, tmp_path: Path) -> None:
    pool = started(site, models=["b", "a"], replicas=2, grace_s=10)
    allocation_id = launch(site)
    task = leased(site)
    spec = prepared(site, tmp_path, task)
    contract.check_vars("provision_slice", spec.variables)
    assert not [mark for mark in request._TEMPLATE_MARKS if mark in str(written(spec))]
    secret = written(spec)[guest_pool.TOKEN]
    assert re.fullmatch(rf"{remote.PREFIX}[A-Za-z0-9_-]{{43}}\n", secret)
    row = pool_of(site, secret)
    assert row and (row.id, row.allocation_id) == (pool.id, allocation_id)
    assert row.token_expires_at is None
    with reading(site.engine) as conn:
        for table in metadata.sorted_tables:
            assert secret.strip() not in str(conn.execute(sa.select(table)).all()), table.name
    files = {f["path"]: f for f in spec.variables["slice_seed"]["user_data"]["write_files"]}
    assert files[guest_pool.TOKEN]["permissions"] == "0600"
    assert spec.variables["slice_seed"]["tenant_data"] == {}
    unit = files[guest_pool.UNIT]["content"]
    assert "MemoryMax=256M\n" in unit and "OOMPolicy=kill\n" in unit
    assert f"--api {PUBLIC} jobs worker" in unit and " --model a --model b " in unit
    *_, enable = spec.variables["slice_seed"]["user_data"]["runcmd"]
    assert enable[-2:] == ["gpuaas-worker@1.service", "gpuaas-worker@2.service"]
    # A reconciler that was killed before the run began prepares the same run again.
    assert prepared(site, tmp_path, task).fingerprint() == spec.fingerprint()
    with transaction(site.engine) as conn:
        assert code(remote.issue, conn, pool.id, ADMIN, 60) == "pool_without_token"


def test_another_run_has_another_token_and_the_one_before_ends(site: Site, tmp_path: Path) -> None:
    started(site)
    launch(site)
    task = leased(site)
    first = written(prepared(site, tmp_path, task))[guest_pool.TOKEN]
    with transaction(site.engine) as conn:
        queue.wait_for_host(conn, task.id, task.lease_token, "silent", act=ADMIN)
        conn.execute(sa.update(Task.TABLE).values(not_before=0.0))
    second = written(prepared(site, tmp_path, leased(site)))[guest_pool.TOKEN]
    assert pool_of(site, second) and pool_of(site, first) is None


def activated(conn: sa.Connection, id: str) -> None:
    slices.provision_started(conn, id, ADMIN)
    slices.provision_succeeded(conn, id, ADMIN, connection={"host": "gw"})


def fail(conn: sa.Connection, id: str) -> None:
    slices.provision_started(conn, id, ADMIN)
    slices.provision_failed(conn, id, ADMIN, step="slice_ready", error={"code": "x"})


def release(conn: sa.Connection, id: str) -> None:
    activated(conn, id)
    launching.release(conn, id, ADMIN)


def block(conn: sa.Connection, id: str) -> None:
    activated(conn, id)
    active = sa.select(Slot.TABLE).where(Slot.TABLE.c.status == "active")
    (slot,) = rows.every(conn, active, Slot)
    slices.block(conn, slot, id, ADMIN, step="drift", error={"code": "x"})


@pytest.mark.parametrize("end", [fail, release, block])
def test_the_token_ends_with_its_allocation(
    site: Site, tmp_path: Path, end: Callable[[sa.Connection, str], None]
) -> None:
    pool = started(site, replicas=2)
    allocation_id = launch(site)
    secret = written(prepared(site, tmp_path, leased(site)))[guest_pool.TOKEN]
    row = pool_of(site, secret)
    assert row
    with transaction(site.engine) as conn:
        member = remote.register(conn, row, host="liar", pid=7, models=["m"])
        assert member.host == allocation_id, "a guest is not believed where it is"
        end(conn, allocation_id)
        assert remote.authenticate(conn, secret.strip()) is None, "in the same transaction"
    tend_remote_workers(site.engine, Settings())
    with reading(site.engine) as conn:
        assert rows.get(conn, PoolWorker, member.id).ended_at
        left = rows.get(conn, Pool, pool.id)
        assert (left.state, left.allocation_id) == ("running", None), "for another launch"


def test_a_launch_that_is_withdrawn_gives_the_pool_back(site: Site) -> None:
    pool = started(site)
    allocation_id = launch(site)
    with transaction(site.engine) as conn:
        assert rows.get(conn, Pool, pool.id).allocation_id == allocation_id
        launching.release(conn, allocation_id, ADMIN)
        assert rows.get(conn, Pool, pool.id).allocation_id is None


def test_a_stop_ends_the_token_and_the_machine_goes_on(site: Site, tmp_path: Path) -> None:
    pool = started(site)
    allocation_id = launch(site)
    secret = written(prepared(site, tmp_path, leased(site)))[guest_pool.TOKEN]
    with transaction(site.engine) as conn:
        pools.stop(conn, pool.id, ADMIN)
    tend_remote_workers(site.engine, Settings())
    assert pool_of(site, secret) is None
    with transaction(site.engine) as conn:
        ended = rows.get(conn, Pool, pool.id)
        assert (ended.state, ended.allocation_id) == ("stopped", allocation_id)
        fail(conn, allocation_id)
        assert rows.get(conn, Pool, pool.id).allocation_id == allocation_id, "a record"


def test_a_pool_that_was_stopped_before_the_run_gets_no_token(site: Site, tmp_path: Path) -> None:
    pool = started(site)
    launch(site)
    with transaction(site.engine) as conn:
        pools.evict(conn, pool.id, ADMIN)
    assert guest_pool.TOKEN not in written(prepared(site, tmp_path, leased(site)))


def test_guests_reach_what_the_hosts_rules_let_through() -> None:
    assert (PRIVATE, NEVER) == (_baseline_files.PRIVATE, _baseline_files.NEVER)
    offer = Offer(allowed=("10.40.0.0/24",), denied=("8.8.0.0/16",))
    reached = ["10.40.0.7", "1.1.1.1"]
    refused = ["10.40.1.7", "127.0.0.1", "169.254.0.1", "8.8.8.8", "::1", "224.0.0.1"]
    assert [a for a in (*reached, *refused) if offer.reaches(a)] == reached


# In a network that the lab's profile allows.
NEAR, NETWORKS = "10.30.0.7", {"allowed_networks": ["10.30.0.0/24"], "denied_networks": []}


@pytest.mark.parametrize(
    "networks",
    [
        None,
        {**NETWORKS, "allowed_networks": []},
        {**NETWORKS, "denied_networks": ["10.30.0.0/28"]},
        {**NETWORKS, "allowed_networks": ["999.0.0.0/8", "10.30.0.1/24"]},
    ],
    ids=["unreported", "earlier", "denied", "nonsense"],
)
def test_a_host_without_the_networks_of_its_profile_gets_no_pool(
    site: Site, networks: dict[str, list[str]] | None
) -> None:
    started(site)
    if networks:
        reported(site, "n1", networks)
    with pytest.raises(Problem) as refused:
        launch(site, api=NEAR)
    assert (refused.value.code, refused.value.detail) == ("networks_not_applied", {"nodes": ["n1"]})
    # Another host that has them is taken instead.
    site.node("n2", number=1)
    with transaction(site.engine) as conn:
        nodes.change(conn, "n2", ADMIN, profile="lab")
    reported(site, "n2", NETWORKS, number=1)
    assert code(launch, site, api=NEAR, node_id="n1") == "networks_not_applied"
    allocation_id = launch(site, api=NEAR)
    with reading(site.engine) as conn:
        assert rows.get(conn, Allocation, allocation_id).node_id == "n2"


def test_a_pool_is_launched_once_its_host_has_applied_the_networks(site: Site) -> None:
    started(site)
    reported(site, "n1", NETWORKS)
    assert launch(site, api=NEAR)
    # Without room, hosts that lack them are not the reason.
    started(site, "h")
    reported(site, "n1", {**NETWORKS, "allowed_networks": []})
    with transaction(site.engine) as conn:
        site.allocate(conn)
    assert code(launch, site, "h", api=NEAR) == "no_capacity"


def test_guests_and_whole_machines_have_workers_at_the_same_paths() -> None:
    names = ("PROGRAM", "UNIT", "TOKEN", "MODELS")
    assert {name: getattr(guest_pool, name) for name in names} == {
        name: getattr(_pool_workers, name) for name in names
    }


def unit_of(pool: Pool, secret: str, url: str) -> str:
    token, unit = guest_pool.files(pool, secret, url)
    assert token["content"] == f"{secret}\n"
    return unit["content"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_takes_the_unit(sold: Site, tmp_path: Path) -> None:
    pool = started(sold, models=["digits", "m.x-1"])
    text = unit_of(pool, "secret", PUBLIC).replace(guest_pool.PROGRAM, "/bin/true")
    for name in ("gpuaas-worker@.service", "gpuaas-worker@1.service"):
        (tmp_path / name).write_text(text)
    command = ["systemd-analyze", "verify", str(tmp_path / "gpuaas-worker@1.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Known to systemd 254 and later.
    newer = r".*Unknown key (name )?'Restart(Steps|MaxDelaySec)' in section .Service.*"
    complaints = [line for line in done.stderr.splitlines() if not re.fullmatch(newer, line)]
    assert (done.returncode, complaints) == (0, [])


def test_a_guest_serves_its_pool_from_the_written_unit(workers: Workers, tmp_path: Path) -> None:
    """The unit's own command against a real service, until its allocation is released."""
    site = Site(workers.queue.engine)
    site.node()
    with_kit(site)
    started(site)
    started(site, "beside")
    allocation_id = launch(site)
    task = leased(site)
    files = written(prepared(site, tmp_path / "state", task))
    models = tmp_path / "models"
    models.mkdir()
    (models / "m.py").write_text("def run(call):\n    return {'twice': call['number'] * 2}\n")
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "token").write_text(files[guest_pool.TOKEN])
    (command,) = re.findall(r"^ExecStart=(.*)$", files[guest_pool.UNIT], re.MULTILINE)
    service_folder = tmp_path / "service"
    service_folder.mkdir()
    with serving(service_folder, **workers.environment) as service:
        service.start()
        until(service.alive)
        words = {
            PUBLIC: service.url,
            guest_pool.MODELS: str(models),
            "${CREDENTIALS_DIRECTORY}": str(credentials),
        }
        for name, value in words.items():
            assert name in command
            command = command.replace(name, value)
        mine = workers.submit(1)
        others = workers.submit(1, "p2")
        program, *line = shlex.split(command)
        assert program == guest_pool.PROGRAM
        nowhere = {"GPUAAS_DATABASE_URL": "sqlite:////nowhere/at-all.db", "PATIENCE_S": "1"}
        log, status = tmp_path / "guest.log", tmp_path / "status"
        guest = forge().start(line, nowhere, log, status=status)
        workers.pids.append(guest)
        until(lambda: workers.queue.read(*mine).status == "done")
        assert workers.queue.read(*mine).result == {"twice": 0}
        assert workers.queue.read(others[0], "p2").status == "pending"
        with transaction(site.engine) as conn:
            activated(conn, allocation_id)
            queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ADMIN)
            launching.release(conn, allocation_id, ADMIN)
        workers.ended(guest)
        assert status.read_text() == "0", "dismissed: systemd does not start it again"
    assert "unauthenticated" in log.read_text()
