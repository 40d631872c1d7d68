"""Restore of a site from its backup: the same allocations, and nothing done twice."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import shutil
import signal
import socket
import stat
import subprocess
import tarfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

import reconciler.backup.restore as restoring
from reconciler.backup import MARK, archive, locked
from reconciler.backup.restore import restore
from reconciler.cli.service import backup, in_use, open_migrated
from reconciler.db import clock, journal, migrations
from reconciler.db import schema as tables
from reconciler.db.engine import open_engine, reading, transaction
from reconciler.db.migrations import migrate
from reconciler.db.settings import site_scheduling
from reconciler.gateway import role
from reconciler.lifecycle import gate, invariants, slices
from reconciler.model.errors import Problem
from reconciler.model.states import Role, TaskKind
from reconciler.records import allocations, claims, leasing, nodes, queue, slots, tokens
from reconciler.service.process import adopt
from reconciler.settings import Settings
from reconciler.trust.ca import known_hosts, open_trust, user_ca
from tests.postgresql import Server, running
from tests.unit.reconciler.conftest import ADMIN, Site
from tests.unit.reconciler.whole_machines import Machines

# Below a fence after a restore, and above those of claims.
YEARS = 1_000_000


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with running(fsync=False) as server:
        yield server


def settled(folder: Path, url: str = "") -> Settings:
    folder.mkdir(mode=0o700, exist_ok=True)
    return Settings(state_dir=folder, database_url=url, profiles_dir=folder)


class Life:
    """A site with a tenant, a machine that is being built, and a slot on sale."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = open_engine(settings.database)
        migrate(self.engine)
        self.trust = open_trust(settings.state_dir)
        site = Site(self.engine)
        site.node("n1", (0, 1, 3))
        with transaction(self.engine) as conn:
            self.active = site.active(conn)
            self.building = site.allocate(conn)
            (task,) = leasing.lease(conn, "w", runner="r", kinds=[TaskKind.SLICE_VM_PROVISION])
            run = queue.run_id(task)
            queue.started(conn, task.id, task.lease_token, run_id=run, run_directory="/r")
            slices.provision_started(conn, self.building, ADMIN)
            self.task = task.id

    def copied(self, folder: Path, url: str) -> Life:
        """The same site elsewhere."""
        other = copy.copy(self)
        shutil.copytree(self.settings.state_dir, folder)
        other.settings = settled(folder, url)
        other.engine = open_engine(other.settings.database)
        other.trust = open_trust(folder)
        return other


def lived(folder: Path, url: str = "") -> Life:
    made = Life(settled(folder, url))
    # The last connection to close empties the write-ahead log.
    made.engine.dispose()
    return made


@pytest.fixture(scope="module")
def on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Made once, and copied for each test."""
    return lived(tmp_path_factory.mktemp("sqlite") / "site")


@pytest.fixture(scope="module")
def on_postgresql(tmp_path_factory: pytest.TempPathFactory, postgres: Server) -> Life:
    return lived(tmp_path_factory.mktemp("postgresql") / "site", postgres.database("lived"))


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def urls(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Database URLs of the old site and of an empty database for the restored site."""
    if request.param == "sqlite":
        return "", ""
    server = request.getfixturevalue("postgres")
    request.getfixturevalue("on_postgresql")
    before, after = (f"b_{uuid.uuid4().hex[:8]}" for _ in range(2))
    return server.database(before, of="lived"), server.database(after)


@pytest.fixture
def before(request: pytest.FixtureRequest, urls: tuple[str, str], tmp_path: Path) -> Iterator[Life]:
    made: Life = request.getfixturevalue("on_postgresql" if urls[0] else "on_sqlite")
    site = made.copied(tmp_path / "before", urls[0])
    yield site
    site.engine.dispose()


