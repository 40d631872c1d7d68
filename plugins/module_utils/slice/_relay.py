"""Relay account of a slice host: the gateway's way to the SSH port of each live slice.

The gateway logs in with a certificate for `slice:<allocation>`. sshd accepts that principal only
while the account's file has its line, and the line permits connections to one guest only. So the
host decides what the gateway reaches. A separate authority signs these certificates: sshd accepts
it for no other account, and no other authority for this account.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _accounts,
    _change,
    _host,
    _ledger,
    _object_names,
    _sshd,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

ACCOUNT = "gpuaas-relay"
SHELL = "/usr/sbin/nologin"
PRINCIPALS = _accounts.principals(ACCOUNT)
SETTINGS = "/etc/ssh/sshd_config.d/61-gpuaas-relay.conf"
AUTHORITY = "/etc/ssh/gpuaas_relay_ca.pub"
PORT = 22
_KEY = re.compile(r"ssh-ed25519 [A-Za-z0-9+/=]{1,200}")
_LINE = re.compile(
    rf'restrict,port-forwarding,permitopen="([0-9.]+):{PORT}" slice:([0-9a-f-]{{36}})'
)


def line(allocation_id: str, ip: str) -> str:
    """The line that lets the gateway reach one guest, and nothing else."""
    _object_names.hexadecimal(allocation_id)
    try:
        address = str(IPv4Address(ip))
    except ValueError:
        raise _object_names.invalid("ip", "an IPv4 address", ip) from None
    return f'restrict,port-forwarding,permitopen="{address}:{PORT}" slice:{allocation_id}'


def lines() -> list[str]:
    """The lines of the file; [] without it."""
    return (_host.kept(PRINCIPALS) or "").splitlines()


def owner(text: str) -> str:
    """The allocation of a line; "" for a line that is none of ours."""
    match = _LINE.fullmatch(text)
    return match[2] if match else ""


def write(rest: Iterable[str]) -> None:
    """Replace the file."""
    _accounts.write_principals(ACCOUNT, "".join(f"{text}\n" for text in rest))


def settings() -> str:
    """sshd's settings for the account: forwarding, by certificate only, and nothing else."""
    return f"""# Of gpuaas.slice: the gateway's account on a slice host.
Match User {ACCOUNT}
    AuthenticationMethods publickey
    AuthorizedKeysFile none
    TrustedUserCAKeys {AUTHORITY}
    AuthorizedPrincipalsFile {PRINCIPALS}
    AllowTcpForwarding local
    AllowStreamLocalForwarding no
    AllowAgentForwarding no
    X11Forwarding no
    PermitTunnel no
    PermitListen none
    PermitTTY no
    PermitUserRC no
    MaxSessions 0
    ForceCommand {SHELL}
"""


@dataclass(frozen=True)
class State:
    """settings, authority: texts of the files, "" without them. pending: whether sshd has not taken
    its file yet.
    """

    account: _accounts.User | None
    settings: str
    authority: str
    lines: tuple[str, ...]
    pending: bool


def observe(params: _change.Params) -> State:
    if params["state"] == "present":
        _ledger.require_leased(params["slots"], params["allocation_id"])
    account = _accounts.named(ACCOUNT)
    present = {path: _host.kept(path) or "" for path in (SETTINGS, AUTHORITY)}
    pending = _sshd.pending(SETTINGS)
    return State(account, present[SETTINGS], present[AUTHORITY], tuple(lines()), pending)


def plan(params: _change.Params, state: State) -> _change.Plan:
    if params["state"] == "removed":
        return _removal(state)
    if params["state"] == "kept":
        # On a host without the settings, the next handover writes both.
        return _change.Plan(tuple(_files(params["authority"], state) if state.settings else ()))
    allocation = params["allocation_id"]
    present = [text for text in state.lines if owner(text) == allocation]
    if params["state"] == "absent":
        if not present:
            return _change.Plan()
        return _change.Plan((_change.Step("close_way", PRINCIPALS, present, []),))
    lines = [line(allocation, params["ip"])]
    steps = []
    if state.account is None:
        steps.append(_change.Step("add_account", ACCOUNT, None, SHELL))
    steps += _files(params["authority"], state)
    if present != lines:
        steps.append(_change.Step("open_way", PRINCIPALS, present, lines))
    return _change.Plan(tuple(steps), tuple(_foreign(state)))


