"""A process of the service: its parts, its heartbeat and term, and the check of its authorities."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import sqlalchemy as sa
from sqlalchemy import Connection, Engine, exc

from reconciler.db import leader, migrations
from reconciler.db import settings as site
from reconciler.db.engine import open_engine, reading, retrying
from reconciler.db.leader import Term
from reconciler.db.schema import settings as stored
from reconciler.db.settings import AUTHORITIES
from reconciler.inventory import maas_sync, sync
from reconciler.lifecycle import drift, ssh_access
from reconciler.model.act import Act
from reconciler.model.errors import Problem
from reconciler.pools.supervisor import Supervisor
from reconciler.records import tokens
from reconciler.settings import Settings
from reconciler.trust.ca import (
    GATEWAY,
    Trust,
    authorities,
    export_gateway,
    gateway_ca,
    gateway_folder,
    host_keys,
    keep_gateway_ca,
    open_gateway,
    open_trust,
    replace_gateway_ca,
    revoke_host,
)
from reconciler.work.loops import Loop, Loops
from reconciler.work.worker import Worker

# Runbooks quote the lines of this logger, so their wording must not change.
log = logging.getLogger("gpuaas.leader")

# Pause between two looks for changes that NetBox or MAAS should show.
INVENTORY_S = 5.0
API, WORKER, LOOPS, GATE = "api", "worker", "loops", "gateway"
# Roles that a site needs besides the API, on any machine: they carry out and end all work.
NEEDED = (WORKER, LOOPS)


@contextmanager
def running(
    settings: Settings,
    engine: Engine,
    *,
    api: bool = False,
    work: bool = False,
    gateway: bool = False,
) -> Iterator[Heartbeat]:
    """Run all parts except the servers of API and gateway until the block ends.

    work: run tasks and, while this process is the leader, the loops. A process without it only
    reports that it is alive. The parts stop in reverse order: the loops first, then the heartbeat,
    which resigns, then the worker. Problem `schema_outdated`, after a SIGTERM that ends the block,
    when a newer version has migrated the database.
    """
    worker = Worker(settings, engine) if work and settings.workers else None

    def roles() -> list[str]:
        # A part whose thread has died or hangs has no role, even if the process lives on.
        working = worker is not None and worker.looking()
        looping = work and loops.turning()
        states = ((API, api), (WORKER, working), (LOOPS, looping), (GATE, gateway))
        return [role for role, active in states if active]

    def give_up() -> None:
        if worker is not None:
            worker.cease()
        # As an operator ends it: the servers stop in order, and runs on hosts go on.
        os.kill(os.getpid(), signal.SIGTERM)

    # A connection of its own: requests may occupy all others.
    own_engine = open_engine(settings.database)
    heartbeat = Heartbeat(own_engine, roles, term_s=settings.leader_lease_s, give_up=give_up)
    loops = Loops(settings, engine, heartbeat.term)
    # Each in a thread of its own, so that a NetBox or MAAS that hangs keeps no other loop waiting.
    inventories = [
        Loops(settings, engine, heartbeat.term, (loop,))
        for loop, url in (
            (Loop("netbox", INVENTORY_S, sync.tend), settings.netbox_url),
            (Loop("maas", INVENTORY_S, maas_sync.tend), settings.maas_url),
        )
        if url
    ]
    with ExitStack() as parts:
        parts.callback(own_engine.dispose)
        if worker is not None:
            worker.start()
            parts.callback(worker.stop)
        heartbeat.start()
        parts.callback(heartbeat.stop)
        if work:
            loops.start()
            parts.callback(loops.stop)
            supervisor = Supervisor(settings, engine)
            supervisor.start()
            parts.callback(supervisor.stop)
        for inventory in inventories if work else ():
            inventory.start()
            parts.callback(inventory.stop)
        try:
            yield heartbeat
        finally:
            if heartbeat.outdated is not None:
                raise heartbeat.outdated


def announce() -> None:
    """Tell systemd that this process answers, so that `systemctl start` returns then, not before.

    sd_notify(3): one datagram to the socket that the unit names. Elsewhere there is none.
    """
    name = os.environ.pop("NOTIFY_SOCKET", "")
    if not name:
        return
    # An address in Linux's abstract namespace is written with @.
    address = "\0" + name[1:] if name.startswith("@") else name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.sendto(b"READY=1", address)
    except OSError as failure:
        log.warning("cannot tell systemd that the service is ready: %s", failure)


class Heartbeat:
    """Heartbeat of a process in the database, and its candidacy for the leader's term.

    roles: the current roles of the process. Only with the role `loops` it may be the leader.
    give_up: ends the process, whose database a newer version has migrated; it does no tasks then.
    """

    def __init__(
        self,
        engine: Engine,
        roles: Callable[[], list[str]],
        *,
        term_s: float = 10.0,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.id = str(uuid.uuid4())
        self._engine = engine
        self._roles = roles
        self._give_up = give_up
        # The reason why this process ends.
        self.outdated: Problem | None = None
        self._candidate = False
        self._term_s = term_s
        self._every_s = min(leader.ELECTION_S, term_s / 4)
        self._term: tuple[Term, float] | None = None
        self._refused = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Beat once before returning, so that the process is listed from then on."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Resign and sign off, so that another process need not wait for the end of the term."""
        self._stopping.set()
        self._thread.join(timeout=10)
        try:
            retrying(self._engine, self._leave)
        except exc.SQLAlchemyError:
            log.warning("could not sign off in the database; the term ends when it expires")

    def term(self) -> Term | None:
        """The term that this process holds by its own clock; the database decides on each write."""
        if self._term is None or time.monotonic() - self._term[1] > self._term_s:
            return None
        return self._term[0]

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            self._beat()

    def _beat(self) -> None:
        before = self.outdated
        self._send()
        if self.outdated is not None and before is None:
            log.error("%s", self.outdated)
            self._give_up()

    def _send(self) -> None:
        sent_at = time.monotonic()
        try:
            term = retrying(self._engine, self._report)
        except Exception as failure:
            if self._term is not None:
                log.error("Leader DB connection lost: %s", failure)
                self._term = None
            else:
                log.warning("could not write the heartbeat of this process: %s", failure)
            return
        self._log_change(term)
        # Measured from before the request, because the term began while it was answered.
        self._term = None if term is None else (term, sent_at)

    def _report(self, conn: Connection) -> Term | None:
        try:
            # First: the statements below may not fit a newer schema.
            migrations.refuse_newer(conn)
        except Problem as newer:
            self.outdated = newer
        given_up = NEEDED if self.outdated else ()
        roles = [role for role in self._roles() if role not in given_up]
        leader.record_process(
            conn,
            self.id,
            roles,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=migrations.program_version(),
        )
        self._candidate = LOOPS in roles
        if self._candidate:
            return leader.campaign(conn, leader.LOOPS, self.id, self._term_s)
        if self._term is not None:
            if not self.outdated:
                log.error("the loops of this process hang; it gives the lead up")
            leader.resign(conn, self._term[0])
        return None

    def _log_change(self, term: Term | None) -> None:
        before = self._term[0].epoch if self._term else None
        if term is not None and term.epoch != before:
            log.info("leading, epoch %d", term.epoch)
        if term is None and self._candidate and (before is not None or not self._refused):
            log.info("Failed to acquire leader lock: another process leads")
        self._refused = term is None

    def _leave(self, conn: Connection) -> None:
        leader.remove_process(conn, self.id)
        if self._term is not None:
            leader.resign(conn, self._term[0])


