"""The gateway's role in PostgreSQL: enough for its whole life, and for nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.errors import InsufficientPrivilege

from reconciler.db import leader
from reconciler.db.engine import open_engine, reading, transaction
from reconciler.db.migrations import head, migrate
from reconciler.gateway import role
from reconciler.model.errors import Problem
from reconciler.records import ssh_sessions, terminals
from reconciler.service.process import Heartbeat, adopt_gateway
from reconciler.settings import Settings
from tests.unit.reconciler.api.stack import ACT, Stack
from tests.unit.reconciler.conftest import PostgresDatabase
from tests.unit.reconciler.gateway.conftest import World
from tests.unit.reconciler.gateway.test_gateway import end_token
from tests.unit.reconciler.gateway.test_terminal import shell
from tests.unit.reconciler.service.service import until

pytestmark = [pytest.mark.covers("SLICE-10"), pytest.mark.postgres]

# All that is open, by table. Whatever else the schema has is closed.
READ = {
    "alembic_version": {"version_num"},
    "projects": {"id", "records_terminals"},
    "allocations": {
        *("id", "project_id", "node_id", "state", "capacity_shape", "username", "ssh_keys"),
        *("connection", "parameters", "requested_by", "owner", "created_at"),
    },
    "allocation_resource_claims": {"allocation_id", "slot_id", "position", "private_ip"},
    "nodes": {"id", "address", "port", "tenant_address", "tenant_port"},
    "node_certificates": {"public_key", "revoked_at"},
    "api_tokens": {"id", "parent_id", "owner", "role", "project_id", "expires_at", "revoked_at"},
    "ssh_keys": {
        *("id", "project_id", "public_key", "name", "token_id", "registered_by"),
        *("owner", "created_at", "expires_at", "revoked_at"),
    },
    "settings": {"name", "value"},
    "ssh_sessions": {
        *("id", "way", "allocation_id", "project_id", "actor", "owner", "fingerprint", "address"),
        *("opened_at", "seen_at", "closed_at", "reason", "bytes_in", "bytes_out"),
        "recording_digest",
    },
    "terminal_recordings": {"session_id", "project_id", "size"},
    "service_processes": {"id", "roles", "seen_at"},
}
INSERT = {
    "ssh_sessions": READ["ssh_sessions"] - {"closed_at"},
    "terminal_recordings": {"session_id", "project_id", "at", "size", "lines"},
    "audit_log": {
        *("at", "actor", "role", "action", "subject_kind", "subject_id", "project_id"),
        *("reason", "detail", "correlation_id"),
    },
    "service_processes": {"id", "roles", "host", "pid", "version", "started_at", "seen_at"},
}
UPDATE = {
    "ssh_sessions": {
        *("seen_at", "closed_at", "reason", "bytes_in", "bytes_out", "recording_digest")
    },
    "service_processes": {"roles", "seen_at"},
}


def plain(engine: sa.Engine, **changes: Any) -> str:
    """The engine's URL for libpq."""
    url = engine.url.set(drivername="postgresql", **changes)
    # libpq reads a plus as itself, SQLAlchemy writes it for a space.
    return url.render_as_string(hide_password=False).replace("+", "%20")


