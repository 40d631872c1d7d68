"""Many clients at once over one database: tenants, operators and workers, with failures.

Workers end their tasks through the real handlers; the hosts' answers are made up, good or bad, by
seeded chance. Invariants are checked while they run, and afterwards over the whole history.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import sqlalchemy as sa

from reconciler.db import rows
from reconciler.db import schema as tables
from reconciler.db.engine import reading, retrying, transaction
from reconciler.db.rows import Record
from reconciler.db.schema import Slot, Task
from reconciler.lifecycle import baremetal, host, invariants, launch, recovery, task_failures
from reconciler.lifecycle.task_failures import Failure
from reconciler.model.errors import Problem
from reconciler.model.states import LIVE_CLAIMS, ClaimKind, NodeMode, TaskKind, TaskState
from reconciler.records import leasing, nodes, queue, slots
from reconciler.settings import Settings
from reconciler.work.handler import Work, open_work
from reconciler.work.kinds import HANDLERS
from reconciler.work.settle import queue_next_step
from tests.unit.reconciler import relay, wipes
from tests.unit.reconciler.conftest import Site
from tests.unit.reconciler.whole_machines import BEFORE, Machines

CLIENTS = 16
# Added to an act's weight; all of them together have 28.
OFTEN = 5
# Disk 2 of the prepared host is in use.
FREE = (0, 1, 3)
ABSENT = {"absent": True, "checks": {}}
WIPED = {"method": "user_data_erase", "verified": True}
# How a client may be refused. Everything else is a defect.
REFUSALS = {
    "no_capacity",
    "scheduling_off",
    "allocation_not_releasable",
    "allocation_active",
    "allocation_released",
    "allocation_releasing",
    "allocation_baremetal",
    "node_unhealthy",
    "node_in_use",
    "transition_refused",
    "machine_not_clean",
    "machine_clean",
    "reinstall_required",
    # Of a worker whose task was taken away or ended meanwhile.
    "stale_lease",
}


class Crowd:
    """hosts: slice hosts of three slots each; machines: those that are given away as a whole.

    often: acts that are tried more often than the rest, for a run too short to meet them by chance.
    """

    def __init__(
        self, site: Site, *, hosts: int, machines: int, often: Set[str] = frozenset()
    ) -> None:
        self.site, self.engine, self.act = site, site.engine, site.act
        self.numbers = {f"n{number}": number for number in range(hosts)}
        for name, number in self.numbers.items():
            site.node(name, FREE, number)
        self.whole = Machines(site)
        for number in range(hosts, hosts + machines):
            self.whole.machine(f"m{number}", number)
            self.numbers[f"m{number}"] = number
        with transaction(self.engine) as conn:
            conn.execute(sa.update(tables.nodes).values(profile="lab"))
        self.settings = Settings()
        self.answers: Counter[str] = Counter()
        self._often = often
        self._lock = threading.Lock()

    def run(self, seconds: float, required: Set[str], seed: int = 20_26) -> None:
        """All clients at once for so long; raises any unexpected error of a client.

        Longer on a busy machine, until each of `required` has happened, or a minute more is over.
        """
        end = time.monotonic() + seconds

        def going() -> bool:
            now = time.monotonic()
            return now < end or (now < end + 60 and not required <= self.answers.keys())

        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            jobs = [pool.submit(self._client, seed + number, going) for number in range(CLIENTS)]
            jobs.append(pool.submit(self._auditor, going))
            for job in jobs:
                job.result()

    def _client(self, seed: int, going: Callable[[], bool]) -> None:
        chance = random.Random(seed)  # noqa: S311
        while going():
            what, act = self._choose(chance)
            try:
                answer = what if act(chance) else ""
            except Problem as problem:
                if problem.code not in REFUSALS:
                    raise
                answer = problem.code
            except sa.exc.TimeoutError:
                # SQLite's writers wait their turn on their connections; the API answers 503.
                answer = "busy"
            with self._lock:
                self.answers[answer] += 1

    def _auditor(self, going: Callable[[], bool]) -> None:
        while going():
            with suppress(sa.exc.TimeoutError), reading(self.engine) as conn:
                violations = invariants.check(conn)
                assert violations == [], violations
                holds(conn)
            time.sleep(0.2)

    def _choose(self, chance: random.Random) -> tuple[str, Callable[[random.Random], bool]]:
        acts: Sequence[tuple[str, int, Callable[[random.Random], bool]]] = (
            ("launched", 6, self._launch),
            ("whole", 1, self._launch_whole),
            ("gave back", 4, self._release),
            ("worked", 12, self._work),
            ("recovered", 3, self._recover),
            ("cleaned", 1, self._clean_machine),
            ("converted", 1, self._convert),
            ("reinstalled", 1, self._reinstall),
        )
        weights = [weight + OFTEN * (what in self._often) for what, weight, _ in acts]
        (chosen,) = chance.choices(acts, weights=weights)
        return chosen[0], chosen[2]

    def _write(self, work: Callable[[sa.Connection], Any]) -> bool:
        return bool(retrying(self.engine, work, attempts=10))

    def _launch(self, chance: random.Random) -> bool:
        gpus = chance.choice((1, 1, 1, 2, 3))
        return self._write(lambda conn: self.site.allocate(conn, gpus))

    def _launch_whole(self, _chance: random.Random) -> bool:
        return self._write(self.whole.launch)

    def _some(self, chance: random.Random, table: sa.Table, *where: Any) -> Record | None:
        with reading(self.engine) as conn:
            candidates = rows.every(conn, sa.select(table).where(*where))
        return chance.choice(candidates) if candidates else None

    def _release(self, chance: random.Random) -> bool:
        table = tables.allocations
        row = self._some(chance, table, table.c.state.in_(("active", "requested")))
        return row is not None and self._write(
            lambda conn: launch.release(conn, row["id"], self.act)
        )

    def _recover(self, chance: random.Random) -> bool:
        """Recover any allocation that is not active, even while a worker is building it."""
        table = tables.allocations
        row = self._some(
            chance, table, table.c.state != "released", table.c.capacity_shape == "gpu_slice"
        )
        return row is not None and self._write(
            lambda conn: recovery.force_cleanup(
                conn, row["id"], self.act.because("stuck"), runtime_verified_absent=True
            )
        )

    def _clean_machine(self, chance: random.Random) -> bool:
        row = self._some(chance, tables.nodes, tables.nodes.c.unclean_allocation_id != "")
        return row is not None and self._write(
            lambda conn: baremetal.clean(conn, row["id"], self.act)
        )

    def _convert(self, chance: random.Random) -> bool:
        """A machine is to become a slice host, and is not in the end.

        In one transaction: a worker that ends the conversion in between would keep the machine.
        """
        row = self._some(chance, tables.nodes, tables.nodes.c.id.like("m%"))
        if row is None:
            return False

        def work(conn: sa.Connection) -> Any:
            host.convert(conn, row["id"], NodeMode.SLICE, self.act)
            host.convert(conn, row["id"], NodeMode.BAREMETAL, self.act)
            return host.converted(conn, row["id"], self.act)

        return self._write(work)

    def _reinstall(self, chance: random.Random) -> bool:
        """A machine whose tenant was root comes back after a new installation."""
        machine = self._some(chance, tables.nodes, tables.nodes.c.id.like("m%"))
        if machine is None:
            return False
        number = self.numbers[machine["id"]]
        return self._write(lambda conn: self.whole.reinstall(conn, machine["id"], number) or True)

    def _work(self, chance: random.Random) -> bool:
        """Take a task and end it, well or badly; or die with it, and another takes it over."""
        owner = f"worker-{threading.get_ident()}"
        taken = retrying(self.engine, lambda conn: leasing.lease(conn, owner), attempts=10)
        if not taken:
            return False
        (task,) = taken
        handler = HANDLERS[task.kind]
        try:
            retrying(self.engine, lambda conn: handler.start(self._open(conn, task)), attempts=10)
        except Problem as refusal:
            # Its allocation was given up meanwhile: as the worker does, no run is started.
            if refusal.code != "canceled":
                raise
            return self._write(lambda conn: self._fail(conn, task, known=True))
        luck = chance.random()
        if luck < 0.1:
            retrying(self.engine, lambda conn: queue.let_go(conn, task), attempts=10)
            return True
        if luck < 0.35:
            return self._write(lambda conn: self._fail(conn, task, known=luck < 0.25))
        return self._write(lambda conn: self._succeed(conn, task))

    def _open(self, conn: sa.Connection, task: Task) -> Work:
        return open_work(conn, self.settings, task)

    def _fail(self, conn: sa.Connection, task: Task, *, known: bool) -> bool:
        error = {"code": "step_failed", "expected": "a", "found": "b", "remedy": "c"}
        evidence = {"disk_written": False, "leftovers": False} if known else {}
        failure = Failure("clone", error, evidence, known=known)
        task_failures.record(conn, task, failure)
        return self._end(conn, task, TaskState.FAILED)

    def _succeed(self, conn: sa.Connection, task: Task) -> bool:
        work = self._open(conn, task)
        queue_next_step(work, HANDLERS[task.kind].succeed(work, self._evidence(conn, task)))
        return self._end(conn, task, TaskState.SUCCEEDED)

    def _end(self, conn: sa.Connection, task: Task, state: TaskState) -> bool:
        queue.finish(conn, task.id, task.lease_token, state, self.act)
        return True

    def _evidence(self, conn: sa.Connection, task: Task) -> dict[str, Any]:
        """Evidence of a host that has done the task completely."""
        number, key = self.numbers[task.node_id], task.allocation_id

        def wiped() -> dict[str, Any]:
            given = [slot["slot_id"] for slot in task.parameters["slots"]]
            return {"proofs": {slot_id: _proof(slots.get(conn, slot_id)) for slot_id in given}}

        def parity() -> dict[str, Any]:
            mode = NodeMode(nodes.get(conn, task.node_id).mode)
            return {"parity": {**self.site.parity(number), "intent": mode.purpose}}

        by_kind: dict[str, Callable[[], dict[str, Any]]] = {
            TaskKind.SLICE_VM_PROVISION: lambda: {"readiness": {}},
            TaskKind.SLICE_VM_RELEASE: lambda: {"proofs": self.site.proofs(conn, key)},
            TaskKind.SLICE_WIPE: wiped,
            TaskKind.BAREMETAL_PROVISION: lambda: {"account": "alice", "baseline": BEFORE},
            TaskKind.BAREMETAL_RELEASE: lambda: self.whole.evidence(conn, key),
            TaskKind.SLICE_TOPOLOGY_DISCOVER: lambda: {"discovery": self.site.document(number)},
            TaskKind.NODE_PARITY: parity,
        }
        return {"absence": ABSENT, **by_kind[task.kind]()}

    def sound(self) -> None:
        """Afterwards: I1 to I3 over the whole past, and `gpuaas check`."""
        with reading(self.engine) as conn:
            violations = invariants.check(conn)
            assert violations == [], violations
            holds(conn)
            never_held_twice(conn)
            written_together(conn)


def _proof(slot: Slot) -> dict[str, Any]:
    disk = {"disk": slot.nvme_identity, "serial": slot.nvme_serial}
    reset = {"gpu": wipes.gpu(slot.gpu_pci_address)}
    return {**disk, "size_bytes": slot.nvme_size_bytes, **WIPED, **reset}


def holds(conn: sa.Connection) -> None:
    """I1 and I2 now, from the claims alone."""
    query = sa.select(tables.claims).where(tables.claims.c.state.in_(LIVE_CLAIMS))
    live = rows.every(conn, query)
    sliced = [claim for claim in live if claim["kind"] == ClaimKind.SLICE]
    whole = Counter(c["node_id"] for c in live if c["kind"] == ClaimKind.NODE_EXCLUSIVE)
    for columns in (
        ("slot_id",),
        ("nvme_identity",),
        ("management_mac",),
        ("node_id", "gpu_pci_address"),
        ("node_id", "fabric_vf_pci_address"),
        ("node_id", "private_ip"),
    ):
        given = Counter(tuple(claim[column] for column in columns) for claim in sliced)
        assert max(given.values(), default=0) <= 1, (columns, given)
    assert max(whole.values(), default=0) <= 1, whole
    assert not set(whole) & {claim["node_id"] for claim in sliced}


def never_held_twice(conn: sa.Connection) -> None:
    """I1 and I2 at every moment of the past, replayed from the history."""
    by_id = {claim["id"]: claim for claim in rows.every(conn, sa.select(tables.claims))}
    query = sa.select(tables.history).where(tables.history.c.entity == "claim")
    holders: dict[str, str] = {}
    of_node: dict[str, Counter[str]] = {}
    for row in rows.every(conn, query.order_by(tables.history.c.id)):
        claim = by_id[row["entity_id"]]
        thing = claim["slot_id"] or claim["node_id"]
        kinds = of_node.setdefault(claim["node_id"], Counter())
        if row["target"] in LIVE_CLAIMS:
            if thing not in holders:
                kinds[claim["kind"]] += 1
            assert holders.setdefault(thing, claim["id"]) == claim["id"], (thing, row)
        elif holders.get(thing) == claim["id"]:
            del holders[thing]
            kinds[claim["kind"]] -= 1
        whole, sliced = kinds[ClaimKind.NODE_EXCLUSIVE], kinds[ClaimKind.SLICE]
        assert whole <= 1 and not (whole and sliced), (claim["node_id"], row)
    live = {key for key, claim in by_id.items() if claim["state"] in LIVE_CLAIMS}
    assert set(holders.values()) == live


def written_together(conn: sa.Connection) -> None:
    """I3: each change has its history, its event and, for a request, its line of audit."""
    written = Counter(
        (row["entity"], row["entity_id"]) for row in rows.every(conn, sa.select(tables.history))
    )
    events = Counter(
        (row.subject_kind, row.subject_id) for row in relay.pending_events(conn, 1_000_000)
    )
    for entity, table in (
        ("slot", tables.slots),
        ("allocation", tables.allocations),
        ("claim", tables.claims),
        ("task", tables.tasks),
    ):
        for row in rows.every(conn, sa.select(table)):
            changes = written[entity, row["id"]]
            assert changes >= row["generation"] + 1, (entity, row["id"])
            assert events[entity, row["id"]] >= row["generation"] + 1, (entity, row["id"])
    audited = {
        row["subject_id"]
        for row in rows.every(conn, sa.select(tables.audit_log))
        if row["subject_kind"] == "allocation"
    }
    every = {row["id"]: row for row in rows.every(conn, sa.select(tables.allocations))}
    assert set(every) <= audited
    held = {claim["allocation_id"] for claim in rows.every(conn, sa.select(tables.claims))}
    assert set(every) == held
