"""A real database per test, and a site that is prepared the way a site is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa

from reconciler.db import journal, settings
from reconciler.db.engine import open_engine, transaction
from reconciler.db.journal import ENTITIES, Overdue
from reconciler.db.migrations import migrate
from reconciler.db.schema import Slot, Task
from reconciler.lifecycle import gate, host, slices
from reconciler.lifecycle import launch as launching
from reconciler.lifecycle import slots as slot_life
from reconciler.model.act import Act
from reconciler.model.bundle import Bundle
from reconciler.model.errors import Problem
from reconciler.model.states import TaskKind, TaskState
from reconciler.records import images, leasing, nodes, projects, queue, slots
from reconciler.records import proofs as proof_records
from tests.postgresql import running
from tests.unit.reconciler import wipes

DATA = Path(__file__).resolve().parents[2] / "data"
ADMIN = Act("admin:alice", "test", "corr-1", role="platform-admin")
# Ten times a site's: a thread of a busy machine that pauses in a transaction loses no session.
LIMITS = "-c lock_timeout=30s -c idle_in_transaction_session_timeout=100s"


def code(call: Callable[..., object], *args: Any, **named: Any) -> str:
    """Code of the refusal of a call."""
    with pytest.raises(Problem) as caught:
        call(*args, **named)
    return caught.value.code


class Database:
    """An engine for all tests (its compiled statements are worth keeping), a file per test."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "store.db"
        self.engine = open_engine(f"sqlite:///{self.path}")

    def restore(self, template: Path | None) -> sa.Engine:
        """Start from a copy of the template; from nothing without one."""
        self.engine.dispose()
        # A process that was killed leaves its write-ahead log, which SQLite would play into the
        # next file of this name.
        for part in ("", "-wal", "-shm"):
            self.path.with_name(f"{self.path.name}{part}").unlink(missing_ok=True)
        if template is not None:
            shutil.copy(template, self.path)
        return self.engine

    def keep(self, name: str) -> Path:
        """A copy of the database as it is now."""
        self.engine.dispose()
        return Path(shutil.copy(self.path, self.path.with_name(name)))


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """The engine and its file."""
    database = Database(tmp_path_factory.mktemp("store"))
    yield database
    database.engine.dispose()


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of a PostgreSQL database on a server that these tests started."""
    with running(fsync=False) as postgres:
        yield f"{postgres.url}&options={quote(LIMITS)}"


class PostgresDatabase:
    """The same on PostgreSQL: an engine, and for each test a new copy of a migrated database."""

    def __init__(self, server: str) -> None:
        self.admin = sa.create_engine(server, isolation_level="AUTOCOMMIT")
        self._run("CREATE DATABASE migrated")
        template = open_engine(server.replace("/postgres?", "/migrated?"))
        migrate(template)
        template.dispose()
        self.engine = open_engine(server.replace("/postgres?", "/site?"))

    def restore(self) -> sa.Engine:
        """Start from a copy of the template."""
        self.engine.dispose()
        self._run("DROP DATABASE IF EXISTS site WITH (FORCE)")
        self._run("CREATE DATABASE site TEMPLATE migrated")
        return self.engine

    def _run(self, statement: str) -> None:
        with self.admin.connect() as conn:
            conn.exec_driver_sql(statement)


@pytest.fixture(scope="session")
def postgres_database(server: str) -> Iterator[PostgresDatabase]:
    """The engine and its database."""
    database = PostgresDatabase(server)
    yield database
    database.engine.dispose()
    database.admin.dispose()


@pytest.fixture(scope="session")
def template(database: Database) -> Path:
    """A migrated database, made once."""
    migrate(database.restore(None))
    return database.keep("template.db")


@pytest.fixture(scope="session")
def sold_template(database: Database, template: Path) -> Path:
    """A site with node n1 and two slots on sale, made once."""
    site = Site(database.restore(template))
    site.node()
    return database.keep("sold.db")


@pytest.fixture
def engine(database: Database, template: Path) -> sa.Engine:
    """An empty database of this test's own."""
    return database.restore(template)


