"""SSH to a node: certified host keys only, our certificate only; probing a silent host.

There is no trust on first use. known_hosts holds a certificate authority and nothing else, plain
host keys are not negotiated, and the name in the certificate must be the node's id.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reconciler.model.host_faults import CLOCK_COMMAND
from reconciler.runs import bounded_ssh
from reconciler.runs.paths import socket_directory
from reconciler.runs.spec import BY_HAND, NodeAccess, RunError

_CERTIFIED = (
    "ssh-ed25519-cert-v01@openssh.com",
    "ecdsa-sha2-nistp256-cert-v01@openssh.com",
    "rsa-sha2-512-cert-v01@openssh.com",
)
# A reachable host answers within a second, an emulated host within a few.
_PROBE_CONNECT_S = 15
_PROBE_LIMIT_S = 60
# Epoch seconds that a date can hold; some before the epoch are of no date.
_CLOCK = re.compile(r"[0-9]{1,11}")
_CLOCK_DIGITS = 16
# A login to an emulated, busy host takes long. How often the caller may give up meanwhile.
TELEMETRY_LIMIT_S = 60.0
_LOOK_S = 0.5
# The system's own texts: runs and probes have LC_ALL=C.UTF-8.
_NO_ROUTE = "|".join(
    re.escape(os.strerror(code))
    for code in (
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ETIMEDOUT,
    )
)
# Only the end of the message counts: SSH may have tried another address first.
_UNREACHABLE = re.compile(
    rf"connect to (?:host|address) \S+ port \d+: (?:{_NO_ROUTE})\s*$"
    # The connection is accepted, but no SSH server is behind it: the host is starting, or a port
    # is forwarded to a machine that is down.
    r"|timed out during banner exchange.{0,80}$"
    rf"|kex_exchange_identification: (?:Connection closed by remote host|\w+: (?:{_NO_ROUTE}))"
    r".{0,120}$"
)


@dataclass(frozen=True)
class SshAccess:
    """The operator's identity, by path: keys never go through variables or arguments."""

    key: Path
    certificate: Path
    known_hosts: Path


@dataclass(frozen=True)
class Reach:
    """The operator's own connection to the host. host "": this machine, without SSH.

    key, config: of the operator's SSH; None for its defaults. The operator's SSH must know the
    host key already: there is no trust on first use here either.
    """

    host: str = ""
    user: str = "root"
    port: int = 22
    key: Path | None = None
    config: Path | None = None
    node_id: str = ""

    def access(self) -> NodeAccess:
        """The target of the run; SpecError when a value is not a plain name."""
        name = self.node_id or BY_HAND
        if not self.host:
            return NodeAccess(name, "localhost", user=getpass.getuser())
        return NodeAccess(name, self.host, port=self.port, user=self.user)

    def environment(self, state_dir: Path) -> dict[str, str]:
        if not self.host:
            return {"ANSIBLE_TRANSPORT": "local"}
        # SSH uses the first value that it gets for an option.
        words = ["-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "ForwardAgent=no"]
        words += sharing(f"{socket_directory(state_dir, self.host)}/%C")
        words += ["-F", str(self.config.resolve())] if self.config else []
        words += ["-i", str(self.key.resolve())] if self.key else []
        agent = os.environ.get("SSH_AUTH_SOCK")
        return _for_ansible(words) | ({"SSH_AUTH_SOCK": agent} if agent else {})


def options(access: SshAccess, node_id: str) -> list[str]:
    """Arguments for ssh, scp and sftp: `-F /dev/null -o …`."""
    settings = {
        **trust(node_id),
        "UserKnownHostsFile": f'"{access.known_hosts}"',
        "GlobalKnownHostsFile": "/dev/null",
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "IdentityFile": f'"{access.key}"',
        "CertificateFile": f'"{access.certificate}"',
    }
    return arguments(settings)


def trust(node_id: str) -> dict[str, str]:
    """Settings that decide which host key is accepted; independent of local files and identity."""
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
        # Two minutes of silence: an emulated or busy host may be slow, a dead host must be noticed.
        "ServerAliveInterval": "15",
        "ServerAliveCountMax": "8",
    }


def refusing(keys: Sequence[str]) -> dict[str, str]:
    """Settings that revoke these host keys without a local file; the client needs OpenSSH 8.5."""
    if not keys:
        return {}
    # SSH splits the command itself, without a shell; %% is its %.
    lines = " ".join(f'"@revoked * {key}"' for key in keys)
    return {"KnownHostsCommand": f"/usr/bin/printf %%s\\n {lines}"}


def arguments(settings: Mapping[str, str]) -> list[str]:
    """Settings as command-line arguments of SSH, which then reads no configuration file."""
    words = ["-F", "/dev/null"]
    for key, value in settings.items():
        words += ["-o", f"{key}={value}"]
    return words


def sharing(path: str) -> list[str]:
    """Arguments of SSH for a connection that the tasks of a node share.

    The path is given here, because Ansible would take it from a variable. The author of that
    variable chooses the host that answers, and SSH checks no host key on a shared connection.
    """
    settings = ["ControlMaster=auto", "ControlPersist=60s", f'ControlPath="{path}"']
    return [word for setting in settings for word in ("-o", setting)]


