"""Whole machines for tests on either database."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db import schema as tables
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.schema import Allocation, Task
from reconciler.lifecycle import baremetal, host, slices
from reconciler.lifecycle import launch as launching
from reconciler.model.errors import Problem
from reconciler.model.states import LIVE_CLAIMS, NodeMode, TaskKind, TaskState
from reconciler.records import leasing, nodes, proofs, queue
from tests.unit.reconciler.conftest import Site

ABSENT = {"absent": True, "checks": {}}
FOUND = {"absence": ABSENT, "drift": [], "compared": True}
BEFORE = {"accounts": {"root": "1"}}


class Machines:
    """A site whose nodes m1, m2, … are ordinary machines."""

    def __init__(self, site: Site) -> None:
        self.site, self.engine, self.act = site, site.engine, site.act
        # Identity of machines that were installed anew, by node.
        self.installed: dict[str, dict[str, Any]] = {}
        # Firmware that discovery reports, by section; None: it cannot be read.
        self.firmware: dict[str, dict[str, str] | None] = {}
        # Serial numbers that hosts report, by node.
        self.serials: dict[str, str] = {}

    def add(self, conn: sa.Connection, node_id: str, number: int, **fields: Any) -> None:
        """Enrolled and ready; not discovered."""
        identity = self.site.document(number)["identity"]
        values = {"tenant_address": f"203.0.113.{number}", "mode": NodeMode.BAREMETAL}
        values |= {"address": "10.0.2.15"} | fields
        nodes.create(conn, self.act, id=node_id, **values)
        enrolled = {key: identity[key] for key in ("machine_id", "host_key")}
        host.enrolled(conn, node_id, self.act, **enrolled)
        host.bootstrapped(conn, node_id, self.act, identity=identity)

    def discover(self, conn: sa.Connection, node_id: str, number: int) -> None:
        document = self.site.document(number)
        document["identity"] |= self.installed.get(node_id, {})
        for name, section in self.firmware.items():
            if section is None:
                document["firmware"]["sections"].pop(name)
                document["firmware"]["unreadable"][name] = "broken"
            else:
                document["firmware"]["sections"][name] = section
        if serial := self.serials.get(node_id):
            document["machine"] = {"vendor": "Dell Inc.", "product": "XE9680L", "serial": serial}
        host.record_discovery(conn, node_id, document, self.act)

    def reinstall(self, conn: sa.Connection, node_id: str = "m1", number: int = 1) -> None:
        """Install the machine anew after its tenant: other identity, disks taken over again."""
        fresh = {"machine_id": rows.new_id(), "host_key": f"ssh-ed25519 {rows.new_id()}"}
        self.installed[node_id] = fresh
        host.enrolled(conn, node_id, self.act, **fresh)
        identity = self.site.document(number)["identity"] | fresh
        host.bootstrapped(conn, node_id, self.act, identity=identity)
        for disk in self.site.document(number)["nvme"]:
            if not disk["blockers"]:
                self.take_over(conn, node_id, disk["identity"])
        self.discover(conn, node_id, number)

    def machine(self, node_id: str = "m1", number: int = 1, **fields: Any) -> None:
        """A machine that can be given away, with each disk that nothing uses taken over."""
        with transaction(self.engine) as conn:
            self.add(conn, node_id, number, **fields)
            for disk in self.site.document(number)["nvme"]:
                if not disk["blockers"]:
                    self.take_over(conn, node_id, disk["identity"])
            self.discover(conn, node_id, number)

    def take_over(self, conn: sa.Connection, node_id: str, identity: str) -> None:
        """The disk's storage transition, as it was approved by identity."""
        proof = {"disk": identity, "method": "discard", "verified": True}
        proofs.record_transition(conn, node_id, proof, self.act)

    def launch(self, conn: sa.Connection, **fields: Any) -> Allocation:
        wish = self.site.launch(0, capacity_shape="baremetal", **fields)
        return launching.allocate(conn, wish, self.act)

    def reasons(self, conn: sa.Connection, **fields: Any) -> dict[str, str]:
        """Why each node is not given away."""
        try:
            placed = self.launch(conn, **fields)
        except Problem as problem:
            assert problem.code == "no_capacity"
            explanation: Any = problem.detail["explanation"]
            return {row["node_id"]: next(iter(row["reasons"])) for row in explanation["nodes"]}
        return {placed.node_id: ""}

    def begin(self, conn: sa.Connection, allocation: Allocation) -> Task:
        """A worker takes the provision and starts its run."""
        (task,) = leasing.lease(conn, "worker", kinds=[TaskKind.BAREMETAL_PROVISION])
        assert slices.provision_started(conn, allocation.id, self.act)
        baremetal.entered(conn, allocation.node_id)
        return task

    def active(self, conn: sa.Connection, **fields: Any) -> str:
        """The id of an allocation whose tenant is on the machine."""
        allocation = self.launch(conn, **fields)
        task = self.begin(conn, allocation)
        assert baremetal.provision_succeeded(
            conn, allocation.id, self.act, baseline=BEFORE, task_id=task.id
        )
        self.end(conn, task)
        return str(allocation.id)

    def end(self, conn: sa.Connection, task: Task, state: TaskState = TaskState.SUCCEEDED) -> None:
        queue.finish(conn, task.id, task.lease_token, state, self.act)

    def releasing(self, conn: sa.Connection, allocation_id: str) -> Task:
        """The release of the allocation, as a worker has taken it."""
        (task,) = leasing.lease(conn, "worker", kinds=[TaskKind.BAREMETAL_RELEASE])
        assert task.allocation_id == allocation_id
        return task

    def evidence(self, conn: sa.Connection, allocation_id: str, **more: Any) -> dict[str, Any]:
        """Evidence of a release on a clean host."""
        wiped = {
            disk["slot_id"]: {
                "disk": f"eui.{disk['nvme_eui']}",
                "serial": disk["nvme_serial"],
                "size_bytes": disk["nvme_size_bytes"],
                "method": "user_data_erase",
                "slot_id": disk["slot_id"],
                "started_at": "2026-05-01T10:00:00+00:00",
                "finished_at": "2026-05-01T10:00:04+00:00",
                "verified": True,
            }
            for disk in baremetal.claim_of(conn, allocation_id).disks
        }
        return {**FOUND, "proofs": wiped, **more}

    def released(self, conn: sa.Connection, allocation_id: str, **more: Any) -> bool:
        """End the release that is due with this evidence."""
        task = self.releasing(conn, allocation_id)
        done = baremetal.release_succeeded(
            conn,
            allocation_id,
            self.act,
            fence=task.parameters["fence"],
            evidence=self.evidence(conn, allocation_id, **more),
        )
        self.end(conn, task)
        return done


