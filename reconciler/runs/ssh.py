"""How SSH is spoken to a node: certified host keys only, our own certificate only.

There is no trust on first use: known_hosts holds a certificate authority and nothing else, plain
host keys are not even negotiated, and the name in the certificate must be the node's id.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CERTIFIED = (
    "ssh-ed25519-cert-v01@openssh.com",
    "ecdsa-sha2-nistp256-cert-v01@openssh.com",
    "rsa-sha2-512-cert-v01@openssh.com",
)


@dataclass(frozen=True)
class SshAccess:
    """The operator's identity, by path: keys never go through variables or arguments."""

    key: Path
    certificate: Path
    known_hosts: Path


def options(access: SshAccess, node_id: str) -> list[str]:
    """Words for ssh: `-F /dev/null -o …`. For scp, sftp and plain ssh calls as well."""
    settings = {
        **trust(node_id),
        "UserKnownHostsFile": f'"{access.known_hosts}"',
        "GlobalKnownHostsFile": "/dev/null",
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "IdentityFile": f'"{access.key}"',
        "CertificateFile": f'"{access.certificate}"',
    }
    return words(settings)


def trust(node_id: str) -> dict[str, str]:
    """Whose host key counts, whoever we are and wherever the authority's key lies."""
    return {
        "StrictHostKeyChecking": "yes",
        "HostKeyAlias": node_id,
        "HostKeyAlgorithms": ",".join(_CERTIFIED),
        "UpdateHostKeys": "no",
        "CheckHostIP": "no",
        "PreferredAuthentications": "publickey",
        "PasswordAuthentication": "no",
        "ForwardAgent": "no",
        "BatchMode": "yes",
        # Two minutes of silence: an emulated or busy host may be slow, a dead one must be noticed.
        "ServerAliveInterval": "15",
        "ServerAliveCountMax": "8",
    }


def refusing(keys: Sequence[str]) -> dict[str, str]:
    """Less these host keys, where no file of ours lies: needs OpenSSH 8.5 there."""
    if not keys:
        return {}
    # Split by SSH itself, without a shell; %% is its %.
    lines = " ".join(f'"@revoked * {key}"' for key in keys)
    return {"KnownHostsCommand": f"/usr/bin/printf %%s\\n {lines}"}


def words(settings: Mapping[str, str]) -> list[str]:
    """Settings as SSH takes them on its command line, and no file of settings besides."""
    said = ["-F", "/dev/null"]
    for key, value in settings.items():
        said += ["-o", f"{key}={value}"]
    return said


def environment(access: SshAccess, node_id: str, sockets: Path) -> dict[str, str]:
    """The same for Ansible, with one shared connection per node."""
    sharing = ["-o", "ControlMaster=auto", "-o", "ControlPersist=60s"]
    return {
        "ANSIBLE_SSH_ARGS": shlex.join(options(access, node_id) + sharing),
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(sockets),
        # Each retry would send the module once more after the connection was lost, while the first
        # may still be at work on the host, on a disk perhaps. Whether to do it again is decided by
        # the task, which knows what was done. The reboot of bootstrap does not need it: it waits
        # with connections of its own until the host answers.
        "ANSIBLE_SSH_RETRIES": "0",
        # An emulated or busy host gets one long chance to answer a connection, not several.
        "ANSIBLE_TIMEOUT": "90",
    }
