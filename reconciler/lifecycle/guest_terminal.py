"""Terminals of a guest: the files by which its sshd accepts the gateway's certificates.

A launch writes them with cloud-init. Into a running machine only its tenant can write, with a
script from here.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import sqlalchemy as sa

from reconciler.db import journal, rows
from reconciler.db.schema import Allocation, Node, allocations
from reconciler.lifecycle import ssh_access
from reconciler.model.act import Act
from reconciler.trust.ca import terminal_principal

_SSHD = "/etc/ssh/sshd_config.d/60-gpuaas-terminal.conf"
_AUTHORITY = "/etc/ssh/gpuaas-terminal-ca.pub"
_PRINCIPALS = "/etc/ssh/gpuaas-terminal-principals"
# The daemon's unit has either name, and a wrong file must not end its service.
_RELOAD = "sshd -t\nsystemctl reload ssh || systemctl reload sshd\n"


def files(allocation_id: str, username: str, authority: str, bridge: str) -> list[dict[str, str]]:
    """The guest's files that admit terminals of the gateway: for this user, from the host's bridge,
    and for terminals only. A tenant who deletes them disables terminals.
    """
    address = bridge.partition("/")[0]
    principal = terminal_principal(allocation_id)
    settings = (
        f"Match User {username}\n    TrustedUserCAKeys {_AUTHORITY}\n"
        f"    AuthorizedPrincipalsFile {_PRINCIPALS}\n"
    )
    return [
        {"path": _AUTHORITY, "content": f"{authority}\n"},
        {"path": _PRINCIPALS, "content": f'restrict,pty,from="{address}" {principal}\n'},
        {"path": _SSHD, "content": settings},
    ]


def script(written: Sequence[dict[str, str]]) -> str:
    """Shell script for root of the guest that writes the files, or removes them without any."""
    lines = ["set -e", "umask 022"]
    for file in written:
        lines.append(f"printf %s {shlex.quote(file['content'])} > {shlex.quote(file['path'])}")
    if not written:
        lines.append(f"rm -f {_SSHD} {_AUTHORITY} {_PRINCIPALS}")
    return "\n".join(lines) + f"\n{_RELOAD}"


def switch(conn: sa.Connection, allocation_id: str, act: Act, *, enabled: bool) -> Node:
    """Record whether the gateway offers terminals of a running slice. Returns the slice's node.

    Switching it off ends open terminals. Raises a Problem for a slice without them.
    """
    allocation = rows.get(conn, Allocation, allocation_id, lock=True)
    ssh_access.require_slice(conn, allocation)
    if bool(allocation.parameters.get("terminal")) is not enabled:
        parameters = {**allocation.parameters, "terminal": enabled}
        change = sa.update(allocations).where(allocations.c.id == allocation_id)
        conn.execute(change.values(parameters=parameters))
        journal.audit_of(conn, act, "terminal.switched", allocation, {"enabled": enabled})
    return rows.get(conn, Node, allocation.node_id)