def exclusion_holds(machines: Machines) -> None:
    """I1, I2: whole machines, slices and conversions at once; nothing is ever given twice."""
    for number in (1, 2, 3):
        machines.machine(f"m{number}", number)
    machines.site.node("n1", (0, 1), 4)
    engine, act = machines.engine, machines.act

    def attempt(work: Any) -> str:
        try:
            return str(retrying(engine, lambda conn: work(conn) and "done"))
        except Problem as problem:
            return problem.code

    work: list[Any] = [machines.launch] * 6
    work += [machines.site.allocate] * 3
    work += [lambda conn: host.convert(conn, "m1", NodeMode.SLICE, act)]
    work += [lambda conn: host.convert(conn, "n1", NodeMode.BAREMETAL, act)]
    with ThreadPoolExecutor(len(work)) as pool:
        answers = Counter(pool.map(attempt, work))
    assert set(answers) <= {"done", "no_capacity", "scheduling_off", "node_in_use"}
    with reading(engine) as conn:
        live = rows.every(
            conn, sa.select(tables.claims).where(tables.claims.c.state.in_(LIVE_CLAIMS))
        )
        modes = {node.id: node.mode for node in nodes.every(conn)}
    whole = Counter(claim["node_id"] for claim in live if claim["kind"] == "node_exclusive")
    sliced = {claim["node_id"] for claim in live if claim["kind"] == "slice"}
    assert max(whole.values()) == 1
    assert not set(whole) & sliced
    assert {modes[node] for node in whole} == {"baremetal"}
    assert all(modes[node] == "slice" for node in sliced)
    # Two machines at least, three when the conversion of m1 came too late.
    assert len(whole) == (2 if modes["m1"] == "converting_to_slice" else 3)
