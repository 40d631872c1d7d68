"""Access to the machine of an allocation through the gateway: who, with which key, where to.

The same functions decide when a session begins and every two seconds while it is open. So the end
of the allocation, of the key, or of its token with its membership also ends the session. The
membership of a person of the OpenID provider is known at their logins only: one that shows a lost
project ends their keys for it (`end_lost`), and every key ends after `PROVIDER_S`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from reconciler.db import clock, rows
from reconciler.db.schema import Allocation, SshKey, allocations, claims, nodes
from reconciler.db.schema import ssh_keys as ssh_key_table
from reconciler.model.act import Act, roles_of
from reconciler.model.errors import Problem, not_found
from reconciler.model.states import ENDED_ALLOCATIONS, AllocationState, CapacityShape
from reconciler.records import ssh_keys, tokens

# A key of a member whom only the OpenID provider knows: their groups are unknown until they log in.
PROVIDER_S = 12 * 3600.0
_REGISTER = "register it with `gpuaas ssh-keys add`"
# By name here and below: the gateway's role in the database may read no other columns.
_COLUMNS = (
    *(allocations.c.id, allocations.c.project_id, allocations.c.node_id, allocations.c.state),
    *(allocations.c.capacity_shape, allocations.c.username, allocations.c.ssh_keys),
    *(allocations.c.connection, allocations.c.parameters, allocations.c.requested_by),
    *(allocations.c.owner, allocations.c.created_at),
)


def launched_with(conn: sa.Connection, project_id: str, line: str) -> bool:
    """Whether a machine of the project that has not ended was launched with this key."""
    theirs = sa.select(allocations.c.ssh_keys).where(
        allocations.c.project_id == project_id, allocations.c.state.not_in(ENDED_ALLOCATIONS)
    )
    key = ssh_keys.bare(line)
    given = conn.execute(theirs).scalars()
    return any(key == ssh_keys.bare(text) for lines in given for text in lines)


@dataclass(frozen=True)
class Grant:
    """Permission to connect. actor: the holder of the key, or the member of a session. owner: by
    which their sessions are counted.

    host, port: SSH server of the machine. Of a slice, that of its node, which relays to `address`;
    the server of a whole machine is the tenant's own, and `address` is "".
    terminal: whether the machine was told to accept the gateway's certificates.
    """

    allocation_id: str
    project_id: str
    actor: str
    owner: str
    fingerprint: str
    node_id: str
    whole: bool
    host: str
    port: int
    address: str
    username: str
    host_keys: tuple[str, ...]
    terminal: bool


def authorise(conn: sa.Connection, allocation_id: str, key: str) -> Grant:
    """Permission for a key, or a Problem. key: type and base64.

    The answer for an unknown allocation and for an unknown key is the same, because neither may be
    guessed.
    """
    allocation = conn.execute(sa.select(*_COLUMNS).where(allocations.c.id == allocation_id)).first()
    if allocation is None:
        raise _unknown()
    actor, owner = _holder(conn, allocation, key)
    return _grant(conn, allocation, actor, owner, ssh_keys.fingerprint(key))


def authorise_member(
    conn: sa.Connection, project_id: str, allocation_id: str, actor: str, owner: str = ""
) -> Grant:
    """Permission for a member of the project, whom the caller has authenticated, or a Problem."""
    query = sa.select(*_COLUMNS).where(
        allocations.c.id == allocation_id, allocations.c.project_id == project_id
    )
    allocation = conn.execute(query).first()
    if allocation is None:
        raise not_found("allocation", allocation_id)
    return _grant(conn, allocation, actor, owner)


def require_slice(conn: sa.Connection, allocation: Allocation) -> Grant:
    """The way to an active slice with known host keys, without a user yet; or a Problem."""
    grant = _grant(conn, allocation)
    require_terminal(replace(grant, terminal=not grant.whole))
    return grant


def require_terminal(grant: Grant) -> None:
    """Problem when the machine has no terminal, or its keys are not known."""
    if not grant.terminal:
        raise Problem(
            "terminal_off",
            expected="a slice with a terminal",
            found="a whole machine" if grant.whole else "one without",
            remedy="use `gpuaas ssh`"
            + ("" if grant.whole else ", or give it one with `gpuaas ssh-terminal`"),
        )
    if not grant.host_keys:
        raise Problem(
            "host_keys_unknown",
            expected="the host keys of the machine, as read at its start",
            found="none",
            remedy="launch it again",
        )


def _grant(
    conn: sa.Connection, allocation: Any, actor: str = "", owner: str = "", fingerprint: str = ""
) -> Grant:
    if allocation.state != AllocationState.ACTIVE:
        raise Problem(
            "allocation_not_active",
            expected="an active allocation",
            found=allocation.state,
            remedy="wait until `gpuaas allocations` shows it active, or launch another one",
        )
    columns = nodes.c
    whole = allocation.capacity_shape != CapacityShape.GPU_SLICE
    if whole:
        way: tuple[Any, ...] = (columns.tenant_address, columns.tenant_port, sa.literal(""))
    else:
        # The address of the guest is that of its first slot.
        slot = (claims.c.allocation_id == allocation.id, claims.c.slot_id.is_not(None))
        first = sa.select(claims.c.private_ip).where(*slot).order_by(claims.c.position).limit(1)
        way = (columns.address, columns.port, first.scalar_subquery())
    query = sa.select(*way).where(columns.id == allocation.node_id)
    host, port, address = conn.execute(query).one()
    return Grant(
        allocation_id=allocation.id,
        project_id=allocation.project_id,
        actor=actor,
        owner=owner,
        fingerprint=fingerprint,
        node_id=allocation.node_id,
        whole=whole,
        host=host,
        port=port,
        # The host relays to no empty address.
        address=address or "",
        username=str(allocation.connection.get("username", allocation.username)),
        host_keys=tuple(allocation.connection.get("host_keys", ())),
        terminal=bool(allocation.parameters.get("terminal")),
    )


def _holder(conn: sa.Connection, allocation: Any, key: str) -> tuple[str, str]:
    """Actor and owner to whom the key belongs, as the project knows it now."""
    record = ssh_keys.find(conn, allocation.project_id, key)
    if record is None:
        if key not in {ssh_keys.bare(line) for line in allocation.ssh_keys}:
            raise _unknown()
        actor, source = str(allocation.requested_by), allocation
        # A person's name may have this character, too.
        token_id = "" if _of_provider(actor) else actor.partition("#")[2]
        ends = allocation.created_at + PROVIDER_S if _of_provider(actor) else None
    else:
        actor, token_id, ends = record.registered_by, record.token_id or "", record.expires_at
        source = record
        _require_unrevoked(record)
    if ends is not None and ends <= clock.read(conn):
        raise _ended("ssh_key_expired", "a key that is still valid", "one that has expired")
    if not token_id:
        # A row from before owners were recorded names a person whose name others may have.
        return actor, source.owner or source.id
    owner = tokens.owner(conn, token_id, allocation.project_id)
    if not owner:
        raise _ended(
            "token_ended",
            "a key of a member whose token is valid",
            f"the token of {actor.partition('#')[0]} is revoked or has expired",
        )
    return actor, owner


def in_force(conn: sa.Connection, keys: Sequence[SshKey]) -> set[str]:
    """Ids of those of these registered keys that the gateway lets through now."""
    now = clock.read(conn)
    ids = sorted({key.token_id for key in keys if key.token_id})
    valid = {token.id for token in tokens.valid(conn, ids=ids)}
    return {
        key.id
        for key in keys
        if key.revoked_at is None
        and (key.expires_at is None or key.expires_at > now)
        and (not key.token_id or key.token_id in valid)
    }


def end_person(conn: sa.Connection, actor: str, act: Act) -> int:
    """End the keys of a person of the provider, and cut their sessions; returns their number.

    A key of a launch is let through for half a day because of the launch alone, so its end is
    recorded.
    """
    if not _of_provider(actor):
        return 0
    actors = roles_of(actor)
    registered = ssh_keys.of_person(conn, actors)
    return _end(conn, registered, allocations.c.requested_by.in_(actors), act)


def end_lost(conn: sa.Connection, owner: str, projects: Collection[str], act: Act) -> None:
    """End the keys and tokens of a person of the provider for all but these projects, of which
    their login has just shown that they are a member. owner: names of persons may be equal.
    """
    registered = ssh_keys.outside(conn, owner, projects)
    elsewhere = allocations.c.project_id.not_in(projects)
    _end(conn, registered, sa.and_(allocations.c.owner == owner, elsewhere), act)
    tokens.end_lost(conn, owner, projects, act)


def _end(
    conn: sa.Connection, registered: Iterable[SshKey], launched: sa.ColumnElement[bool], act: Act
) -> int:
    keys = {(key.project_id, key.public_key): key.registered_by for key in registered}
    recent = sa.select(allocations).where(
        launched, allocations.c.created_at > clock.now() - PROVIDER_S
    )
    for allocation in rows.every(conn, recent, Allocation):
        # A launch by a token ends with the token.
        for line in allocation.ssh_keys if _of_provider(allocation.requested_by) else ():
            if ssh_keys.find(conn, allocation.project_id, line) is None:
                keys[allocation.project_id, ssh_keys.bare(line)] = allocation.requested_by
    for (project_id, line), holder in keys.items():
        ssh_keys.end(conn, project_id, line, holder, act)
    return len(keys)


def end_every_person(conn: sa.Connection, act: Act) -> None:
    """End the tokens and keys of all people of a provider that is no longer the site's."""
    actors = tokens.persons(conn)
    for column, recent in (
        (ssh_key_table.c.registered_by, ssh_key_table.c.expires_at > clock.now()),
        (allocations.c.requested_by, allocations.c.created_at > clock.now() - PROVIDER_S),
    ):
        actors |= set(conn.execute(sa.select(column).where(recent)).scalars())
    for actor in sorted(filter(_of_provider, actors)):
        end_person(conn, actor, act)
        tokens.end_person(conn, actor, act)


def _of_provider(actor: str) -> bool:
    # "member:oidc:alice"; a stored token's name has no colon (`api.security`).
    return actor.partition(":")[2].startswith("oidc:")


def _require_unrevoked(record: SshKey) -> None:
    if record.revoked_at is not None:
        raise Problem(
            "ssh_key_revoked",
            403,
            expected="a key that its project accepts",
            found="one that it has revoked",
            remedy="make a new pair with `ssh-keygen -t ed25519` and " + _REGISTER,
        )


def _ended(code: str, expected: str, found: str) -> Problem:
    return Problem(code, 403, expected=expected, found=found, remedy=_REGISTER)


def _unknown() -> Problem:
    return Problem(
        "access_unknown",
        403,
        expected="an allocation's id as user name, and a key that its project knows",
        found="an unknown id, or a key that is not known there",
        remedy="compare both with `gpuaas allocations` and `gpuaas ssh-keys list`",
    )
