"""Target of a capture: this machine, or a trusted machine over SSH, directly or through another."""

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

# The program comes over standard input. -I ignores modules of the target, -B writes no caches.
_PYTHON = ("-I", "-B", "-")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A machine to measure.

    host: empty for this machine. access: the reconciler's identity; without it ssh uses the
    caller's configuration (config: another file), keys and known_hosts. alias: name of the host
    key: the id of a node, or the domain of a guest, whose address had other tenants before.
    via: machine to connect through; it only forwards encrypted traffic.
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
    """Arguments of the command that reads the harness on standard input."""
    front = ["sudo", "-n"] if target.sudo else []
    if not target.host:
        return [*front, sys.executable, *_PYTHON]
    return remote(target, [*front, "python3", *_PYTHON])


def remote(target: Target, program: Sequence[str]) -> list[str]:
    """Arguments of the command that runs a program on the target over SSH."""
    return [*_client(target), "--", target.host, shlex.join(program)]


def jump(text: str) -> Target:
    """The machine to connect through, from `user@host:port`. User and port are optional."""
    match = _JUMP.fullmatch(text)
    host = (match["six"] or match["host"]) if match else ""
    if match is None or not _HOST.fullmatch(host):
        raise _invalid("via", text, "user@host:port, with optional user and port")
    return Target(host=host, user=match["user"] or "", port=int(match["port"] or 0))


def _client(target: Target) -> list[str]:
    _ensure("host", target.host, _HOST)
    words = ["ssh", *_trust(target), "-o", "RequestTTY=no", "-o", "ClearAllForwardings=yes"]
    # The limit includes the login to the machine in between.
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
    """Shell command for ssh's ProxyCommand. ProxyJump would connect without our settings."""
    # ssh expands a percent sign as a token, so the sign is doubled.
    client = shlex.join(_client(via)).replace("%", "%%")
    return f"{client} -W '[%h]:%p' -- {shlex.quote(via.host).replace('%', '%%')}"


def _trust(target: Target) -> list[str]:
    if target.access:
        return options(target.access, target.alias)
    settings = {
        # No trust on first use: a capture of the wrong machine is worse than no capture.
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
    # ssh uses the first value of an option, so a configuration file cannot override these.
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
        remedy=f"correct --{noun}; it must not contain options",
    )
