"""Where a capture runs: this machine, or one that is already trusted, over SSH or two of them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reconciler.model.errors import Problem
from reconciler.runs.ssh import SshAccess, options

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:%_-]{0,252}")
_USER = re.compile(r"[a-z_A-Z][A-Za-z0-9_.-]{0,63}")
_JUMP = re.compile(
    rf"((?P<user>{_USER.pattern})@)?(\[(?P<six>[0-9a-fA-F:]+)\]|(?P<host>[^:\[\]]+))(:(?P<port>\d{{1,5}}))?"
)

# The program comes over standard input: -I keeps the target's own modules out, -B leaves no caches.
_PYTHON = ("-I", "-B", "-")


@dataclass(frozen=True, kw_only=True)
class Target:
    """host empty: this machine. access: the reconciler's identity; without it the caller's own SSH
    configuration (config: another file), keys and known_hosts. alias: under which name the host key
    is known: the node's id, or the domain of a guest whose address others had before it.
    via: the machine to go through, which only carries what is encrypted for this one.
    """

    host: str = ""
    user: str = ""
    port: int = 0
    key: Path | None = None
    config: Path | None = None
    known_hosts: Path | None = None
    access: SshAccess | None = None
    alias: str = ""
    via: Target | None = None
    sudo: bool = False


def command(target: Target) -> list[str]:
    """The argument list that reads the harness on standard input."""
    front = ["sudo", "-n"] if target.sudo else []
    if not target.host:
        return [*front, sys.executable, *_PYTHON]
    return remote(target, [*front, "python3", *_PYTHON])


def remote(target: Target, program: Sequence[str]) -> list[str]:
    """The argument list that runs a program on the target, over SSH."""
    return [*_client(target), "--", target.host, shlex.join(program)]


def jump(text: str) -> Target:
    """The machine to go through, from `user@host:port`; only the host is needed."""
    found = _JUMP.fullmatch(text)
    host = (found["six"] or found["host"]) if found else ""
    if found is None or not _HOST.fullmatch(host):
        raise _invalid("via", text, "user@host:port, of which user and port may be missing")
    return Target(host=host, user=found["user"] or "", port=int(found["port"] or 0))


def _client(target: Target) -> list[str]:
    _ensure("host", target.host, _HOST)
    words = ["ssh", *_trust(target), "-o", "RequestTTY=no", "-o", "ClearAllForwardings=yes"]
    # It runs until the target's own greeting, so two log-ins may lie within it.
    words += ["-o", f"ConnectTimeout={15 if target.via is None else 60}"]
    if target.via:
        words += ["-o", f"ProxyCommand={_carrier(target.via)}"]
    if target.port:
        words += ["-p", str(target.port)]
    if target.user:
        _ensure("user", target.user, _USER)
        words += ["-l", target.user]
    return words


def _carrier(via: Target) -> str:
    """A shell line for ssh. Its own ProxyJump would dial that machine without our settings."""
    # A percent sign begins a token of ssh's, also where it belongs to a name.
    client = shlex.join(_client(via)).replace("%", "%%")
    return f"{client} -W '[%h]:%p' -- {shlex.quote(via.host).replace('%', '%%')}"


def _trust(target: Target) -> list[str]:
    if target.access:
        return options(target.access, target.alias)
    settings = {
        # Never trust on first use: a capture of the wrong machine is worse than none.
        "StrictHostKeyChecking": "yes",
        "UpdateHostKeys": "no",
        "BatchMode": "yes",
        "ForwardAgent": "no",
        "PermitLocalCommand": "no",
        "ServerAliveInterval": "15",
        "ServerAliveCountMax": "8",
    }
    if target.key:
        settings["IdentityFile"] = f'"{target.key.resolve()}"'
        settings["IdentitiesOnly"] = "yes"
    if target.alias:
        settings |= {"HostKeyAlias": target.alias, "CheckHostIP": "no"}
    if target.known_hosts:
        settings["UserKnownHostsFile"] = f'"{target.known_hosts.resolve()}"'
        settings["GlobalKnownHostsFile"] = "/dev/null"
    words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    # The first value that ssh is given for an option counts: a configuration cannot undo these.
    return words + (["-F", str(target.config.resolve())] if target.config else [])


def _ensure(noun: str, name: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(name):
        raise _invalid(noun, name, f"a plain {noun} name")


def _invalid(noun: str, name: str, expected: str) -> Problem:
    return Problem(
        f"{noun}_invalid",
        400,
        expected=expected,
        found=repr(name),
        remedy=f"give --{noun} as the machine knows it, without options",
    )
