"""Checks of what the service works with: OpenID provider, AWX, database and its records."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Iterator

import asyncssh
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, exc

from reconciler.api.security import provider
from reconciler.backup import refuse_unfinished_restore
from reconciler.db import clock, leader, migrations, rows
from reconciler.db import settings as site
from reconciler.db.engine import open_engine
from reconciler.db.schema import (
    Allocation,
    PoolWorker,
    Task,
    allocations,
    pool_workers,
    pools,
    slots,
    tasks,
)
from reconciler.doctor import Finding, fail, installation, ok, refused, warn
from reconciler.gateway.machine import Machine, probe
from reconciler.lifecycle import ssh_access
from reconciler.model.errors import Problem, Refusal
from reconciler.model.fabric import Isolation, isolation
from reconciler.model.pools import APART
from reconciler.model.states import (
    AllocationState,
    CapacityShape,
    NodeState,
    Role,
    SlotState,
    TaskState,
)
from reconciler.pools import hints
from reconciler.pools.control import SILENT_S
from reconciler.profiles import hardware_profile
from reconciler.records import certificates, images, nodes, tokens
from reconciler.runs import contract, lock
from reconciler.runs.awx import request
from reconciler.runs.awx.client import Client, awx_access
from reconciler.runs.paths import RunPaths, runs_directory
from reconciler.runs.spec import RunError
from reconciler.service.process import NEEDED
from reconciler.settings import Settings
from reconciler.trust import downloads, oidc
from reconciler.trust.ca import GATEWAY, Trust, authorities, open_gateway
from reconciler.work.ufm import Client as Ufm
from reconciler.work.ufm import ufm_access

# Certificates and tokens are checked by several clocks; a smaller difference has no effect.
_SKEW_S = 5.0
# A host and its guest answer within this time.
_ANSWER_S = 30.0
# A check without a particular slice does not wait longer for a slice that hangs.
_SAMPLE_S = 10.0
# Another worker takes over a task sooner than this.
_FORGOTTEN_S = 60.0
# Renewal begins a month before the end and is tried every day, so it has failed often by then.
_ENDING_S = 14 * 86_400.0


def identity_provider(settings: Settings) -> Iterator[Finding]:
    """The OpenID provider publishes usable keys under the configured issuer."""
    if not settings.oidc_issuer:
        return
    try:
        keys = oidc.Verifier(provider(settings)).read()
    except oidc.UNREADABLE as failure:
        text = " ".join(str(failure).split())[:200]
        yield warn(
            f"{settings.oidc_issuer}: {text or type(failure).__name__}",
            expected="a provider that publishes its keys under this issuer",
            remedy="correct GPUAAS_OIDC_ISSUER, or GPUAAS_OIDC_CA_FILE for a private CA;"
            " until then only tokens of `gpuaas token create` are accepted",
        )
        return
    yield warn(
        f"{settings.oidc_issuer}: {len(keys)} keys"
        if keys
        else f"{settings.oidc_issuer} publishes no usable key",
        unless=bool(keys),
        expected="a key for signatures with RSA, EC or Ed25519",
        remedy="configure such a key for the client at the provider",
    )


def awx(settings: Settings) -> Iterator[Finding]:
    """AWX answers and has a job template for each playbook."""
    if settings.launcher != "awx":
        return
    access = awx_access(settings)
    wrong: dict[str, RunError] = {}
    try:
        with Client(access) as client:
            templates = request.list_templates(client, access)
            setting = request.jinja_setting(client)
            # All templates may have the same project.
            read = functools.cache(client.get)
            for playbook in contract.PLAYBOOKS:
                try:
                    template = request.find_template(templates, access, playbook)
                    request.check_project(read, access, template)
                except RunError as refusal:
                    if not refusal.code.startswith(("awx_template_", "awx_project_")):
                        raise
                    wrong[playbook] = refusal
    except RunError as away:
        yield refused(away, f"{away.code}: {away.found}")
        return
    # Templates that differ, without settings that say which are right, are all refused alike.
    alike: dict[str, list[str]] = {}
    for playbook, problem in wrong.items():
        alike.setdefault(problem.found, []).append(playbook)
    for text, (playbook, *others) in alike.items():
        more = f" and {len(others)} others" if others else ""
        yield refused(wrong[playbook], f"{playbook}{more}: {text}")
    if not wrong:
        yield ok(f"{access.url}: {len(contract.PLAYBOOKS)} job templates as required")
    if not setting:
        yield warn(
            "the token's user may not read whether AWX expands templates in variables",
            expected="ALLOW_JINJA_IN_EXTRA_VARS to be template or never",
            remedy="look at it in AWX's job settings; until the user is a system auditor, text with"
            " marks of a template is not launched",
        )


def redis(settings: Settings) -> Iterator[Finding]:
    """The Redis that wakes workers has its streams, or makes them."""
    streams = hints.of(settings.redis_url)
    if streams is None:
        return
    failure = streams.check()
    yield warn(
        failure or f"{hints.STREAM} and its group",
        unless=not failure,
        expected=f"a Redis in which {hints.STREAM} and {hints.DEAD} are streams",
        remedy="correct GPUAAS_REDIS_URL, or delete a key that is no stream; until then workers ask"
        " the database, and no job is lost",
    )


def fabric(settings: Settings, conn: Connection) -> Iterator[Finding]:
    """The fabric of each profile that a node has: its subnet, and the settings of partitions."""
    live = (node for node in nodes.every(conn) if node.state != NodeState.RETIRED)
    users = Counter(node.profile for node in live if node.profile)
    partitioned = False
    for name, count in sorted(users.items()):
        try:
            profile = hardware_profile(settings.profiles_dir, name)
        except Problem as problem:
            yield warn(
                f"{name}.yml not read ({problem.code}), in use by nodes: {count}",
                expected="the profile of each node",
                remedy=f"put it into {settings.profiles_dir}, or correct it",
            )
            continue
        needed = "fabric_route" not in profile.get("not_applicable", ())
        if needed and not profile["fabric"].get("route"):
            yield warn(
                f"no fabric.route in {name}.yml, in use by nodes: {count}",
                expected="the subnet of the fabric, without which parity fails (fabric_route)",
                remedy=f"set it in {settings.profiles_dir / name}.yml",
            )
        partitioned |= isolation(profile) is Isolation.PARTITION
    if partitioned:
        try:
            ufm_access(settings)
        except RunError as missing:
            yield warn(
                f"{missing.code}: {missing.found}",
                expected=missing.expected,
                remedy=missing.remedy,
            )


def ufm(settings: Settings) -> Iterator[Finding]:
    """The site's UFM answers."""
    if not settings.ufm_url:
        return
    try:
        with Ufm(ufm_access(settings)) as manager:
            yield ok(f"{settings.ufm_url}: {len(manager.partitions())} partitions")
    except RunError as refusal:
        yield refused(refusal, f"{refusal.code}: {refusal.found}")