def adopt(settings: Settings, engine: Engine) -> None:
    """Create the site's authorities at its first start, or raise a Problem if they differ here.

    All machines of a site share its authorities. With other keys a service could not reach any host
    of the site, and would enrol hosts that the other machines cannot reach. Of the gateway's
    authority a machine may have the public key alone.
    """
    with reading(engine) as conn:
        recorded = site.read(conn, AUTHORITIES)
    if recorded is not None and not (settings.state_dir / "trust" / "host_ca").exists():
        raise _differ(settings, "no keys")
    trust = open_trust(settings.state_dir)
    if recorded is not None and GATEWAY in recorded:
        keep_gateway_ca(trust, recorded[GATEWAY])
    local = {**authorities(trust), GATEWAY: gateway_ca(trust)}
    if _lacks(recorded, local):
        recorded = retrying(engine, partial(_record, local))
    if recorded != local:
        if {**(recorded or {}), GATEWAY: local[GATEWAY]} != local:
            raise _differ(settings, "other keys")
        # Another machine was first with the gateway's, or has replaced it.
        keep_gateway_ca(trust, (recorded or {})[GATEWAY], replace=True)
    if trust.gateway_authority.exists():
        export_gateway(trust, gateway_folder(settings.state_dir))


def adopt_issuer(settings: Settings, engine: Engine) -> None:
    """Record the site's OpenID provider.

    When the provider changes, tokens and keys of people of the earlier provider end, because its
    people can no longer be identified.
    """

    def work(conn: Connection) -> None:
        recorded = site.read(conn, site.ISSUER, "")
        if recorded == settings.oidc_issuer:
            return
        act = Act("service", "the site's OpenID provider is another one")
        if recorded:
            ssh_access.end_every_person(conn, act)
        site.write(conn, site.ISSUER, settings.oidc_issuer, act)

    retrying(engine, work)


