"""Pools in slices and on whole machines: which pool a launch may name, and how workers start there.

Their token opens jobs of the pool and nothing else, because its tenant is root. It ends with the
allocation. Processes in a guest are proven absent by the absence of its machine only.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Network
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from reconciler import names
from reconciler.db import journal, rows
from reconciler.db.schema import Allocation, Pool
from reconciler.db.schema import pools as table
from reconciler.model.act import Act
from reconciler.model.errors import Problem, not_found
from reconciler.model.hardware import Offer
from reconciler.model.pools import GUEST, LIVE_POOLS, SERVING_POOLS
from reconciler.records import reports
from reconciler.records.tokens import digest
from reconciler.settings import Settings

# What an image with the program declares in its `runtime`.
KIT = "worker-kit"
PROGRAM = "/opt/gpuaas/bin/gpuaas"
MODELS = "/var/lib/gpuaas/models"
TOKEN = "/etc/gpuaas/worker.token"  # noqa: S105
UNIT = "/etc/systemd/system/gpuaas-worker@.service"
# Characters that mean nothing to systemd, shells and templates.
_URL = re.compile(r"https://[A-Za-z0-9.:-]+(/[A-Za-z0-9._/-]*)?")
# As in a pool on a machine of the service, a worker gives its job back before it is killed.
_DRAIN = 0.8
# A launch waits so long for the addresses of the API's name.
_LOOKUP_S = 5.0

# RestartSteps is known to systemd 254 and later; before, each pause has 15 s. A worker that is
# dismissed ends with status 0, and is not started again.
_SERVICE = f"""\
[Unit]
Description=Worker %i of a pool for inference jobs
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={PROGRAM} --api {{url}} jobs worker --pool-token ${{{{CREDENTIALS_DIRECTORY}}}}/token\
 --models {MODELS}{{models}} --memory {{memory}} --drain {{drain:.1f}}
DynamicUser=yes
LoadCredential=token:{TOKEN}
Environment=SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
MemoryMax={{memory}}M
OOMPolicy=kill
Restart=on-failure
RestartSec=15
RestartSteps=5
RestartMaxDelaySec=300
TimeoutStopSec={{grace}}

[Install]
WantedBy=multi-user.target
"""


def api_addresses(settings: Settings) -> list[str]:
    """Addresses of the API; Problem `pool_unreachable` unless its URL is one for guests."""
    url = settings.api_url
    try:
        name = urlsplit(url).hostname or ""
        if not _URL.fullmatch(url):
            raise _unreachable(url)
        if settings.public_address:
            return [str(settings.public_address)]
        return names.addresses(name, _LOOKUP_S)
    except (OSError, ValueError) as error:
        raise _unreachable(f"{url}, a name without an IPv4 address") from error


def admit(conn: sa.Connection, key: str, project_id: str) -> Pool:
    """The living pool of a project with this id or name, locked, if a launch may have it.

    Pools of other projects do not exist for its members.
    """
    query = sa.select(table).where(
        sa.or_(table.c.id == key, table.c.name == key),
        table.c.project_id == project_id,
        table.c.state.in_(LIVE_POOLS),
    )
    query = query.order_by(sa.case((table.c.id == key, 0), else_=1)).with_for_update()
    pool = rows.first(conn, query, Pool)
    if pool is None:
        raise not_found("pool", key)
    if pool.host_id != GUEST:
        raise Problem(
            "pool_not_for_slices",
            expected="a pool with the target allocation",
            found=f"{pool.name}, whose workers run elsewhere",
            remedy="have an operator start one with `gpuaas pools start --target allocation`",
        )
    if pool.state not in SERVING_POOLS:
        raise Problem(
            "pool_ended",
            expected="a pool that serves",
            found=f"{pool.name}, {pool.state}",
            remedy="have an operator start another one",
        )
    if pool.allocation_id:
        raise Problem(
            "pool_in_use",
            expected="a pool that no allocation has",
            found=f"{pool.name}, which {pool.allocation_id} has",
            remedy="release that allocation, or name another pool",
        )
    return pool


def require_memory(pool: Pool, most: int) -> None:
    """Problem unless a machine with this memory, in MiB, has room for the pool's workers."""
    if pool.replicas * pool.memory_mib > most:
        raise Problem(
            "pool_memory_exceeded",
            422,
            expected=f"at most {most} MiB for all workers of the pool, as the machine has",
            found=f"{pool.replicas} x {pool.memory_mib} MiB",
            remedy="launch a larger machine, or have an operator start a smaller pool",
        )


def require_reach(offer: Offer, api: Sequence[str], machine: str) -> None:
    """Problem unless slices of this hardware reach the API. machine: the address of the host, which
    guests never reach.
    """
    for address in api:
        if address == machine or not offer.reaches(address):
            raise _unreachable(f"{address}, which guests on this hardware do not reach")