def database(settings: Settings) -> Iterator[Finding]:
    """The database of the site exists, is private and answers."""
    try:
        refuse_unfinished_restore(settings)
    except Problem as problem:
        yield refused(problem)
        return
    file = settings.sqlite_file
    if file is not None:
        if not file.is_file():
            yield _no_database(f"no file {file}")
            return
        if findings := list(installation.ownership(file, settings)):
            yield from findings
            return
        mode = file.stat().st_mode & 0o777
        if mode & 0o077:
            yield fail(
                f"{file} has mode {mode:03o}",
                expected="mode 600, because it contains hashes of tokens and keys",
                remedy=f"chmod 600 {file}",
            )
            return
    engine = open_engine(settings.database)
    try:
        migrations.current(engine)
        yield ok(engine.url.render_as_string(hide_password=True))
    except exc.DBAPIError as failure:
        yield _no_database(" ".join(str(failure.orig).split())[:300])
    finally:
        engine.dispose()


def schema(engine: Engine) -> Iterator[Finding]:
    """The schema is that of this version."""
    revision = migrations.current(engine)
    yield fail(
        f"revision {revision or 'none'}",
        unless=revision == migrations.head(),
        expected=f"revision {migrations.head()} of this version",
        remedy="make a backup, then `gpuaas migrate`; stop an older version of the service first",
    )


def same_clock(_settings: Settings, conn: Connection) -> Iterator[Finding]:
    """This machine and the database agree about the time."""
    before = time.time()
    theirs = clock.read(conn)
    ours = (before + time.time()) / 2
    yield fail(
        f"{theirs - ours:+.1f} s between the database's clock and this machine's",
        unless=abs(theirs - ours) <= _SKEW_S,
        expected=f"less than {_SKEW_S:.0f} s, because both clocks check certificates",
        remedy="use the same time server on both machines",
    )


def ssh_authorities(settings: Settings, conn: Connection) -> Iterator[Finding]:
    """The keys of this machine are those of the site."""
    trust = Trust(settings.state_dir.resolve() / "trust")
    recorded = site.read(conn, site.AUTHORITIES)
    if recorded is None or not trust.host_authority.exists() or not trust.user_authority.exists():
        return  # Missing keys are a finding of the check of the folder.
    equal = authorities(trust) == recorded
    yield fail(
        f"keys in {trust.directory} that are {'' if equal else 'not '}the site's",
        unless=equal,
        expected="the same SSH authorities on every machine",
        remedy="copy host_ca*, user_ca*, gateway_ca* and operator* from a machine of the site",
    )
    if GATEWAY not in recorded:
        yield warn(
            "no authority for gateways",
            expected="one that hosts accept for their relay account alone",
            remedy="restart the service, which makes it; then `gpuaas gateway-trust FOLDER` writes"
            " the keys for each gateway on another machine",
        )