@pytest.mark.covers("CTRL-2", "I13")
def test_the_same_allocations_and_nothing_done_twice(
    before: Life, urls: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "site.tar.gz"
    with transaction(before.engine) as conn:
        # A writer is active during the backup: uncommitted rows are not in it.
        conn.execute(sa.insert(tables.projects).values(id="late", name="late"))
        made = archive.write(before.settings, file) if urls[0] else None
    made = made or archive.write(before.settings, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    after = settled(tmp_path / "after", urls[1])

    done = restore(after, file)

    assert done["lost_tasks"] == [before.task]
    (billed,) = done["active_allocations"]
    assert billed["if_released_since"] == f"gpuaas release {before.active} --project p1"
    assert len(done["closed_slots"]) == 1
    engine = open_engine(after.database)
    with reading(engine) as conn:
        assert invariants.check(conn) == []
        recorded = set(conn.execute(sa.select(tables.projects.c.id)).scalars())
        # PostgreSQL is copied beside the open transaction, SQLite after it.
        assert recorded == ({"p1"} if urls[0] else {"p1", "late"})
        assert allocations.get(conn, before.active).state == "active"
        assert allocations.get(conn, before.building).state == "failed"
        assert queue.get(conn, before.task).state == "lost"
        by_status = {slot.status: slot for slot in slots.of_node(conn, "n1")}
        assert set(by_status) == {"active", "cleanup_blocked", "disabled"}
        # Whatever hosts have seen since the backup, new claims are above it.
        assert min(by_status[name].fence for name in ("disabled", "cleanup_blocked")) > YEARS
        assert by_status["active"].fence < YEARS
        assert not site_scheduling(conn)
        # Nothing is on sale before the host is discovered and proven again.
        assert nodes.get(conn, "n1").boot_id == ""
    with transaction(engine) as conn:
        assert gate.open_gate(conn, "n1", ADMIN)["opened"] == []
        assert leasing.lease(conn, "w", runner="another") == []
    engine.dispose()
    # The hosts of the old site trust the new site.
    assert user_ca(open_trust(after.state_dir)) == user_ca(before.trust)
    assert known_hosts(open_trust(after.state_dir)).exists()
    assert f"revision {made['revision']}" == f"revision {done['revision']}"


@pytest.mark.covers("I4", "I13")
def test_what_was_still_to_begin_may_have_begun_since(
    before: Life, urls: tuple[str, str], tmp_path: Path
) -> None:
    site = Site(before.engine)
    machines = Machines(site)
    machines.machine()
    with transaction(before.engine) as conn:
        launching = site.allocate(conn)
        whole = machines.launch(conn).id
        reboot = queue.Enqueue(
            TaskKind.NODE_BOOTSTRAP, "n1", "node", "n1", parameters={"allow_reboot": True}
        )
        begins = queue.enqueue(conn, reboot, ADMIN)
        held = {claim.slot_id for claim in claims.of_allocation(conn, launching)}
    file = tmp_path / "site.tar.gz"
    archive.write(before.settings, file)
    after = settled(tmp_path / "after", urls[1])

    done = restore(after, file)

    assert len(done["canceled_tasks"]) == 3 and begins.id in done["canceled_tasks"]
    engine = open_engine(after.database)
    with transaction(engine) as conn:
        assert invariants.check(conn) == []
        assert leasing.lease(conn, "w", runner="another", limit=9) == [], "nothing begins by itself"
        for task_id in done["canceled_tasks"]:
            task = queue.get(conn, task_id)
            assert (task.state, task.error["code"]) == ("canceled", "restored")
        assert allocations.get(conn, launching).state == "failed"
        blocked = {slot.id: slot for slot in slots.of_node(conn, "n1") if slot.id in held}
        assert [slot.status for slot in blocked.values()] == ["cleanup_blocked"]
        assert {slot.health_detail["code"] for slot in blocked.values()} == {"restored"}
        assert allocations.get(conn, whole).state == "failed"
        assert nodes.get(conn, "m1").unclean_allocation_id == whole
    engine.dispose()


@pytest.mark.covers("CTRL-2")
def test_the_tokens_that_come_back_to_life_are_named(
    before: Life, urls: tuple[str, str], tmp_path: Path
) -> None:
    role = Role.PLATFORM_ADMIN
    with transaction(before.engine) as conn:
        leaked, secret = tokens.issue(conn, ADMIN, role=role, name="leaked")
        revoked, _ = tokens.issue(conn, ADMIN, role=role, name="revoked")
        tokens.issue(conn, ADMIN, role=role, name="ended", ttl_s=-1)
        tokens.revoke(conn, revoked.id, ADMIN)
        _, enrolment = tokens.issue_enrolment(conn, "n1", ADMIN)
    file = tmp_path / "site.tar.gz"
    archive.write(before.settings, file)
    with transaction(before.engine) as conn:
        tokens.revoke(conn, leaked.id, ADMIN)
    after = settled(tmp_path / "after", urls[1])

    (named,) = restore(after, file)["valid_tokens"]

    assert (named["name"], named["role"]) == ("leaked", "platform-admin")
    assert named["if_revoked_since"] == f"gpuaas token revoke {leaked.id}"
    engine = open_engine(after.database)
    with transaction(engine) as conn:
        assert tokens.authenticate(conn, secret), "which is why it is named"
        with pytest.raises(Problem, match="token_invalid"):
            tokens.redeem_enrolment(conn, "n1", enrolment, used_by={})
    engine.dispose()


def certified(conn: sa.Connection, key: str, days: float, node_id: str = "n1") -> None:
    """The host has enrolled with this key."""
    tokens.record_certificate(
        conn,
        node_id,
        ADMIN,
        serial=key,
        public_key=key,
        certificate="as signed",
        principals=[node_id],
        valid_until=clock.read(conn) + days * 86_400,
    )
    tokens.replace_certificates(conn, node_id, key, ADMIN)


@pytest.mark.covers("CTRL-2", "HOST-13")
def test_the_host_keys_that_are_believed_again_are_named(
    before: Life, urls: tuple[str, str], tmp_path: Path
) -> None:
    with transaction(before.engine) as conn:
        for node_id in ("n2", "n3", "n4"):
            nodes.create(conn, ADMIN, id=node_id)
        certified(conn, "given up long ago", 90)
        certified(conn, "copied", 20)
        certified(conn, "copied", 90)
        certified(conn, "ended", -1, "n2")
        certified(conn, "still the host's", 90, "n3")
        certified(conn, "of no host", 90, "n4")
        conn.execute(
            sa.update(tables.nodes).where(tables.nodes.c.id == "n4").values(state="retired")
        )
    file = tmp_path / "site.tar.gz"
    archive.write(before.settings, file)
    with transaction(before.engine) as conn:
        certified(conn, "fresh", 90)
    after = settled(tmp_path / "after", urls[1])

    named = restore(after, file)["valid_host_keys"]

    assert [(key["node"], key["host_key"]) for key in named] == [
        ("n1", "copied"),
        ("n3", "still the host's"),
    ]
    assert named[0]["certified_at"] < named[0]["valid_until"]
    assert named[0]["if_replaced_since"].startswith("gpuaas nodes userdata n1")
    engine = open_engine(after.database)
    with transaction(engine) as conn:
        assert "copied" not in tokens.revoked_host_keys(conn), "which is why it is named"
        certified(conn, "fresh", 90)
        assert tokens.revoked_host_keys(conn) == ["copied", "given up long ago"]
    engine.dispose()


def test_a_site_is_never_restored_over_another(
    before: Life, urls: tuple[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "site.tar.gz"
    archive.write(before.settings, file)
    with pytest.raises(Problem, match="restore_not_empty"):
        restore(before.settings, file)
    with pytest.raises(Problem, match="restore_not_empty"):
        restore(settled(tmp_path / "elsewhere", before.engine.url.render_as_string(False)), file)
    with pytest.raises(Problem, match="backup_exists"):
        archive.write(before.settings, file)
    with reading(before.engine) as conn:
        assert allocations.get(conn, before.active).state == "active"


@pytest.mark.covers("CTRL-2", "I4")
@pytest.mark.parametrize("urls", ["sqlite"], indirect=True)
def test_the_log_of_the_former_database_is_not_replayed(before: Life, tmp_path: Path) -> None:
    """The service was killed, and only the database and the keys were moved away."""
    file = tmp_path / "site.tar.gz"
    archive.write(before.settings, file)
    with transaction(before.engine) as conn:
        conn.execute(sa.insert(tables.projects).values(id="later", name="later"))
    after = settled(tmp_path / "after")
    log = after.state_dir / "reconciler.db-wal"
    shutil.copy(before.settings.state_dir / log.name, log)

    with pytest.raises(Problem, match="restore_not_empty") as refusal:
        restore(after, file)
    assert log.name in refusal.value.found
    log.unlink()
    restore(after, file)
    engine = open_engine(after.database)
    with reading(engine) as conn:
        assert list(conn.execute(sa.select(tables.projects.c.id)).scalars()) == ["p1"]
    engine.dispose()


def cut_off(after: Settings, file: Path, module: ModuleType, name: str, when: str) -> None:
    """Restore in a process that is killed before or after a step of it."""
    real = getattr(module, name)

    def dies(*given: Any, **named: Any) -> None:
        if when == "after":
            real(*given, **named)
        os._exit(9)

    child = os.fork()
    if child == 0:
        setattr(module, name, dies)
        with contextlib.suppress(BaseException):
            restore(after, file)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, "it came that far"


@pytest.mark.parametrize(
    ("urls", "module", "name", "when"),
    [
        ("sqlite", archive, "put_back_database", "before"),
        ("sqlite", archive, "put_back_database", "after"),
        ("sqlite", migrations, "migrate", "after"),
        # Not committed, and committed.
        ("sqlite", restoring, "_doubt", "after"),
        ("sqlite", restoring, "_put_keys", "before"),
        ("sqlite", restoring, "_put_keys", "after"),
        pytest.param(
            "postgresql", archive, "put_back_database", "after", marks=pytest.mark.postgres
        ),
    ],
    indirect=["urls"],
)
@pytest.mark.covers("CTRL-2", "I4", "I12", "I13")
def test_a_restore_that_was_cut_off_is_opened_by_nobody_and_begun_again(
    before: Life, urls: tuple[str, str], tmp_path: Path, module: ModuleType, name: str, when: str
) -> None:
    adopt(before.settings, before.engine)
    file, other = tmp_path / "site.tar.gz", tmp_path / "other.tar.gz"
    archive.write(before.settings, file)
    archive.write(before.settings, other)
    before.engine.dispose()
    after = settled(tmp_path / "after", urls[1])

    cut_off(after, file, module, name, when)

    with pytest.raises(Problem, match="restore_unfinished"):
        open_migrated(after)
    with pytest.raises(Problem, match="restore_unfinished"):
        archive.write(after, tmp_path / "half.tar.gz")
    if (name, when) != ("put_back_database", "before"):
        with pytest.raises(Problem, match="restore_not_empty"):
            restore(after, other)
    done = restore(after, file)
    assert (done["lost_tasks"], len(done["closed_slots"])) == ([before.task], 1)
    engine, _ = open_migrated(after)
    adopt(after, engine)
    with reading(engine) as conn:
        assert queue.get(conn, before.task).state == "lost"
        by_status = {slot.status: slot for slot in slots.of_node(conn, "n1")}
        assert set(by_status) == {"active", "cleanup_blocked", "disabled"}
        assert by_status["disabled"].fence > YEARS
        restored = list(journal.audit_rows(conn, action="admin.service.restored"))
        assert len(restored) == 1, "doubted once"
    engine.dispose()
    # No unpacked file is left, because a backup holds keys.
    left = {path.name for path in after.state_dir.iterdir()}
    assert left - {"reconciler.db", "reconciler.db-wal", "reconciler.db-shm"} == {
        "restored-settings.env",
        "trust",
        "gateway",
    }
    with pytest.raises(Problem, match="restore_not_empty"):
        restore(after, file)


@pytest.mark.parametrize("urls", ["sqlite"], indirect=True)
def test_database_and_keys_are_durable_before_a_restore_counts_as_complete(
    before: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database may be on another file system than the mark of an unfinished restore, so a loss
    of power could otherwise undo its rename and not the removal of the mark.
    """
    file = tmp_path / "site.tar.gz"
    archive.write(before.settings, file)
    before.engine.dispose()
    after = settled(tmp_path / "after")
    calls: list[str] = []
    replace, fsync, unlink = Path.replace, os.fsync, Path.unlink

    def renaming(path: Path, target: Path) -> Path:
        calls.append(f"rename {target.name}")
        return replace(path, target)

    def syncing(descriptor: int) -> None:
        fsync(descriptor)
        if Path(f"/proc/self/fd/{descriptor}").resolve() == after.state_dir:
            calls.append("sync")

    def unlinking(path: Path, missing_ok: bool = False) -> None:
        calls.append(f"remove {path.name}")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "replace", renaming)
    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Path, "unlink", unlinking)
    restore(after, file)
    for renamed in ("rename reconciler.db", "rename trust"):
        assert calls[calls.index(renamed) + 1] == "sync", calls
    assert calls.index("rename trust") < calls.index(f"remove {MARK}")


def test_a_restore_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    """Only an interrupted restore may be repeated: a repetition here would delete its keys."""
    new = settled(tmp_path / "new")
    new.state_dir.mkdir(parents=True, exist_ok=True)
    file = tmp_path / "backup.tar"
    file.write_bytes(b"of no matter")
    with locked(new), archive.work_folder(new.state_dir, ".restore-") as folder:
        with pytest.raises(Problem, match="another restore that is running"):
            restore(new, file)
        assert folder.exists()


def test_a_restore_and_a_service_keep_each_other_out(tmp_path: Path) -> None:
    """A service goes on with the files that it has open, wherever they were moved."""
    new = settled(tmp_path / "new")
    file = tmp_path / "backup.tar"
    file.write_bytes(b"of no matter")
    with in_use(new), in_use(new):
        # A child that outlives the service does not keep its lock.
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
        with pytest.raises(Problem, match="service_running"):
            restore(new, file)
    try:
        with locked(new), pytest.raises(Problem, match="restore_unfinished"), in_use(new):
            pass
    finally:
        child.kill()
        child.wait()


@pytest.mark.covers("CTRL-2")
def test_keys_that_are_not_the_sites_are_not_saved_and_not_restored(
    before: Life, urls: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No service would open that site."""
    adopt(before.settings, before.engine)
    file = tmp_path / "site.tar.gz"
    archive.write(before.settings, tmp_path / "sound.tar.gz")
    trust = before.settings.state_dir / "trust"
    shutil.rmtree(trust)
    open_trust(before.settings.state_dir)
    with pytest.raises(Problem, match="authorities_differ") as refusal:
        archive.write(before.settings, file)
    assert "host_ca, user_ca" in refusal.value.found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "sound.tar.gz"]
    with monkeypatch.context() as earlier:
        earlier.setattr(archive, "other_authorities", lambda *_: None)
        archive.write(before.settings, file)
    after = settled(tmp_path / "after", urls[1])
    with pytest.raises(Problem, match="authorities_differ"):
        restore(after, file)
    assert list(after.state_dir.iterdir()) == []
    assert restore(after, tmp_path / "sound.tar.gz")["lost_tasks"] == [before.task]


def with_gateway(life: Life, postgres: Server, file: Path) -> tuple[str, ...]:
    """Back a site with the gateway's role up; returns the words by which the server is asked."""
    with reading(life.engine) as conn:
        text = role.sql(conn, 40).replace("\\set ON_ERROR_STOP on", "")
    where = ("-h", str(postgres.folder), "-U", "gpuaas")
    postgres.run("psql", *where, "-d", str(life.engine.url.database), "-c", text)
    archive.write(life.settings, file)
    life.engine.dispose()
    return where


def gateway_reads(url: str) -> bool:
    engine = open_engine(url)
    query = f"SELECT has_column_privilege('{role.NAME}', 'nodes', 'address', 'SELECT')"
    with reading(engine) as conn:
        given = conn.exec_driver_sql(query).scalar_one()
    engine.dispose()
    return bool(given)


@pytest.mark.postgres
@pytest.mark.covers("CTRL-2")
@pytest.mark.parametrize("urls", ["postgresql"], indirect=True)
def test_a_site_is_restored_on_a_server_without_its_other_roles(
    before: Life, urls: tuple[str, str], postgres: Server, tmp_path: Path
) -> None:
    """Roles belong to the server, not to the database, so no dump has them."""
    file = tmp_path / "site.tar.gz"
    where = with_gateway(before, postgres, file)
    same = restore(settled(tmp_path / "same", urls[1]), file)
    assert "rights_not_restored" not in same and gateway_reads(urls[1])
    for url in urls:
        postgres.database(str(sa.make_url(url).database))
    postgres.run("dropuser", *where, role.NAME)
    other = restore(settled(tmp_path / "other", urls[1]), file)

    assert f'role "{role.NAME}" does not exist' in other["rights_not_restored"]
    assert other["lost_tasks"] == [before.task]
    with pytest.raises(Problem, match="restore_not_empty"):
        restore(settled(tmp_path / "third", urls[1]), file)


@pytest.mark.postgres
@pytest.mark.covers("CTRL-2")
@pytest.mark.parametrize("urls", ["postgresql"], indirect=True)
@pytest.mark.parametrize("when", ["before", "after"])
def test_rights_follow_a_restore_that_was_cut_off_near_them(
    before: Life, urls: tuple[str, str], postgres: Server, tmp_path: Path, when: str
) -> None:
    file = tmp_path / "site.tar.gz"
    where = with_gateway(before, postgres, file)
    after = settled(tmp_path / "after", urls[1])
    cut_off(after, file, archive, "put_back_rights", when)
    assert "rights_not_restored" not in restore(after, file)
    assert gateway_reads(urls[1])
    for url in urls:
        postgres.database(str(sa.make_url(url).database))
    postgres.run("dropuser", *where, role.NAME)


def test_a_copy_from_a_server_that_hangs_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keepalives do not help where a proxy acknowledges everything."""
    program, used = tmp_path / "bin/pg_dump", tmp_path / "used"
    program.parent.mkdir()
    copies = f'cp "$PGSERVICEFILE" {used}.new; mv {used}.new {used}'
    program.write_text(f"#!/bin/sh\n{copies}\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(archive, "_LOOK_S", 0.1)
    # Hours pass from when the program has begun, however long a busy machine takes for that.
    hours = itertools.count(0, 3600)
    passing = SimpleNamespace(monotonic=lambda: next(hours) if used.exists() else 0)
    monkeypatch.setattr(archive, "time", passing)
    engine = open_engine("postgresql+psycopg://gpuaas@127.0.0.1:1/gpuaas?keepalives_idle=7")
    with pytest.raises(Problem, match="nothing new in"):
        archive.copy_database(engine, tmp_path / "copy")
    given = used.read_text().splitlines()
    assert {"connect_timeout=10", "tcp_user_timeout=25000", "keepalives_idle=7"} <= set(given)


@pytest.mark.postgres
def test_the_database_is_copied_the_way_that_the_service_goes(
    postgres: Server, tmp_path: Path
) -> None:
    url = postgres.database(f"b_{uuid.uuid4().hex[:8]}")
    engine = open_engine(f"{url}&application_name=a%20copy")
    archive.copy_database(engine, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_size
    engine.dispose()


@pytest.mark.postgres
def test_no_password_goes_to_a_server_without_the_tls_that_the_service_insists_on(
    tmp_path: Path,
) -> None:
    received = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(10)
                received.append(connection.recv(100))
                connection.sendall(b"N")
                received.append(connection.recv(100))

        listener = threading.Thread(target=answer, daemon=True)
        listener.start()
        where = f"127.0.0.1:{server.getsockname()[1]}/gpuaas?sslmode=verify-full"
        engine = open_engine(f"postgresql+psycopg://gpuaas:secret@{where}")
        with pytest.raises(Problem, match="SSL"):
            archive.copy_database(engine, tmp_path / "copy")
        listener.join(30)
    request_for_tls = bytes([0, 0, 0, 8, 4, 210, 22, 47])
    assert received == [request_for_tls, b""]


def test_a_strange_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "strange.tar"
    for name, content in (("../../escaped", b"x"), ("manifest.json", b"{}"), ("other", b"x")):
        with tarfile.open(file, "w") as tar:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        with pytest.raises(Problem, match="backup_unreadable"):
            restore(settled(tmp_path / "new"), file)
    file.write_text("no archive")
    with pytest.raises(Problem, match="backup_unreadable"):
        restore(settled(tmp_path / "new"), file)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_backup_of_an_unknown_schema_is_refused(
    on_sqlite: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "site.tar.gz"
    archive.write(on_sqlite.settings, file)
    monkeypatch.setattr("reconciler.db.migrations.revisions", lambda: ("0001",))
    with pytest.raises(Problem, match=r"backup_schema_unknown.* revision 0001"):
        restore(settled(tmp_path / "new"), file)
    assert not (tmp_path / "new" / "reconciler.db").exists()


def test_without_a_site_there_is_nothing_to_back_up(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="database_missing"):
        archive.write(settled(tmp_path / "none"), tmp_path / "file")
    # Nor at the path of a wrong URL, which SQLite would create.
    database = tmp_path / "other.db"
    other = settled(tmp_path / "none", f"sqlite:///{database}")
    open_trust(other.state_dir)
    with pytest.raises(Problem, match="database_missing"):
        archive.write(other, tmp_path / "file")
    assert not database.exists()
    database.touch()
    with pytest.raises(Problem, match="database_missing"):
        archive.write(other, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_what_a_killed_backup_left_is_removed_and_of_a_running_one_not(
    on_sqlite: Life, tmp_path: Path
) -> None:
    """It is the database and the private keys."""
    left = tmp_path / ".gpuaas-backup-left"
    left.mkdir()
    (left / "database").write_text("secret")
    with archive.work_folder(tmp_path) as running:
        assert not left.exists()
        archive.write(on_sqlite.settings, tmp_path / "site.tar.gz")
        assert sorted(tmp_path.iterdir()) == [running, tmp_path / "site.tar.gz"]
    assert not running.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_backup_that_is_ended_leaves_nothing(
    on_sqlite: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def ended(_engine: sa.Engine, copy: Path) -> None:
        copy.write_text("secret")
        os.kill(os.getpid(), number)

    monkeypatch.setattr(archive, "copy_database", ended)
    monkeypatch.setenv("GPUAAS_STATE_DIR", str(on_sqlite.settings.state_dir))
    former = signal.getsignal(number)
    with pytest.raises(SystemExit):
        backup(tmp_path / "site.tar.gz")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) == former


def test_a_backup_goes_into_a_folder_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="backup_folder_missing"):
        archive.write(settled(tmp_path / "site"), tmp_path / "none" / "file")
