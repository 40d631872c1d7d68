"""Where a capture runs: this machine, or another one over SSH that is already trusted."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from reconciler.domain.errors import Problem
from reconciler.runs.ssh import SshAccess, options

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:%_-]{0,252}")
_USER = re.compile(r"[a-z_A-Z][A-Za-z0-9_.-]{0,63}")

# The program comes over standard input: -I keeps the target's own modules out, -B leaves no caches.
_PYTHON = ("-I", "-B", "-")


@dataclass(frozen=True, kw_only=True)
class Target:
    """host empty: this machine. access: the reconciler's identity, with the node's id as `alias`;
    without it the caller's own SSH configuration (config: another file), keys and known_hosts.
    """

    host: str = ""
    user: str = ""
    port: int = 0
    key: Path | None = None
    config: Path | None = None
    known_hosts: Path | None = None
    access: SshAccess | None = None
    alias: str = ""
    sudo: bool = False


def command(target: Target) -> list[str]:
    """The argument list that reads the harness on standard input."""
    front = ["sudo", "-n"] if target.sudo else []
    if not target.host:
        return [*front, sys.executable, *_PYTHON]
    _ensure("host", target.host, _HOST)
    words = ["ssh", *_trust(target), "-o", "RequestTTY=no", "-o", "ClearAllForwardings=yes"]
    words += ["-o", "ConnectTimeout=15"]
    if target.port:
        words += ["-p", str(target.port)]
    if target.user:
        _ensure("user", target.user, _USER)
        words += ["-l", target.user]
    return [*words, "--", target.host, shlex.join([*front, "python3", *_PYTHON])]


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
    if target.known_hosts:
        settings["UserKnownHostsFile"] = f'"{target.known_hosts.resolve()}"'
        settings["GlobalKnownHostsFile"] = "/dev/null"
    words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    # The first value that ssh is given for an option counts: a configuration cannot undo these.
    return words + (["-F", str(target.config.resolve())] if target.config else [])


def _ensure(noun: str, name: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(name):
        raise Problem(
            f"{noun}_invalid",
            400,
            expected=f"a plain {noun} name",
            found=repr(name),
            remedy=f"give --{noun} as the machine knows it, without options",
        )