def _files(authority: str, state: State) -> list[_change.Step]:
    """Steps for authority and settings. The authority comes first, because the settings name it."""
    steps = []
    if not _KEY.fullmatch(authority):
        raise _object_names.invalid("authority", "type and base64 of a public key", authority)
    if state.authority != authority:
        steps.append(_change.Step("write_authority", AUTHORITY, state.authority, authority))
        if state.authority and state.account is not None:
            # The earlier authority may be stolen, and sshd checks a certificate only at login.
            steps.append(_change.Step("end_sessions", ACCOUNT, None, "ended"))
    if state.pending or state.settings != settings().strip():
        before = "not taken by sshd" if state.pending else state.settings or None
        steps.append(_change.Step("write_settings", SETTINGS, before, "set"))
    return steps


def _removal(state: State) -> _change.Plan:
    if state.lines:
        owners = ", ".join(owner(text) or "another line" for text in state.lines)
        in_use = Refusal(
            "relay_in_use",
            expected="no slice to which the gateway leads",
            found=owners,
            remedy="release the slices first",
        )
        return _change.Plan(blockers=(in_use, *_foreign(state)))
    steps = []
    if state.settings or state.pending:
        steps.append(_change.Step("remove_settings", SETTINGS, "set", None))
    if state.authority:
        steps.append(_change.Step("remove_authority", AUTHORITY, "set", None))
    if state.account is not None:
        steps.append(_change.Step("remove_account", ACCOUNT, SHELL, None))
    return _change.Plan(tuple(steps), tuple(_foreign(state)))


def _foreign(state: State) -> list[Refusal]:
    """An account of that name with a shell or with root's rights is somebody else's."""
    if state.account is None or (state.account.uid and state.account.shell == SHELL):
        return []
    return [
        Refusal(
            "relay_account_foreign",
            expected=f"{ACCOUNT} with the shell {SHELL} and a uid that is not 0",
            found=f"uid {state.account.uid}, shell {state.account.shell}",
            remedy="remove or rename the account; the gateway's account is made by this module",
        )
    ]


def apply(params: _change.Params, step: _change.Step) -> dict[str, Any] | None:
    if step.name == "add_account":
        _accounts.add_login(ACCOUNT, SHELL)
    elif step.name == "write_authority":
        _host.write(AUTHORITY, f"{step.after}\n")
    elif step.name == "end_sessions":
        account = _accounts.named(ACCOUNT)
        if account is not None and account.uid:
            _accounts.end_processes(account.uid, grace=0)
    elif step.name == "remove_authority":
        _host.remove(AUTHORITY)
    elif step.name == "write_settings":
        _sshd.install(
            *(SETTINGS, settings(), "relay_not_taken"),
            expected="sshd to take the settings of the gateway's account",
            remedy="its earlier settings are back; repair sshd, then run again",
        )
    elif step.name == "remove_settings":
        _sshd.remove(SETTINGS)
    elif step.name == "remove_account":
        _accounts.remove_login(ACCOUNT)
    else:
        allocation = params["allocation_id"]
        rest = [text for text in lines() if owner(text) not in ("", allocation)]
        write([*rest, *step.after])
    return None


def facts(params: _change.Params, state: State) -> dict[str, Any]:
    owners = [owner(text) for text in state.lines]
    return {"relay": {"open": params.get("allocation_id") in owners}}


def exclusive(_params: _change.Params) -> AbstractContextManager[None]:
    """Lock of the principals file, which all slices share."""
    return _host.locked("/run/gpuaas/relay", mode=0o700)


SUBJECT = _change.Subject(observe, plan, apply, facts, exclusive=exclusive)