def gpuaas(engine: sa.Engine, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"GPUAAS_DATABASE_URL": plain(engine), "GPUAAS_STATE_DIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "reconciler.cli.main", *words],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def administer(engine: sa.Engine, text: str) -> None:
    """Run SQL as an administrator does."""
    words = ["psql", "-q", "-v", "ON_ERROR_STOP=1", plain(engine)]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def selling(postgres_database: PostgresDatabase, tmp_path: Path) -> Stack:
    settings = Settings(
        state_dir=tmp_path, public_url="http://198.51.100.1:8080", enrolment_insecure=True
    )
    stack = Stack(settings, postgres_database.restore())
    for step in (stack.add_node, stack.issue, stack.prepare, stack.sell):
        step()
    return stack


@pytest.fixture
def terminal() -> bool:
    return True


@pytest.fixture
def records(postgres_database: PostgresDatabase, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The role's own engine; of the selling site if the test has it."""
    if "selling" in request.fixturenames:
        site = request.getfixturevalue("selling").engine
    else:
        site = postgres_database.restore()
    with reading(site) as conn:
        text = role.sql(conn, 40)
    # Earlier rights are revoked, also on columns, and a second run loses nothing.
    administer(site, "CREATE ROLE gpuaas_gateway;" if not exists(site) else "")
    administer(site, "GRANT UPDATE (state), DELETE ON allocations TO gpuaas_gateway;")
    administer(site, text)
    administer(site, text)
    engine = open_engine(site.url.set(username=role.NAME).render_as_string(hide_password=False))
    yield engine
    engine.dispose()
    site.dispose()


def exists(engine: sa.Engine) -> bool:
    with reading(engine) as conn:
        query = sa.text("SELECT 1 FROM pg_roles WHERE rolname = 'gpuaas_gateway'")
        return conn.execute(query).first() is not None


def test_the_gateway_lives_on_its_role(world: World, records: sa.Engine) -> None:
    """Login, jump, terminal with a recording, refusals, the end of a token, its own process."""
    stack = world.stack
    with reading(records) as conn:
        role.require_least(conn)
    assert adopt_gateway(stack.settings, records).directory.name == "gateway"
    beats = Heartbeat(records, lambda: ["gateway"])
    beats.start()
    with transaction(stack.engine) as conn:
        terminals.record_terminals(conn, "demo", ACT, enabled=True)
    assert world.run("echo through").stdout == "through\n"
    assert "records what this terminal shows" in shell(world, "-tt", typed="exit\r").stdout
    until(lambda: all(s["closed_at"] for s in world.sessions()))
    until(lambda: any(s["recording_digest"] for s in world.sessions()))
    assert {s["way"] for s in world.sessions()} == {"jump", "terminal"}
    stranger = world.tree / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", stranger], check=True)
    assert world.run("id", config=world.config(key=stranger)).returncode == 255
    until(lambda: world.audit("gateway.refused"))
    line = world.ssh("sleep 60")
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as client:
        (session,) = until(lambda: [s for s in world.sessions() if not s["closed_at"]])
        end_token(world)
        assert client.wait(30) == 255
    sessions = world.stack.client("admin").get("projects/demo/ssh-sessions").json()["items"]
    assert session["id"] in {s["id"] for s in sessions}
    assert len(world.audit("gateway.opened")) == 3
    beats.stop()


def tried(conn: psycopg.Connection[Any], statement: str) -> str:
    """Why a statement was refused for the lack of a right; "" when the right is there."""
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(statement.encode())
    except InsufficientPrivilege as refusal:
        return str(refusal)
    except psycopg.Error:
        pass
    return ""


def test_every_table_and_column_is_closed_but_these(records: sa.Engine) -> None:
    """Tables and columns as the database lists them, so that a new one is closed."""
    rights: dict[str, dict[str, set[str]]] = {"SELECT": {}, "INSERT": {}, "UPDATE": {}}
    forms = {
        "SELECT": 'SELECT "{1}" FROM {0} LIMIT 0',
        "INSERT": 'INSERT INTO {0} ("{1}") VALUES (DEFAULT)',
        "UPDATE": 'UPDATE {0} SET "{1}" = DEFAULT WHERE false',
    }
    whole = (
        *("DELETE FROM {}", "TRUNCATE {} CASCADE", "LOCK {} IN EXCLUSIVE MODE"),
        *("SELECT 1 FROM {} FOR UPDATE", "SELECT 1 FROM {} FOR KEY SHARE", "DROP TABLE {}"),
        *("ALTER TABLE {} ADD x int", "ALTER TABLE {} DISABLE ROW LEVEL SECURITY"),
        "CREATE RULE x AS ON INSERT TO {} DO INSTEAD NOTHING",
    )
    opened = set()
    with psycopg.connect(plain(records), autocommit=True) as conn:
        columns = conn.execute(
            "SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid"
            " WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm')"
            " AND a.attnum > 0 AND NOT a.attisdropped"
        ).fetchall()
        assert len({table for table, _ in columns}) > 30
        for table, column in columns:
            for right, form in forms.items():
                if "permission denied" not in tried(conn, form.format(table, column)):
                    rights[right].setdefault(table, set()).add(column)
        for table in {table for table, _ in columns}:
            opened |= {(table, form) for form in whole if not tried(conn, form.format(table))}
        for statement in (
            *("CREATE TABLE t (i int)", "CREATE TEMPORARY TABLE t (i int)", "CREATE SCHEMA s"),
            *("SELECT setval('audit_log_id_seq', 1)", "SET SESSION AUTHORIZATION gpuaas"),
            *("SET ROLE gpuaas", "COPY (SELECT 1) TO '/tmp/x'"),
            "ALTER ROLE gpuaas_gateway CONNECTION LIMIT 1000",
        ):
            assert tried(conn, statement), statement
    # Rows may be locked where a column may be updated; tables may not.
    weak = {(t, f) for t, f in opened if " FOR " in f and t in UPDATE}
    assert (rights["SELECT"], rights["INSERT"], rights["UPDATE"]) == (READ, INSERT, UPDATE)
    assert opened == weak


def test_a_stolen_gateway_forges_nothing_of_others(world: World, records: sa.Engine) -> None:
    """By rules for rows: no other audit, no old session or recording, no other process."""
    engine = world.stack.engine
    opened = {"allocation_id": world.allocation, "project_id": "demo", "owner": ""}
    opened |= {"fingerprint": "", "address": "192.0.2.1"}
    with transaction(engine) as conn:
        old = ssh_sessions.open_session(conn, ACT, **opened, way="jump")
        ssh_sessions.close(conn, old, "closed", (1, 1))
        conn.exec_driver_sql("UPDATE ssh_sessions SET opened_at = 1, seen_at = 1, closed_at = 2")
        browser = ssh_sessions.open_session(conn, ACT, **opened, way="web")
    beats = Heartbeat(engine, lambda: ["api", "worker"])
    beats.start()
    audit = "INSERT INTO audit_log (at, actor, role, action, subject_kind, subject_id, project_id,"
    audit += " reason, detail, correlation_id) VALUES ({}, 'admin:a', '{}', '{}', '', '', '', '',"
    audit += " '{}', '')"
    now = "extract(epoch FROM clock_timestamp())"
    insert = "INSERT INTO service_processes (id, roles, host, pid, version, started_at, seen_at)"
    insert += f" VALUES ('x', '[\"{{}}\"]', '', 1, '', {{}}, {now} + {{}})"
    part = "INSERT INTO terminal_recordings (session_id, project_id, at, size, lines)"
    part += f" VALUES ('{{}}', 'demo', {now}, 1, 'x')"
    session = "INSERT INTO ssh_sessions (id, way, allocation_id, project_id, actor, owner,"
    session += " fingerprint, address, opened_at, seen_at, reason, bytes_in, bytes_out,"
    session += " recording_digest)"
    session += f" VALUES ('{{0}}{{1}}', '{{0}}', '{world.allocation}', 'demo', 'member:a', 'a', '',"
    session += f" '192.0.2.1', {now}, {now}, '', 0, 0, '')"
    with psycopg.connect(plain(records), autocommit=True) as conn:
        assert not tried(conn, audit.format(now, "", "gateway.refused", "{}"))
        for words in (
            (now, "", "project.terminal_recording", "{}"),
            (now, "platform-admin", "gateway.refused", "{}"),
            ("1", "", "gateway.refused", "{}"),
            # No reader of the log could show such rows, and they cannot be deleted.
            (now, "", "gateway.refused", "null"),
            (now, "", "gateway.refused", "[]"),
            (now, "", "gateway.refused", f'{{"words": "{"x" * 10_000}"}}'),
        ):
            assert "row-level security" in tried(conn, audit.format(*words)), words
        assert not tried(conn, insert.format("gateway", now, 0))
        for given in (("worker", now, 0), ("gateway", now, 1e6), ("gateway", "'-infinity'", 0)):
            assert "row-level security" in tried(conn, insert.format(*given)), given
        for id in (old, browser):
            assert "row-level security" in tried(conn, part.format(id))
        for statement in (
            "UPDATE ssh_sessions SET reason = 'forged'",
            "UPDATE service_processes SET seen_at = 0",
        ):
            assert conn.execute(statement).rowcount == 0, statement
        # Invented sessions block no terminal in the browser.
        for number in range(64):
            conn.execute(session.format("terminal", number).encode())
        assert "row-level security" in tried(conn, session.format("web", 1))
        with reading(engine) as service:
            count = partial(ssh_sessions.count_open, service, world.allocation, "a")
            assert (count("terminal"), count("web")) == ((65, 64), (1, 0))
        assert not tried(conn, part.format("terminal1"))
        assert conn.execute("SELECT name FROM settings").fetchall() == [("ssh_authorities",)]
        # Nor does it hold up the start of the service, or a terminal in a browser.
        conn.execute(insert.format("gateway", now, -1e6))
        # Values that no reader of a session takes, and a session that fell silent long ago.
        update = "UPDATE ssh_sessions SET {} WHERE id = 'terminal1'"
        long = "recording_digest = repeat('x', 5000)"
        for change in ("seen_at = 1", "closed_at = 'infinity'", "bytes_in = -1", long):
            assert "row-level security" in tried(conn, update.format(change)), change
        assert "row-level security" in tried(conn, session.format("x", 1))
        with transaction(engine) as service:
            service.exec_driver_sql(update.format("seen_at = 1"))
        conn.execute("BEGIN")
        conn.execute("SELECT id FROM service_processes FOR UPDATE")
        conn.execute("SELECT id FROM ssh_sessions FOR UPDATE")
        conn.execute("SELECT pg_advisory_xact_lock(7325011)")
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('gpuaas sessions demo', 0))")
        assert migrate(engine) == head()
        with transaction(engine) as service:
            service.exec_driver_sql("SET LOCAL lock_timeout = '1s'")
            ssh_sessions.take_turn(service, "demo")
            ssh_sessions.report(service, {browser: (1, 1)})
            assert ssh_sessions.close_silent(service) == 0
            leader.record_process(service, "next", ["api"], host="", pid=1, version="")
    beats.stop()


@contextmanager
def changed(engine: sa.Engine, change: str, back: str) -> Iterator[None]:
    administer(engine, change)
    try:
        yield
    finally:
        administer(engine, back)


def test_it_refuses_other_rights_by_name(
    postgres_database: PostgresDatabase, records: sa.Engine, tmp_path: Path
) -> None:
    site, name = postgres_database.engine, role.NAME

    def refusal(engine: sa.Engine = records) -> str:
        # Memberships and attributes count from the next connection on.
        engine.dispose()
        with pytest.raises(Problem, match="gateway_role_") as refused, reading(engine) as conn:
            role.require_least(conn)
        return f"{refused.value.code}: {refused.value.found}"

    with reading(records) as conn:
        role.require_least(conn)
    assert refusal(site).startswith("gateway_role_excessive: gpuaas: superuser")
    with reading(site) as conn:
        text = role.sql(conn, 40)
    for right, word in {
        "GRANT UPDATE (state) ON allocations TO {}": "UPDATE of allocations (state)",
        "GRANT SELECT ON api_tokens TO PUBLIC": "SELECT of api_tokens (created_at)",
        "GRANT DELETE ON audit_log TO {}": "DELETE of audit_log",
        "GRANT TRUNCATE ON audit_log TO {}": "TRUNCATE of audit_log",
        "GRANT UPDATE ON SEQUENCE audit_log_id_seq TO {}": "UPDATE of audit_log_id_seq",
        "GRANT CREATE ON SCHEMA public TO PUBLIC": "CREATE in public",
        "ALTER TABLE audit_log DISABLE ROW LEVEL SECURITY": "no rule for rows of audit_log",
        "CREATE TABLE later (i int); GRANT SELECT ON later TO {}": "SELECT of later (i)",
        "CREATE TABLE own (i int); ALTER TABLE own OWNER TO {}": "owner of own",
    }.items():
        back = "REVOKE ALL ON api_tokens FROM PUBLIC; DROP TABLE IF EXISTS later, own;" + text
        with changed(site, right.format(name), back):
            answer = refusal()
            assert answer.startswith("gateway_role_excessive") and word in answer, answer
    with changed(site, f"GRANT pg_read_all_data TO {name}", f"REVOKE pg_read_all_data FROM {name}"):
        assert "member of pg_read_all_data" in refusal()
    for attribute, words in {
        "BYPASSRLS": "passes by rules for rows",
        "CREATEROLE": "may create roles",
        "CREATEDB": "may create databases",
        "REPLICATION": "may replicate",
    }.items():
        back = f"ALTER ROLE {name} NO{attribute}"
        with changed(site, f"ALTER ROLE {name} {attribute}", back):
            assert refusal().startswith(f"gateway_role_excessive: {name}: {words}")
    with changed(site, f"REVOKE SELECT (state) ON allocations FROM {name}", text):  # noqa: S608
        assert refusal() == "gateway_role_insufficient: no SELECT of allocations (state)"
    # The commands themselves.
    printed = gpuaas(site, tmp_path, "gateway-role", "--connections", "40")
    assert printed.stdout == text, printed.stderr
    assert f"GPUAAS_DATABASE_URL=postgresql+psycopg://{name}:PASSWORD@/site" in printed.stderr
    refused = gpuaas(site, tmp_path, "gateway")
    assert refused.returncode and "gateway_role_excessive" in refused.stderr
