"""The database: reachable, of this version, in time, and nobody's forgotten holds in it."""

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

# Certificates and tokens are judged by several clocks; within this nobody notices.
_SKEW_S = 5.0
# A worker that was just killed is replaced sooner.
_FORGOTTEN_S = 60.0
# Renewal begins a month before the end and is tried every day: what is left then has failed often.
_ENDING_S = 14 * 86_400.0


def database(settings: Settings) -> tuple[Engine | None, list[Finding]]:
    """The engine when the database can be asked further, and what was found on the way."""
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
                    expected="mode 600: it holds hashes of tokens and keys",
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
                remedy="back up, then `gpuaas migrate`; an older version of the service must be"
                " stopped first",
            )
        ]
    where = engine.url.render_as_string(hide_password=True)
    return engine, [ok("database", where), ok("schema", f"revision {revision}")]


def contents(settings: Settings, engine: Engine) -> Iterator[Finding]:
    """What only the database knows."""
    with reading(engine) as conn:
        yield from _clock(conn)
        yield from _authorities(settings, conn)
        yield from _tokens(conn)
        yield from _hosts(conn)
        yield from _processes(conn)
        yield from _forgotten(conn)
        yield from _held(settings, conn)
        yield from _reached(settings, conn)


def _clock(conn: Connection) -> Iterator[Finding]:
    before = time.time()
    theirs = clock.read(conn)
    ours = (before + time.time()) / 2
    found = f"{theirs - ours:+.1f} s between the database's clock and this machine's"
    if abs(theirs - ours) > _SKEW_S:
        yield fail(
            "clock",
            found,
            expected=f"less than {_SKEW_S:.0f} s: certificates are judged by both",
            remedy="let both machines follow one time server",
        )
    else:
        yield ok("clock", found)


def _authorities(settings: Settings, conn: Connection) -> Iterator[Finding]:
    trust = Trust(settings.state_dir.resolve() / "trust")
    known = site.read(conn, NAME)
    if known is None or not trust.host_authority.exists() or not trust.user_authority.exists():
        return  # Not made yet, or missing, which the look at the folder says.
    if authorities(trust) == known:
        yield ok("authorities", "those of the site")
    else:
        yield fail(
            "authorities",
            f"others in {trust.directory} than the site's",
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
            expected="one, unless all admins come through the OpenID provider",
            remedy="gpuaas token create --role platform-admin --name <you>",
        )


def _hosts(conn: Connection) -> Iterator[Finding]:
    """Whose certificate has ended, or will although it should have been renewed long ago."""
    now = clock.read(conn)
    until = certificates.of_living(conn)
    for node_id, end in sorted(until.items(), key=lambda item: item[1]):
        if end <= now:
            told = certificates.expired(node_id, end)
            found = f"node {node_id}: host_certificate_expired, {told.found}"
            yield refused("host_certificates", told, found)
        elif end <= now + _ENDING_S:
            yield warn(
                "host_certificates",
                f"node {node_id}: ends at {clock.iso(end)}",
                expected="one that was renewed when a third of its time was left",
                remedy=f"gpuaas nodes renew-certificate {node_id}; what keeps it from being"
                " renewed is in the node's tasks",
            )
    if all(end > now + _ENDING_S for end in until.values()):
        yield ok("host_certificates", f"{len(until)} hosts, all good for two weeks and more")


def _processes(conn: Connection) -> Iterator[Finding]:
    living = leader.live_roles(conn)
    for role in NEEDED:
        if living.get(role):
            yield ok("processes", f"{living[role]} of the role {role}")
        else:
            yield warn(
                "processes",
                f"none of the role {role} has been heard of for {leader.STALE_S:.0f} s",
                expected="one that lives",
                remedy="start gpuaas.service, or gpuaas-worker.service beside gpuaas-api.service",
            )
    leads = leader.read(conn, leader.LOOPS)
    if living.get("loops") and not (leads and leads["live"]):
        yield fail(
            "leader",
            "processes that may lead, and none that does",
            expected="a leader within two elections",
            remedy="look for `Leader DB connection lost` in the workers' logs",
        )


def _forgotten(conn: Connection) -> Iterator[Finding]:
    silent = tasks.c.lease_expires_at < clock.now() - _FORGOTTEN_S
    query = sa.select(tasks).where(tasks.c.state == TaskState.RUNNING, silent)
    found = rows.every(conn, query.limit(20), Task)
    for task in found:
        yield warn(
            "leases",
            f"task {task.id} ({task.kind}): nobody attends to it since {task.lease_owner}",
            expected="a holder that lives",
            remedy="start a worker with the state folder that has its run; without it the task is"
            f" given up at its deadline, {clock.iso(task.deadline_at)}",
        )
    if not found:
        yield ok("leases", "every running task is attended to")


def _held(settings: Settings, conn: Connection) -> Iterator[Finding]:
    """Runs that go on although their task is over."""
    folder = runs_directory(settings.state_dir)
    held = [path for path in sorted(folder.glob("*/lock")) if lock.held(path)]
    running = sa.select(tasks.c.run_id).where(tasks.c.state == TaskState.RUNNING)
    wanted = set(conn.execute(running).scalars())
    stale = [path.parent for path in held if path.parent.name not in wanted]
    for run in stale:
        yield warn(
            "run_locks",
            f"run {run.name} goes on, and no task waits for it",
            expected="runs of tasks that are running",
            remedy=f"touch {RunPaths(run).cancel}: it ends within a second or two",
        )
    if not stale:
        yield ok("run_locks", f"{len(held)} runs under way")


def _reached(settings: Settings, conn: Connection) -> Iterator[Finding]:
    """Whether the tenants of slices learn where to connect."""
    if settings.member_address:
        yield ok("member_address", settings.member_address)
        return
    on_sale = sa.select(sa.func.count()).where(slots.c.status == SlotState.AVAILABLE)
    count = conn.execute(on_sale).scalar()
    if count:
        yield warn(
            "member_address",
            f"{count} slots on sale, and GPUAAS_MEMBER_ADDRESS is not set",
            expected="the address under which tenants reach their slices by SSH",
            remedy="set GPUAAS_MEMBER_ADDRESS to it; until then connection.host of a slice is"
            " empty",
        )
    else:
        yield ok("member_address", "not set, and no slot is on sale")


def _missing(found: str) -> Finding:
    return fail(
        "database",
        found,
        expected="a database that answers",
        remedy="set GPUAAS_STATE_DIR or GPUAAS_DATABASE_URL as the service has it, and look whether"
        " the database runs; the service makes a new one at its first start",
    )
