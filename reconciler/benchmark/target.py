"""Target of a capture: this machine, a trusted machine over SSH, or a slice VM through its host.

A guest creates its SSH host keys at its first boot. Its launch reads them on the host and the
reconciler records them, so that nothing is trusted on first use. The host has a certificate.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconciler.model.errors import Problem
from reconciler.model.states import AllocationState, CapacityShape
from reconciler.runs.ssh import SshAccess, options

Record = Mapping[str, Any]

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:%_-]{0,252}")
_USER = re.compile(r"[a-z_A-Z][A-Za-z0-9_.-]{0,63}")
_JUMP = re.compile(
    rf"((?P<user>{_USER.pattern})@)?(\[(?P<six>[0-9a-fA-F:]+)\]|(?P<host>[^:\[\]]+))(:(?P<port>\d{{1,5}}))?"
)

# The program comes over standard input. -I ignores modules of the target, -B writes no caches.
_PYTHON = ("-I", "-B", "-")

# Without a comment, as the reconciler records it.
_KEY = re.compile(r"(?:ssh|ecdsa)-[a-z0-9-]{3,30} [A-Za-z0-9+/]{40,2000}={0,2}")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A machine to measure.

    host: empty for this machine. access: the reconciler's identity; without it ssh uses the
    caller's configuration (config: another file), keys and known_hosts. alias: name by which the
    host key is known: the id of a node or of an allocation, because other tenants had the guest's
    address before. via: machine to connect through; it only forwards encrypted traffic.
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
    return _remote(target, [*front, "python3", *_PYTHON])


def jump(text: str) -> Target:
    """The machine to connect through, from `user@host:port`. User and port are optional."""
    match = _JUMP.fullmatch(text)
    host = (match["six"] or match["host"]) if match else ""
    if match is None or not _HOST.fullmatch(host):
        raise _invalid("via", text, "user@host:port, with optional user and port")
    return Target(host=host, user=match["user"] or "", port=int(match["port"] or 0))


def guest_place(allocation: Record) -> tuple[str, str]:
    """Node id and private address of a running slice VM; Problem `no_slice_vm`."""
    shape, state = allocation["capacity_shape"], allocation["state"]
    if (shape, state) != (CapacityShape.GPU_SLICE, AllocationState.ACTIVE):
        raise Problem(
            "no_slice_vm",
            expected="an active allocation of GPU slices",
            found=f"a {shape} allocation, {state}",
            remedy="choose another allocation with `gpuaas allocations`, or use --host",
        )
    # The machine has a single managed interface, which belongs to its first slot.
    first = min(allocation["claims"], key=lambda claim: claim["position"])
    return first["node_id"], first["private_ip"]


def guest_target(
    allocation: Record, node: Record, caller: Target, *, access: SshAccess, folder: Path
) -> Target:
    """The slice VM of an allocation. caller: the caller's user, key, configuration and known_hosts.

    Without known_hosts the guest is known by the keys that its launch recorded, which are written
    to the folder. Problem `no_slice_vm`, `guest_key_unknown`.
    """
    via = Target(
        host=node["address"],
        port=node["port"],
        user=node["ssh_user"],
        access=access,
        alias=node["id"],
    )
    _node_id, address = guest_place(allocation)
    user = caller.user or allocation["username"]
    routed = dataclasses.replace(caller, host=address, user=user, via=via)
    if caller.known_hosts:
        return routed
    id = allocation["id"]
    recorded = allocation["connection"].get("host_keys", ())
    keys = [key for key in recorded if _KEY.fullmatch(key)]
    if not keys:
        raise Problem(
            "guest_key_unknown",
            expected=f"the SSH host keys that the launch of {id} recorded",
            found="no key",
            remedy="launch it again, because older allocations have none, or pass the guest's key"
            " with --known-hosts",
        )
    file = folder / "known_hosts"
    file.write_text("".join(f"{id} {key}\n" for key in keys))
    return dataclasses.replace(routed, alias=id, known_hosts=file)


def _remote(target: Target, program: Sequence[str]) -> list[str]:
    """Arguments of the command that runs a program on the target over SSH."""
    return [*_client(target), "--", target.host, shlex.join(program)]


def _client(target: Target) -> list[str]:
    for noun, name, pattern in (("host", target.host, _HOST), ("user", target.user, _USER)):
        if (name or noun == "host") and not pattern.fullmatch(name):
            raise _invalid(noun, name, f"a plain {noun} name")
    words = ["ssh", *_trust(target), "-o", "RequestTTY=no", "-o", "ClearAllForwardings=yes"]
    # The limit includes the login to the machine in between.
    words += ["-o", f"ConnectTimeout={15 if target.via is None else 60}"]
    if target.via:
        # ProxyJump would connect without our settings. ssh expands a percent sign as a token, so
        # the sign is doubled.
        client = shlex.join(_client(target.via)).replace("%", "%%")
        host = shlex.quote(target.via.host).replace("%", "%%")
        words += ["-o", f"ProxyCommand={client} -W '[%h]:%p' -- {host}"]
    words += ["-p", str(target.port)] if target.port else []
    return words + (["-l", target.user] if target.user else [])


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


def _invalid(noun: str, name: str, expected: str) -> Problem:
    return Problem(
        f"{noun}_invalid",
        400,
        expected=expected,
        found=repr(name),
        remedy=f"correct --{noun}; it must not contain options",
    )