def admin_tokens(_settings: Settings, conn: Connection) -> Iterator[Finding]:
    """A platform admin has a token."""
    count = len(tokens.valid(conn, role=Role.PLATFORM_ADMIN))
    yield warn(
        f"{count or 'no'} valid tokens of platform admins",
        unless=bool(count),
        expected="a token, unless all admins use the OpenID provider",
        remedy="gpuaas token create --role platform-admin --name <you>",
    )


def host_certificates(_settings: Settings, conn: Connection) -> Iterator[Finding]:
    """Host certificates that have expired, or will expire because their renewal failed."""
    now = clock.read(conn)
    until = certificates.of_living(conn)
    for node_id, end in sorted(until.items(), key=lambda item: item[1]):
        if end <= now:
            refusal = certificates.expired(node_id, end)
            text = f"node {node_id}: host_certificate_expired, {refusal.found}"
            yield refused(refusal, text)
        elif end <= now + _ENDING_S:
            yield warn(
                f"node {node_id}: ends at {clock.iso(end)}",
                expected="a certificate that was renewed when a third of its validity was left",
                remedy=f"gpuaas nodes renew-certificate {node_id}; the node's tasks show why the"
                " renewal failed",
            )
    if all(end > now + _ENDING_S for end in until.values()):
        yield ok(f"{len(until)} hosts, all valid for two weeks or more")


def image_files(settings: Settings, conn: Connection) -> Iterator[Finding]:
    """The files of registered images can be served."""
    files = [image for image in images.every(conn) if downloads.local(image.url)]
    for image in files:
        file = downloads.open_file(settings.images_dir, image.url)
        if file is None:
            yield warn(
                f"{image.name} {image.version}: {image.url} cannot be served",
                expected=f"a plain file in {settings.images_dir} that the service's user can read",
                remedy="put the file there, or set GPUAAS_IMAGES_DIR to its folder",
            )
        else:
            file.close()


def processes(_settings: Settings, conn: Connection) -> Iterator[Finding]:
    """A process of each role runs, and all are of this version."""
    version = migrations.program_version()
    for process in leader.processes(conn):
        if remedy := leader.other_version(process, version):
            yield warn(
                f"process {process['pid']} on {process['host']}"
                f" ({', '.join(process['roles']) or 'no role'}): version {process['version']}",
                expected=f"processes of version {version}",
                remedy=remedy,
            )
    live = leader.live_roles(conn)
    for role in NEEDED:
        yield warn(
            f"{live[role]} of the role {role}"
            if role in live
            else f"no heartbeat of the role {role} for {leader.STALE_S:.0f} s",
            unless=role in live,
            expected="a running process of this role",
            remedy="start gpuaas.service, or gpuaas-worker.service beside gpuaas-api.service",
        )


def job_workers(_settings: Settings, conn: Connection) -> Iterator[Finding]:
    """Workers of jobs that use the database are of this version. Others use the API."""
    version = migrations.program_version()
    query = sa.select(pool_workers).outerjoin(pools, pools.c.id == pool_workers.c.pool_id)
    query = query.where(
        pool_workers.c.ended_at.is_(None),
        pool_workers.c.pid != 0,
        pool_workers.c.beat_at > clock.now() - SILENT_S,
        pool_workers.c.version != version,
        sa.or_(pools.c.host_id.is_(None), pools.c.host_id.not_in(APART)),
    )
    for worker in rows.every(conn, query.limit(20), PoolWorker):
        yield warn(
            f"process {worker.pid} on {worker.host}: version {worker.version or 'unknown'}",
            expected=f"workers of jobs of version {version}",
            remedy="wait: its service replaces it"
            if worker.pool_id
            else "end it with SIGTERM, and start it from the present version",
        )


def loops_leader(_settings: Settings, conn: Connection) -> Iterator[Finding]:
    """A process leads, if there are candidates."""
    leads = leader.read(conn, leader.LOOPS)
    if leader.live_roles(conn).get("loops") and not (leads and leads["live"]):
        yield fail(
            "candidates, but no leader",
            expected="a leader within two elections",
            remedy="search the workers' logs for `Leader DB connection lost`",
        )


