"""A site on which every part of every page has something to show, also at its longest."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from reconciler.db import leader
from reconciler.db.engine import transaction
from reconciler.inventory import maas_sync, readings, sync
from reconciler.inventory.compare import Finding
from reconciler.lifecycle import apps, baremetal, firmware, host, ingress, slices
from reconciler.model.states import AppSlug, NodeMode, TaskKind, TaskState
from reconciler.pools import control
from reconciler.records import images, leasing, nodes, projects, queue, ssh_sessions, terminals
from reconciler.runs.paths import RunPaths
from reconciler.service.process import adopt
from reconciler.work.loops import play_recovery_cases
from tests.unit.reconciler import wipes
from tests.unit.reconciler.api.stack import ACT, IMAGE, KEY, NODE, Stack, discovery
from tests.unit.reconciler.api.test_baremetal import BODY as METAL
from tests.unit.reconciler.api.test_canaries import ERROR, fail
from tests.unit.reconciler.api.test_follow import folder, running, say
from tests.unit.reconciler.api.test_ingress import add as open_port
from tests.unit.reconciler.api.test_ingress import with_addresses
from tests.unit.reconciler.api.test_launches import PATH, launch
from tests.unit.reconciler.api.test_usage import priced
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.console.samples import busy_pools, dead_letter, hour_of_samples

LONG = "a-name-that-is-as-long-as-the-service-allows-it-to-be-of-a-vm"
REASON = "the guest did not answer its readiness probe, and the tenant waits for an answer since"
PERSON = "oidc:maximiliane.von-und-zu-hohenstein@research-computing.example.org"


def full_site(stack: Stack, folder: Path) -> dict[str, str]:
    """Fill the site. Returns an existing object for every name in the address of a page, and the
    allocations that pages show in other states.
    """
    with_addresses(stack)
    prices = priced(stack, folder, "2.49", machine_gpu_hour_price="1.99")
    stack.settings = prices.model_copy(
        update={"member_address": "gate.example", "planned_regions": "ap-south"}
    )
    adopt(stack.settings, stack.engine)
    names = {"project": "demo", "node": NODE, **_allocations(stack)}
    names["pool"] = busy_pools(stack)
    names["job"] = dead_letter(stack)
    names["app"] = _application(stack, names["allocation"])
    names["session"] = _slice(stack, names["allocation"])
    _nodes(stack)
    names["metal"] = _machine(stack)
    _projects(stack)
    names["task"] = _work(stack)
    _inventories(stack)
    mine = stack.client("admin").get(f"admin/allocations/{names['allocation']}").json()
    (names["slot"],) = (claim["slot_id"] for claim in mine["claims"])
    names["correlation"] = mine["correlation_id"]
    return names


def activate(stack: Stack, allocation_id: str) -> None:
    task = lease(stack, TaskKind.SLICE_VM_PROVISION)
    key = KEY.rpartition(" ")[0]
    connection = {"host": "gate.example", "port": 2200, "username": "tenant", "host_keys": [key]}
    with transaction(stack.engine) as conn:
        machine = {"vcpus": 24, "memory_mib": 196608, "firmware": "uefi"}
        slices.provision_started(conn, allocation_id, ACT, machine=machine)
        slices.provision_succeeded(conn, allocation_id, ACT, connection=connection)
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)


def lease(stack: Stack, kind: TaskKind) -> Any:
    with transaction(stack.engine) as conn:
        (task,) = leasing.lease(conn, "test", kinds=[kind])
    return task


def _allocations(stack: Stack) -> dict[str, str]:
    """In every state, each on the node that the scheduler can give it at that time."""
    with transaction(stack.engine) as conn:
        images.register(
            conn, ACT, **IMAGE | {"version": "2026.11-lts", "size_bytes": 4 << 30},
            runtime=["driver-570-server", "cuda-12.8", "rdma", "worker-kit"],
        )  # fmt: skip
    made = {"allocation": launch(stack, "a", hostname="trainer-1", terminal=True).json()["id"]}
    activate(stack, made["allocation"])
    made["stuck"] = launch(stack, "b", hostname=LONG).json()["id"]
    fail(stack, made["stuck"])
    body = {"reason": REASON}
    headers = {"Idempotency-Key": "recover"}
    path = f"admin/allocations/{made['stuck']}/recover"
    assert stack.client("admin").post(path, json=body, headers=headers).status_code == 202
    play_recovery_cases(stack.engine, stack.settings)
    site = Site(stack.engine)
    site.node("rack-3", number=3)
    with transaction(stack.engine) as conn:
        host.drain(conn, NODE, ACT)
    made["failed"] = launch(stack, "c", hostname="never-answered").json()["id"]
    task = lease(stack, TaskKind.SLICE_VM_PROVISION)
    with transaction(stack.engine) as conn:
        slices.provision_started(conn, made["failed"], ACT)
        slices.provision_failed(conn, made["failed"], ACT, step="slice_ready", error=ERROR)
        queue.finish(conn, task.id, task.lease_token, TaskState.FAILED, ACT, error=ERROR)
    made["waiting"] = launch(stack, "d", hostname="not-there-yet").json()["id"]
    with transaction(stack.engine) as conn:
        host.resume(conn, NODE, ACT)
    site.node("rack-4", number=4)
    return made


def _slice(stack: Stack, id: str) -> str:
    """Telemetry, ports and sessions of an active slice; returns the id of a recorded session."""
    hour_of_samples(stack, id)
    sources = ["198.51.100.0/24", "203.0.113.7/32", "2001:db8:1234:5678::/64"][:2]
    rules = [
        open_port(stack, id, key=f"port-{port}", public_port=port, sources=sources).json()["id"]
        for port in (443, 8080, 8443)
    ]
    ssh_keys = {"public_key": KEY}
    member = stack.client("member")
    assert member.post("projects/demo/ssh-keys", json=ssh_keys).status_code == 201
    on = {"enabled": True}
    assert member.put("projects/demo/terminal-recording", json=on).status_code == 200
    with transaction(stack.engine) as conn:
        ingress.reported(conn, rules[0], ACT, present=True, in_force=[rules[0]])
        ingress.failed(conn, rules[1], ACT, ERROR, forwards=False)
        who = {"project_id": "demo", "owner": PERSON, "fingerprint": "SHA256:" + "f" * 43}
        act = type(ACT)(PERSON, "test")
        sessions = [
            ssh_sessions.open_session(conn, act, allocation_id=id, way=way, address=at, **who)
            for way, at in (("jump", "198.51.100.7"), ("web", "2001:db8:1234:5678::7"))
            for _ in range(2)
        ]
        terminals.append(conn, sessions[2], "demo", '[0.1, "o", "$ "]\n')
        terminals.finish(conn, sessions[2], "d" * 64)
        ssh_sessions.close(conn, sessions[0], "client closed", (1 << 20, 70 << 30))
        ssh_sessions.close(conn, sessions[2], "the membership has ended", (1 << 10, 5 << 20))
    return sessions[2]


def _application(stack: Stack, controller: str) -> str:
    body = {"slug": AppSlug.SLURM_REFERENCE, "name": LONG[:40], "managed_key": KEY}
    body["controller_allocation_id"] = controller
    headers = {"Idempotency-Key": "app"}
    member = stack.client("member")
    made = member.post("projects/demo/app-instances", json=body, headers=headers)
    assert made.status_code == 201, made.text
    with transaction(stack.engine) as conn:
        (row,) = apps.members(conn, made.json()["id"])
        apps.reported(conn, row["id"], {"phase": "waiting for its workers"}, ACT, ready=False)
    return str(made.json()["id"])


def _projects(stack: Stack) -> None:
    """Others, tokens, and a quota that is nearly used."""
    admin = stack.client("admin")
    with transaction(stack.engine) as conn:
        projects.create(conn, "The project of a long name, which somebody gave it", ACT)
    limits = {"gpus": 8, "machines": 5, "open_requests": 2, "launches_per_hour": 6}
    assert admin.put("admin/projects/demo/quota", json=limits).status_code == 200
    for number, name in enumerate((LONG, "nightly-import")):
        token = {"name": name, "ttl_s": 3600 << number}
        assert stack.client("member").post("tokens", json=token).status_code == 201


def _nodes(stack: Stack) -> None:
    """Nodes in every state, with their problems."""
    admin = stack.client("admin")
    place = {"region": "eu-north-stockholm", "name": "gpu-host-07.rack-21.stockholm.example.net"}
    assert admin.patch(f"admin/nodes/{NODE}", json=place).status_code == 200
    site = Site(stack.engine)
    site.node("rack-2", number=2)
    checks = [
        {**wipes.ISOLATED, "status": status, "check": check, "detail": detail, "remediation": todo}
        for status, check, detail, todo in (
            ("FAIL", "iommu_groups", "GPU 0000:24:00.0 shares its group with 0000:24:00.1", REASON),
            ("WARN", "clock", "offset 1.7 s to the service", "start chrony on the host"),
            ("PASS", "bridge", "br-slice has 10.100.0.1/24", ""),
        )
    ]
    for id in ("rack-2", "rack-3", "rack-4"):
        admin.patch(f"admin/nodes/{id}", json={"region": "eu-north-stockholm", "profile": "lab"})
    report = {**site.parity(2, failures=1), "warnings": 1, "checks": checks}
    document = site.document(2)
    degraded = [{"code": "fabric_missing", "detail": "the card has no port with a link"}]
    document["candidate_summary"] = {**document["candidate_summary"], "degraded": degraded}
    with transaction(stack.engine) as conn:
        host.record_parity(conn, "rack-2", report, ACT)
        host.record_discovery(conn, "rack-2", document, ACT)
        for number, id in enumerate(("silent", "draining", "away", "fresh")):
            site.enrol(conn, id, 10 + number)
        host.lost(conn, "silent", ACT.because("no route to host 10.0.2.15, port 22, since 20 s"))
        host.drain(conn, "draining", ACT.because(REASON))
        host.drain(conn, "away", ACT)
        host.maintain(conn, "away", ACT)
        nodes.create(conn, ACT, id="ordered", address="192.0.2.30", profile="lab")


def _machine(stack: Stack) -> str:
    """A whole machine with a tenant, whose firmware differs since."""
    with transaction(stack.engine) as conn:
        where = {"address": "192.0.2.9", "profile": "lab", "region": "north"}
        nodes.create(conn, ACT, id="metal", mode=NodeMode.BAREMETAL, **where)
        document = discovery()
        identity = document["identity"] | {"machine_id": "0" * 32}
        host.enrolled(conn, "metal", ACT, **identity)
        host.bootstrapped(conn, "metal", ACT, identity=identity)
        host.record_discovery(conn, "metal", document | {"identity": identity}, ACT)
        nodes.update(conn, "metal", tenant_address="203.0.113.9")
        firmware.record_bmc(
            conn, "metal", {"sections": {"redfish_boot": {"SecureBoot": "Enabled"}}}, ACT
        )
    headers = {"Idempotency-Key": "metal"}
    made = stack.client("member").post(PATH, json=METAL, headers=headers)
    assert made.status_code == 201, made.text
    task = lease(stack, TaskKind.BAREMETAL_PROVISION)
    with transaction(stack.engine) as conn:
        slices.provision_started(conn, made.json()["id"], ACT)
        accounts = {"accounts": {"root": "1"}}
        baremetal.provision_succeeded(
            conn, made.json()["id"], ACT, baseline=accounts, task_id=task.id
        )
        queue.finish(conn, task.id, task.lease_token, TaskState.SUCCEEDED, ACT)
        firmware.record_bmc(
            conn, "metal", {"sections": {"redfish_boot": {"SecureBoot": "Disabled"}}}, ACT
        )
    return str(made.json()["id"])


def _work(stack: Stack) -> str:
    """Tasks that wait, run and have ended; returns a running task. Then the site drains."""
    admin = stack.client("admin")
    assert admin.post(f"admin/nodes/{NODE}/drift").status_code == 202
    compared = lease(stack, TaskKind.SLICE_DRIFT_RECONCILE)
    text = "a machine gpuaas-slice-43bd713b60734ef78a512897e902365d that no record explains"
    difference = {"severity": "failed", "code": "domain_unknown", "found": text}
    with transaction(stack.engine) as conn:
        differences = [difference, {**difference, "severity": "warning"}]
        unknown = {"domains": "virsh did not answer within 30 s"}
        result = {"differences": differences, "skipped": [], "unknown": unknown}
        queue.finish(
            conn, compared.id, compared.lease_token, TaskState.SUCCEEDED, ACT, result=result
        )
        leader.record_process(conn, "p1", ["api", "loops"], host="control-1", pid=7, version="1")
        leader.campaign(conn, leader.LOOPS, "p1", 3600)
        control.drain(conn, ACT.because(REASON), 600)
    task = running(stack)
    say(stack, task, "Measure the bandwidth of each GPU's link", "Compare with the baseline")
    output = RunPaths(folder(stack)).output
    output.parent.mkdir(parents=True)
    output.write_text(f"TASK [{REASON}] {'*' * 90}\nok: [{NODE}]\n")
    admin.post(f"admin/nodes/{NODE}/slice-topology/discovery")
    return task.id


def _inventories(stack: Stack) -> None:
    """Differences with NetBox; MAAS did not answer."""
    finding = Finding("intent_differs", f"node {NODE}", "region eu-north", "no region", REASON)
    reading = sync.NetboxReading(time.time() - 300, complete=True)
    sync.READINGS.keep(stack.engine, reading, [finding], logging.getLogger())
    failed = readings.Reading(time.time() - 60, error={**ERROR, "code": "maas_silent"})
    maas_sync.READINGS.keep(stack.engine, failed, [], logging.getLogger())