def environment(access: SshAccess, node_id: str, sockets: Path) -> dict[str, str]:
    """The same options for Ansible, with a shared connection per node."""
    return _for_ansible(options(access, node_id) + sharing(f"{sockets}/%C"))


def bounded(words: Sequence[str], program: str = bounded_ssh.__file__) -> str:
    """Ansible's arguments of SSH for Python as its executable, which is a single path: the program
    that bounds a host's answer, and these arguments of ssh.
    """
    return shlex.join(["-I", "-S", program, *words])


def _for_ansible(words: list[str]) -> dict[str, str]:
    """Ansible's settings for a connection with these arguments of SSH."""
    return {
        "ANSIBLE_SSH_EXECUTABLE": sys.executable,
        "ANSIBLE_SSH_ARGS": bounded(words),
        # sftp and scp would take the arguments as their own.
        "ANSIBLE_SSH_TRANSFER_METHOD": "piped",
        # A retry would send the module again after the connection was lost, while the first copy
        # may still be working on the host, perhaps on a disk. The task decides whether to repeat,
        # because it knows how far the run got. The reboot of bootstrap does not need retries: it
        # waits with connections of its own until the host answers.
        "ANSIBLE_SSH_RETRIES": "0",
        # An emulated or busy host gets a single long chance to answer a connection.
        "ANSIBLE_TIMEOUT": "90",
    }


def probe(access: SshAccess, node: NodeAccess) -> str:
    """Connect and run `true`: "" when the host answers with its certified key and accepts us.

    Otherwise the last words of SSH.
    """
    try:
        done = _call(access, node, "true")
    except subprocess.TimeoutExpired:
        return f"no end of the connection within {_PROBE_LIMIT_S} s"
    if done.returncode == 0:
        return ""
    text = " ".join(done.stderr.decode("utf-8", "replace").split())
    return text[-500:] or f"exit status {done.returncode}"


def read_clock(access: SshAccess, node: NodeAccess, limit_s: float) -> float | None:
    """The host's time in epoch seconds; None when it does not tell it within the limit."""
    try:
        done = _call(access, node, CLOCK_COMMAND, limit_s)
    except subprocess.TimeoutExpired:
        return None
    text = done.stdout[:_CLOCK_DIGITS].decode("ascii", "replace").strip()
    return float(text) if done.returncode == 0 and _CLOCK.fullmatch(text) else None


def _call(
    access: SshAccess,
    node: NodeAccess,
    command: str = "",
    limit_s: float | None = None,
    given_up: Callable[[], bool] = lambda: False,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command of the host, or the forced one, over a connection of its own.

    subprocess.TimeoutExpired with what was said, after limit_s or when the caller gives up.
    """
    words = [*options(access, node.node_id), "-o", f"ConnectTimeout={_PROBE_CONNECT_S}"]
    target = ["-p", str(node.port), "-l", node.user, "--", node.address]
    # The bounded SSH ends ssh when it gets a SIGTERM, and a longer answer by itself.
    argv = [sys.executable, "-I", "-S", bounded_ssh.__file__, "-T", "-n", *words, *target]
    argv += [command] if command else []
    limit_s = _PROBE_LIMIT_S if limit_s is None else limit_s
    end, over = time.monotonic() + limit_s, False
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
    ) as process:
        while True:
            try:
                out, err = process.communicate(timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                if given_up() or time.monotonic() > end:
                    over = True
                    process.terminate()
    if over:
        raise subprocess.TimeoutExpired(argv, limit_s, out, err)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def is_refused(message: str) -> bool:
    """Whether the last words of SSH mean that the host refused our certificate."""
    return "Permission denied (publickey" in message


def telemetry(access: SshAccess, node: NodeAccess, given_up: Callable[[], bool]) -> bytes:
    """What the account `node.user` prints under its forced command, for which no words are sent.

    RunError `telemetry_unanswered` with the last words of SSH. given_up: asked while it waits.
    """
    try:
        done = _call(access, node, limit_s=TELEMETRY_LIMIT_S, given_up=given_up)
        if done.returncode == 0 and done.stdout:
            return done.stdout
        err, end = done.stderr, f"exit status {done.returncode}, {len(done.stdout)} bytes"
    except subprocess.TimeoutExpired as late:
        err, end = late.stderr or b"", f"no end, {len(late.stdout or b'')} bytes"
    raise RunError(
        "telemetry_unanswered",
        expected=f"a snapshot within {TELEMETRY_LIMIT_S:g} s",
        found=" ".join(err.decode("utf-8", "replace").split())[-500:] or end,
        remedy="see gpuaas-slice-telemetry.service on the host; bootstrap installs it",
    )


def is_unreachable(message: str) -> bool:
    """Whether the last words of SSH mean that no host answered, rather than that it refused us.

    An unreachable host may come back by itself; a refusal does not end by itself. Both have the
    same exit status. Only messages from before any data was sent count; unknown messages count as
    a refusal.
    """
    return _UNREACHABLE.search(message) is not None