def leases(_settings: Settings, conn: Connection) -> Iterator[Finding]:
    """Every running task has a worker."""
    silent = tasks.c.lease_expires_at < clock.now() - _FORGOTTEN_S
    query = sa.select(tasks).where(tasks.c.state == TaskState.RUNNING, silent)
    expired = rows.every(conn, query.limit(20), Task)
    for task in expired:
        yield warn(
            f"task {task.id} ({task.kind}): the lease of {task.lease_owner} has expired",
            expected="a running worker that holds the lease",
            remedy="start a worker with the state folder of its run; without it the task is"
            f" given up at its deadline, {clock.iso(task.deadline_at)}",
        )
    if not expired:
        yield ok("every running task has a worker")


def run_locks(settings: Settings, conn: Connection) -> Iterator[Finding]:
    """Runs that continue although their task has ended."""
    folder = runs_directory(settings.state_dir)
    locked = [path.parent for path in sorted(folder.glob("*/lock")) if lock.held(path)]
    running = sa.select(tasks.c.run_id).where(tasks.c.state == TaskState.RUNNING)
    run_ids = set(conn.execute(running).scalars())
    stale = [run for run in locked if run.name not in run_ids]
    for run in stale:
        yield warn(
            f"run {run.name} continues without a task",
            expected="runs of running tasks only",
            remedy=f"touch {RunPaths(run).cancel}: the run ends within a second or two",
        )
    if not stale:
        yield ok(f"{len(locked)} runs in progress")


def way(allocation_id: str, settings: Settings, conn: Connection) -> Iterator[Finding]:
    """The gateway's way to a slice: the host lets it in, and the guest proves itself there."""
    yield _way(allocation_id, settings, conn, _ANSWER_S)


def any_way(settings: Settings, conn: Connection) -> Iterator[Finding]:
    """The gateway's way to one of the active slices: another slice each time, because the tenant of
    a slice can close it.
    """
    if not settings.member_address:
        return  # A finding of the check of that address.
    slice_ = allocations.c.capacity_shape == CapacityShape.GPU_SLICE
    runs = sa.and_(allocations.c.state == AllocationState.ACTIVE, allocations.c.stopped.is_(False))
    query = sa.select(allocations.c.id).where(slice_, runs).order_by(sa.func.random()).limit(1)
    id = conn.scalar(query)
    if id is None:
        yield ok("no slice runs, so there is no way to try")
        return
    finding = _way(id, settings, conn, _SAMPLE_S)
    yield warn(
        f"slice {id}: {finding.found}",
        unless=finding.status == "ok",
        expected=finding.expected,
        remedy=f"try others: run the doctor again, and `gpuaas doctor --allocation {id}`. A tenant"
        " can close the way to one slice; a fault of the site closes more",
    )


def _way(allocation_id: str, settings: Settings, conn: Connection, answer_s: float) -> Finding:
    try:
        grant = ssh_access.require_slice(conn, rows.get(conn, Allocation, allocation_id))
        # A guest that hangs would hold the transaction for longer than the server allows.
        conn.rollback()
        asyncio.run(Machine(open_gateway(settings.state_dir), grant, answer_s).greet())
    except Refusal as problem:
        return refused(problem, f"{problem.code}: {problem.found}")
    return ok(f"host {grant.node_id} leads to {grant.address}, which has its host key")


def member_address(settings: Settings, conn: Connection) -> Iterator[Finding]:
    """Tenants of slices get an address to connect to, and the gateway answers there."""
    if settings.member_address:
        name, port = settings.gateway
        trust = Trust(settings.state_dir / "trust")
        if GATEWAY not in authorities(trust):
            return  # A finding of the check of the authorities.
        try:
            asyncio.run(probe(trust, name, port))
        except (OSError, TimeoutError, asyncssh.Error) as failure:
            text = " ".join(str(failure).split()) or type(failure).__name__
            yield warn(
                f"{settings.member_address}: {text}",
                expected="a gateway with a certificate of this site's authority",
                remedy="start gpuaas-gateway.service with keys of `gpuaas gateway-trust FOLDER`,"
                " and let GPUAAS_MEMBER_ADDRESS lead to it",
            )
        else:
            yield ok(f"{settings.member_address} proves itself, and asks for a key")
        return
    on_sale = sa.select(sa.func.count()).where(slots.c.status == SlotState.AVAILABLE)
    count = conn.execute(on_sale).scalar()
    yield warn(
        f"{count or 'no'} slots on sale, and GPUAAS_MEMBER_ADDRESS is not set",
        unless=not count,
        expected="the address for the tenants' SSH connections",
        remedy="set GPUAAS_MEMBER_ADDRESS; until then connection.host of a slice is empty",
    )


def _no_database(text: str) -> Finding:
    return fail(
        text,
        expected="a database that answers",
        remedy="set GPUAAS_STATE_DIR or GPUAAS_DATABASE_URL to the service's values, and check that"
        " the database runs; the service creates a new database at its first start",
    )