def replace_gateway(settings: Settings, engine: Engine, act: Act) -> int:
    """Replace the gateway's authority, for this machine's gateway too, and have every slice host
    compared, which then accepts the new authority alone. Returns the number of these hosts.
    """
    trust = open_trust(settings.state_dir)
    local = authorities(trust)

    def record(key: str) -> None:
        retrying(engine, partial(_replace, settings, {**local, GATEWAY: key}, act))

    replace_gateway_ca(trust, record)
    export_gateway(trust, gateway_folder(settings.state_dir))
    with reading(engine) as conn:
        node_ids = drift.every_host(conn)
    for node_id in node_ids:
        retrying(engine, partial(drift.queue_comparison, node_id=node_id, act=act))
    return len(node_ids)


def _replace(settings: Settings, local: dict[str, str], act: Act, conn: Connection) -> None:
    conn.execute(sa.select(stored.c.name).where(stored.c.name == AUTHORITIES).with_for_update())
    recorded = site.read(conn, AUTHORITIES)
    if recorded is None or {**recorded, GATEWAY: local[GATEWAY]} != local:
        raise _differ(settings, "other keys")
    site.write(conn, AUTHORITIES, local, act)


def _lacks(recorded: dict[str, str] | None, local: dict[str, str]) -> bool:
    """Whether nothing is recorded, or all but the gateway's authority, which is newer."""
    return recorded is None or (GATEWAY not in recorded and recorded.items() <= local.items())


def _record(local: dict[str, str], conn: Connection) -> dict[str, str]:
    # Another machine may have recorded its authorities first, or be about to.
    conn.execute(sa.select(stored.c.name).where(stored.c.name == AUTHORITIES).with_for_update())
    recorded: dict[str, str] | None = site.read(conn, AUTHORITIES)
    if recorded is not None and not _lacks(recorded, local):
        return recorded
    site.write(conn, AUTHORITIES, local, Act("service", "the first start with these authorities"))
    return local


def adopt_gateway(settings: Settings, engine: Engine) -> Trust:
    """The keys of this machine's gateway, with every revoked host key. TrustError
    `gateway_trust_missing` or `gateway_trust_excessive`; Problem if they are not the site's.
    """
    trust = open_gateway(settings.state_dir)
    with reading(engine) as conn:
        recorded = site.read(conn, AUTHORITIES) or {}
        revoked = tokens.revoked_host_keys(conn)
    if any(recorded.get(name) != key for name, key in authorities(trust).items()):
        raise Problem(
            "authorities_differ",
            expected=f"the site's public keys in {trust.directory}",
            found="others",
            remedy="copy there what `gpuaas gateway-trust FOLDER` writes on the service's machine",
        )
    revoke_host(trust, *revoked)
    for key in host_keys(Trust(trust.directory.with_name("trust"))):
        if os.access(key, os.R_OK):
            log.warning("a gateway that is taken over reads %s, and holds every host with it", key)
    return trust


def _differ(settings: Settings, found: str) -> Problem:
    return Problem(
        "authorities_differ",
        expected=f"the site's SSH authorities in {settings.state_dir / 'trust'}",
        found=found,
        remedy="copy host_ca*, user_ca*, gateway_ca* and operator* from a machine of the site, with"
        " their modes, or restore them from a backup",
    )