class Site:
    """Nodes, brought to where slots are sold."""

    act = ADMIN

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        with transaction(engine) as conn:
            ids = [project.id for project in projects.every(conn)]
            self.project = "p1" if ids else projects.create(conn, "p1", ADMIN, id="p1").id
            self.image = images.register(
                conn,
                ADMIN,
                name="base",
                version="1",
                digest=f"sha256:{'a' * 64}",
                size_bytes=1 << 20,
                url="https://images.invalid/base.raw",
            ).id
            settings.set_site_scheduling(conn, True, ADMIN)
            # Most tests launch more than the shipped limits allow.
            settings.store(conn, "default_quota", {})

    def document(self, number: int) -> dict[str, Any]:
        """The prepared host's discovery, with disks and addresses of its own."""
        text = (DATA / "prepared-discovery.json").read_text()
        text = text.replace("5e0000000000", f"5e00000000{number:02x}")
        text = text.replace("52:54:00:64:00", f"52:54:00:64:{number:02x}")
        report: dict[str, Any] = json.loads(text)
        return report

    def enrol(self, conn: sa.Connection, node_id: str, number: int = 0) -> None:
        """Enrolled, bootstrapped, discovered."""
        identity = self.document(number)["identity"]
        nodes.create(conn, ADMIN, id=node_id, address="10.0.2.15")
        host.enrolled(
            conn, node_id, ADMIN, machine_id=identity["machine_id"], host_key=identity["host_key"]
        )
        host.bootstrapped(conn, node_id, ADMIN, identity=identity)
        host.record_discovery(conn, node_id, self.document(number), ADMIN)

    def approve(self, conn: sa.Connection, node_id: str, index: int, number: int = 0) -> Slot:
        """A slot from the candidate with this index, its disk taken over with proof."""
        bundle = Bundle.of(self.document(number)["candidates"][index]["bundle"])
        proof = {"disk": bundle.identity, "method": "discard", "verified": True}
        proof_records.record_transition(conn, node_id, proof, ADMIN)
        return slot_life.approve(conn, node_id, bundle, ADMIN)

    def prove(self, conn: sa.Connection, node_id: str, number: int = 0) -> dict[str, Any]:
        """Discovery and parity after the approval; slots open; scheduling on."""
        host.record_discovery(conn, node_id, self.document(number), ADMIN)
        host.record_parity(conn, node_id, self.parity(number), ADMIN)
        opened = gate.open_gate(conn, node_id, ADMIN)
        host.set_scheduling(conn, node_id, True, ADMIN)
        return opened

    def parity(self, number: int = 0, failures: int = 0) -> dict[str, Any]:
        """A parity report under the same boot."""
        report = {"intent": "slice", "failures": failures, "warnings": 0}
        return {**report, **wipes.proven(self.document(number))}

    def node(self, node_id: str = "n1", indexes: tuple[int, ...] = (0, 1), number: int = 0) -> None:
        """A node whose slots are on sale."""
        with transaction(self.engine) as conn:
            self.enrol(conn, node_id, number)
            for index in indexes:
                self.approve(conn, node_id, index, number)
            opened = self.prove(conn, node_id, number)
            assert len(opened["opened"]) == len(indexes), opened

    def launch(self, gpus: int = 1, **fields: Any) -> launching.Launch:
        """A request."""
        return launching.Launch(
            project_id=self.project,
            gpu_count=gpus,
            username="alice",
            ssh_keys=["ssh-ed25519 AAAA alice"],
            hostname="vm1",
            image_id=self.image,
            **fields,
        )

    def allocate(self, conn: sa.Connection, gpus: int = 1) -> str:
        """The id of a new allocation."""
        return str(launching.allocate(conn, self.launch(gpus), ADMIN).id)

    def active(self, conn: sa.Connection, gpus: int = 1) -> str:
        """The id of an allocation that runs."""
        allocation_id = self.allocate(conn, gpus)
        slices.provision_started(conn, allocation_id, ADMIN)
        self.finish(conn, TaskKind.SLICE_VM_PROVISION)
        slices.provision_succeeded(conn, allocation_id, ADMIN, connection={"host": "gw"})
        return allocation_id

    def failed(
        self, conn: sa.Connection, gpus: int = 1, error_code: str = "readiness_failed"
    ) -> str:
        """The id of an allocation whose launch failed, by default at its readiness gate."""
        allocation_id = self.allocate(conn, gpus)
        slices.provision_started(conn, allocation_id, ADMIN)
        self.finish(conn, TaskKind.SLICE_VM_PROVISION, TaskState.FAILED)
        error = {"code": error_code, "found": "no lease"}
        slices.provision_failed(conn, allocation_id, ADMIN, step="slice_ready", error=error)
        return allocation_id

    def finish(
        self, conn: sa.Connection, kind: TaskKind, state: TaskState = TaskState.SUCCEEDED
    ) -> Task:
        """Lease and finish the only task of a kind."""
        (task,) = leasing.lease(conn, "worker", kinds=[kind])
        return queue.finish(conn, task.id, task.lease_token, state, ADMIN)

    def proofs(self, conn: sa.Connection, allocation_id: str) -> dict[str, dict[str, Any]]:
        """Wipe proofs as the host would give them."""
        return wipes.proofs(conn, allocation_id)

    def late(self, conn: sa.Connection, entity: str, key: str) -> Overdue:
        """A record whose deadline passes now, as `journal.overdue` returns it."""
        table = ENTITIES[entity].table
        conn.execute(sa.update(table).where(table.c.id == key).values(deadline_at=1.0))
        (row,) = (row for row in journal.overdue(conn) if (row.entity, row.id) == (entity, key))
        return row

    def statuses(self, conn: sa.Connection, node_id: str = "n1") -> list[str]:
        """The states of the node's slots, by index."""
        return [slot.status for slot in slots.of_node(conn, node_id)]


@pytest.fixture
def site(engine: sa.Engine) -> Site:
    """A site without nodes."""
    return Site(engine)


@pytest.fixture
def sold(database: Database, sold_template: Path) -> Site:
    """A site with node n1 and two slots on sale."""
    return Site(database.restore(sold_template))


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def on_either(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site with node n1 and two slots on sale, on a database of either kind."""
    if request.param == "sqlite":
        yield request.getfixturevalue("sold")
        return
    engine = request.getfixturevalue("postgres_database").restore()
    site = Site(engine)
    site.node()
    yield site
    engine.dispose()