def unready(conn: sa.Connection, offers: Mapping[str, Offer], api: Sequence[str]) -> frozenset[str]:
    """Slice hosts whose guests are to reach the API by the profile, and do not by the networks that
    the host has applied. A host that has reported none has applied none.
    """
    return frozenset(
        node_id
        for node_id, profile, networks in reports.applied_networks(conn)
        if all(map(offers.get(profile, Offer()).reaches, api))
        and not all(map(_applied(networks or {}).reaches, api))
    )


def _applied(networks: Mapping[str, Any]) -> Offer:
    """What guests reach by a host's report, which may contain anything."""

    def valid(name: str) -> Iterator[str]:
        for text in networks.get(name) or ():
            with contextlib.suppress(ValueError):
                yield str(IPv4Network(text))

    return Offer(allowed=tuple(valid("allowed_networks")), denied=tuple(valid("denied_networks")))


def networks_not_applied(node_id: str) -> Problem:
    """Problem when only hosts have room whose guests do not reach the API yet."""
    return Problem(
        "networks_not_applied",
        expected="a host with room that has applied the networks of its hardware profile, by which"
        " workers in guests reach the API",
        found="only hosts whose newest parity report lacks these networks",
        remedy="have an operator run the bootstrap playbook on the hosts of this hardware, then"
        " `gpuaas nodes parity`; or use a pool with the target remote",
        detail={"nodes": [node_id]},
    )


def attach(
    conn: sa.Connection, pool: Pool, allocation: Allocation, act: Act, *, image_digest: str = ""
) -> None:
    """Record that the workers of an admitted pool run in this allocation."""
    update = sa.update(table).where(table.c.id == pool.id)
    conn.execute(update.values(allocation_id=allocation.id))
    detail = {"name": pool.name, "allocation_id": allocation.id, "image_digest": image_digest}
    journal.audit_of(conn, act, "pool.attached", pool, detail)


def mint(conn: sa.Connection, allocation_id: str, secret: str, act: Act) -> Pool | None:
    """Make this secret the token of the allocation's pool, which replaces its previous token.

    None if the launch named no pool, or the pool has been stopped since.
    """
    # The order of a release.
    rows.get(conn, Allocation, allocation_id, lock=True)
    query = sa.select(table).where(
        table.c.allocation_id == allocation_id, table.c.state.in_(SERVING_POOLS)
    )
    pool = rows.first(conn, query.with_for_update(), Pool)
    if pool is not None:
        update = sa.update(table).where(table.c.id == pool.id)
        conn.execute(update.values(token_hash=digest(secret), token_expires_at=None))
        detail = {"name": pool.name, "allocation_id": allocation_id}
        journal.audit_of(conn, act, "pool.token.issued", pool, detail)
    return pool


def detach(conn: sa.Connection, allocation_id: str, act: Act) -> None:
    """End the token of the allocation's workers. Another launch may have the pool then."""
    # Of a pool that has ended, the allocation stays in its record.
    query = sa.select(table).where(
        table.c.allocation_id == allocation_id, table.c.state.in_(LIVE_POOLS)
    )
    for pool in rows.every(conn, query.with_for_update(), Pool):
        update = sa.update(table).where(table.c.id == pool.id)
        conn.execute(update.values(token_hash="", allocation_id=None))
        detail = {"name": pool.name, "allocation_id": allocation_id}
        journal.audit_of(conn, act, "pool.detached", pool, detail)


def unit(pool: Pool, url: str) -> str:
    """Template unit of the workers."""
    return _SERVICE.format(
        url=url,
        models="".join(f" --model {name}" for name in pool.models),
        memory=pool.memory_mib,
        drain=pool.grace_s * _DRAIN,
        grace=pool.grace_s,
    )


def files(pool: Pool, secret: str, url: str) -> list[dict[str, str]]:
    """Files of the guest, for cloud-init: the token, which root alone reads, and the unit."""
    return [
        {"path": TOKEN, "content": f"{secret}\n", "permissions": "0600"},
        {"path": UNIT, "content": unit(pool, url), "permissions": "0644"},
    ]


def commands(pool: Pool, api_names: dict[str, str]) -> list[list[str]]:
    """Commands of the guest, for cloud-init: they start the workers, at each boot.

    api_names: address by name of the API, where the DNS of guests lacks the name.
    """
    add = 'printf "%s %s\\n" "$1" "$0" >> /etc/hosts'
    workers = [f"gpuaas-worker@{number}.service" for number in range(1, pool.replicas + 1)]
    return [
        *(["sh", "-c", add, name, address] for name, address in api_names.items()),
        ["install", "-d", "-m", "0755", MODELS],
        ["systemctl", "enable", "--now", "--no-block", *workers],
    ]


def _unreachable(found: str) -> Problem:
    return Problem(
        "pool_unreachable",
        expected="an https URL of the API that guests of slices reach: a public address, or one in"
        " allowed_networks of the hardware profile",
        found=found,
        remedy="have an operator set GPUAAS_PUBLIC_URL, or allow its network; or use a pool with"
        " the target remote",
    )
