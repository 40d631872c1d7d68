"""Checks of the database: access, schema, clock, and records that need attention."""

from __future__ import annotations

import time
from collections.abc import Iterator

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, exc

from reconciler.backup import unfinished
from reconciler.db import clock, leader, migrations, rows
from reconciler.db import settings as site
from reconciler.db.engine import open_engine, reading
from reconciler.db.schema import Task, api_tokens, slots, tasks
from reconciler.doctor.finding import Finding, fail, ok, refused, warn
from reconciler.model.errors import Problem
from reconciler.model.states import Role, SlotState, TaskState
from reconciler.records import certificates
from reconciler.runs import lock
from reconciler.runs.paths import RunPaths, runs_directory
from reconciler.service.authorities import NAME
from reconciler.service.process import NEEDED
from reconciler.settings import Settings
from reconciler.trust.ca import Trust, authorities

# Certificates and tokens are checked by several clocks; a smaller difference has no effect.
_SKEW_S = 5.0
# Another worker takes over a task sooner than this.
_FORGOTTEN_S = 60.0
# Renewal begins a month before the end and is tried every day, so it has failed often by then.
_ENDING_S = 14 * 86_400.0


def database(settings: Settings) -> tuple[Engine | None, list[Finding]]:
    """The engine, None when the database cannot be checked further, and the findings."""
    try:
        unfinished.refuse(settings)
    except Problem as cut:
        return None, [refused("database", cut)]
    if not settings.database_url:
        file = settings.state_dir / "reconciler.db"
        if not file.is_file():
            return None, [_missing(f"no file {file}")]
        if file.stat().st_mode & 0o077:
            mode = f"{file.stat().st_mode & 0o777:03o}"
            return None, [
                fail(
                    "database",
                    f"{file} has mode {mode}",
                    expected="mode 600, because it contains hashes of tokens and keys",
                    remedy=f"chmod 600 {file}",
                )
            ]
    engine = open_engine(settings.database)
    try:
        revision = migrations.current(engine)
    except exc.DBAPIError as failure:
        engine.dispose()
        return None, [_missing(" ".join(str(failure.orig).split())[:300])]
    if revision != migrations.head():
        engine.dispose()
        return None, [
            fail(
                "schema",
                f"revision {revision or 'none'}",
                expected=f"revision {migrations.head()} of this version",
                remedy="make a backup, then `gpuaas migrate`; stop an older version of the service"
                " first",
            )
        ]
    url = engine.url.render_as_string(hide_password=True)
    return engine, [ok("database", url), ok("schema", f"revision {revision}")]


def contents(settings: Settings, engine: Engine) -> Iterator[Finding]:
    """Checks of the records."""
    with reading(engine) as conn:
        yield from _clock(conn)
        yield from _authorities(settings, conn)
        yield from _tokens(conn)
        yield from _hosts(conn)
        yield from _processes(conn)
        yield from _expired_leases(conn)
        yield from _run_locks(settings, conn)
        yield from _member_address(settings, conn)


def _clock(conn: Connection) -> Iterator[Finding]:
    before = time.time()
    theirs = clock.read(conn)
    ours = (before + time.time()) / 2
    text = f"{theirs - ours:+.1f} s between the database's clock and this machine's"
    if abs(theirs - ours) > _SKEW_S:
        yield fail(
            "clock",
            text,
            expected=f"less than {_SKEW_S:.0f} s, because both clocks check certificates",
            remedy="use the same time server on both machines",
        )
    else:
        yield ok("clock", text)


def _authorities(settings: Settings, conn: Connection) -> Iterator[Finding]:
    trust = Trust(settings.state_dir.resolve() / "trust")
    recorded = site.read(conn, NAME)
    if recorded is None or not trust.host_authority.exists() or not trust.user_authority.exists():
        return  # Missing keys are a finding of the check of the folder.
    if authorities(trust) == recorded:
        yield ok("authorities", "the keys of the site")
    else:
        yield fail(
            "authorities",
            f"keys in {trust.directory} that are not the site's",
            expected="the same SSH authorities on every machine",
            remedy="copy host_ca*, user_ca* and operator* from a machine of the site",
        )


def _tokens(conn: Connection) -> Iterator[Finding]:
    valid = sa.and_(
        api_tokens.c.role == Role.PLATFORM_ADMIN,
        api_tokens.c.revoked_at.is_(None),
        sa.or_(api_tokens.c.expires_at.is_(None), api_tokens.c.expires_at > clock.now()),
    )
    count = conn.execute(sa.select(sa.func.count()).select_from(api_tokens).where(valid)).scalar()
    if count:
        yield ok("tokens", f"{count} of platform admins")
    else:
        yield warn(
            "tokens",
            "no valid token of a platform admin",
            expected="a token, unless all admins use the OpenID provider",
            remedy="gpuaas token create --role platform-admin --name <you>",
        )


def _hosts(conn: Connection) -> Iterator[Finding]:
    """Host certificates that have expired, or will expire because their renewal failed."""
    now = clock.read(conn)
    until = certificates.of_living(conn)
    for node_id, end in sorted(until.items(), key=lambda item: item[1]):
        if end <= now:
            refusal = certificates.expired(node_id, end)
            text = f"node {node_id}: host_certificate_expired, {refusal.found}"
            yield refused("host_certificates", refusal, text)
        elif end <= now + _ENDING_S:
            yield warn(
                "host_certificates",
                f"node {node_id}: ends at {clock.iso(end)}",
                expected="a certificate that was renewed when a third of its validity was left",
                remedy=f"gpuaas nodes renew-certificate {node_id}; the node's tasks show why the"
                " renewal failed",
            )
    if all(end > now + _ENDING_S for end in until.values()):
        yield ok("host_certificates", f"{len(until)} hosts, all valid for two weeks or more")


def _processes(conn: Connection) -> Iterator[Finding]:
    living = leader.live_roles(conn)
    for role in NEEDED:
        if living.get(role):
            yield ok("processes", f"{living[role]} of the role {role}")
        else:
            yield warn(
                "processes",
                f"no heartbeat of the role {role} for {leader.STALE_S:.0f} s",
                expected="a running process of this role",
                remedy="start gpuaas.service, or gpuaas-worker.service beside gpuaas-api.service",
            )
    leads = leader.read(conn, leader.LOOPS)
    if living.get("loops") and not (leads and leads["live"]):
        yield fail(
            "leader",
            "candidates, but no leader",
            expected="a leader within two elections",
            remedy="search the workers' logs for `Leader DB connection lost`",
        )


def _expired_leases(conn: Connection) -> Iterator[Finding]:
    silent = tasks.c.lease_expires_at < clock.now() - _FORGOTTEN_S
    query = sa.select(tasks).where(tasks.c.state == TaskState.RUNNING, silent)
    expired = rows.every(conn, query.limit(20), Task)
    for task in expired:
        yield warn(
            "leases",
            f"task {task.id} ({task.kind}): the lease of {task.lease_owner} has expired",
            expected="a running worker that holds the lease",
            remedy="start a worker with the state folder of its run; without it the task is"
            f" given up at its deadline, {clock.iso(task.deadline_at)}",
        )
    if not expired:
        yield ok("leases", "every running task has a worker")


def _run_locks(settings: Settings, conn: Connection) -> Iterator[Finding]:
    """Runs that continue although their task has ended."""
    folder = runs_directory(settings.state_dir)
    locked = [path for path in sorted(folder.glob("*/lock")) if lock.held(path)]
    running = sa.select(tasks.c.run_id).where(tasks.c.state == TaskState.RUNNING)
    run_ids = set(conn.execute(running).scalars())
    stale = [path.parent for path in locked if path.parent.name not in run_ids]
    for run in stale:
        yield warn(
            "run_locks",
            f"run {run.name} continues without a task",
            expected="runs of running tasks only",
            remedy=f"touch {RunPaths(run).cancel}: the run ends within a second or two",
        )
    if not stale:
        yield ok("run_locks", f"{len(locked)} runs in progress")


def _member_address(settings: Settings, conn: Connection) -> Iterator[Finding]:
    """Tenants of slices get an address to connect to."""
    if settings.member_address:
        yield ok("member_address", settings.member_address)
        return
    on_sale = sa.select(sa.func.count()).where(slots.c.status == SlotState.AVAILABLE)
    count = conn.execute(on_sale).scalar()
    if count:
        yield warn(
            "member_address",
            f"{count} slots on sale, and GPUAAS_MEMBER_ADDRESS is not set",
            expected="the address for the tenants' SSH connections",
            remedy="set GPUAAS_MEMBER_ADDRESS; until then connection.host of a slice is empty",
        )
    else:
        yield ok("member_address", "not set, and no slot is on sale")


def _missing(text: str) -> Finding:
    return fail(
        "database",
        text,
        expected="a database that answers",
        remedy="set GPUAAS_STATE_DIR or GPUAAS_DATABASE_URL to the service's values, and check that"
        " the database runs; the service creates a new database at its first start",
    )
