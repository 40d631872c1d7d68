"""SSH through the gateway: `gpuaas ssh`, `ssh-config`, `ssh-keys`, `ssh-sessions`, `ssh-replay`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from reconciler.cli import output
from reconciler.cli.allocations import (
    Allocation,
    Project,
    allocation_id,
    public_key,
    suspicious_answer,
)
from reconciler.cli.options import Reason, file_invalid
from reconciler.cli.session import client
from reconciler.model.errors import Problem

commands = typer.Typer()
app = typer.Typer(no_args_is_help=True, help="Keys that the SSH gateway lets through.")
commands.add_typer(app, name="ssh-keys")
File = Annotated[Path, typer.Argument(help="File with a public SSH key.")]
Identity = Annotated[
    Path | None, typer.Option("--key", help="Private key; default: those that ssh uses itself.")
]
_WORD = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9._:%-]*|")
# Ciphers of the gateway, the cheapest for it first. Each client since OpenSSH 6.5 has them.
_CIPHERS = "aes128-gcm@openssh.com,aes256-gcm@openssh.com,aes128-ctr,aes192-ctr,aes256-ctr"


@commands.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def ssh(
    context: typer.Context, allocation: Allocation, project: Project, key: Identity = None
) -> None:
    """Log in to a machine, or run a command: `gpuaas ssh ALLOCATION [SSH OPTIONS] [-- COMMAND]`."""
    words = [*_ssh(allocation_id(project, allocation), project, key), *context.args]
    sys.stdout.flush()
    try:
        os.execvp(words[0], words)  # noqa: S606 - the words are no text of a shell
    except FileNotFoundError:
        raise Problem(
            "program_missing",
            expected="ssh on this machine",
            found="no such program",
            remedy="install OpenSSH's client",
        ) from None


@commands.command("ssh-config")
def ssh_config(allocation: Allocation, project: Project, key: Identity = None) -> None:
    """Print the settings by which ssh, scp, rsync and editors reach a machine.

    Append them to ~/.ssh/config, then use the allocation's id as host: `scp FILE ALLOCATION:`.
    """
    sys.stdout.write(_config(allocation_id(project, allocation), project, key))


@commands.command("ssh-terminal")
def terminal(
    allocation: Allocation,
    project: Project,
    *,
    off: Annotated[bool, typer.Option("--off", help="Close it again.")] = False,
    key: Identity = None,
) -> None:
    """Let a running machine accept terminals: asks the service, then tells the machine by ssh."""
    id = allocation_id(project, allocation)
    path = f"/projects/{project}/allocations/{id}/terminal"
    document = client().put(path, {"enabled": not off})
    words = [*_ssh(id, project, key), "sudo", "sh"]
    done = subprocess.run(words, input=document["script"], text=True, check=False)
    if done.returncode:
        raise Problem(
            "machine_not_set_up",
            expected="ssh to the machine, and sudo there",
            found=f"exit status {done.returncode}",
            remedy="repeat the command once it can; the page of the terminal shows its script",
        )
    output.record({"allocation_id": id, "enabled": not off})


@commands.command("ssh-sessions")
def sessions(
    project: Project, allocation: Annotated[str, typer.Option(help="Only of this allocation.")] = ""
) -> None:
    """List the sessions through the gateway, newest first."""
    path = f"/projects/{project}/ssh-sessions"
    columns = ("opened_at", "id", "way", "allocation_id", "actor", "address", "closed_at", "reason")
    output.rows(client().items(path, allocation_id=allocation), *columns, "bytes_in", "bytes_out")


@commands.command("ssh-replay")
def replay(
    session: Annotated[str, typer.Argument(help="The session's id.")],
    file: Annotated[Path, typer.Argument(help="A new file, for asciinema.")],
    reason: Reason,
) -> None:
    """Write the recording of a terminal into a file, for admins only."""
    # The file is made first, because the service records each reading of a recording.
    try:
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        expected = "a new file, in a folder that exists"
        raise file_invalid(file, error.strerror, expected, "name another file") from error
    with os.fdopen(number, "w", encoding="utf-8") as handle:
        try:
            document = client().post(f"/admin/ssh-sessions/{session}/replay", {"reason": reason})
        except BaseException:
            file.unlink()
            raise
        handle.write(document.pop("cast"))
    output.record(document)


@app.command("add")
def add_key(key: File, project: Project) -> None:
    """Register a key for the machines of a project. It works as long as your token is valid."""
    output.record(client().post(_keys(project), {"public_key": public_key(key)}))


@app.command("list")
def list_keys(project: Project) -> None:
    """List the keys that were registered or revoked."""
    columns = ("fingerprint", "name", "registered_by", "valid", "expires_at", "revoked_at")
    output.rows(client().items(_keys(project)), *columns)


@app.command("revoke")
def revoke_key(
    key: Annotated[
        str, typer.Argument(help="File with the public key, or the key's fingerprint SHA256:….")
    ],
    project: Project,
    reason: Reason = "",
) -> None:
    """Revoke a key for good, and cut its sessions."""
    # A person who has lost a key may have lost its file, too.
    lost = key.startswith("SHA256:")
    line = _by_fingerprint(project, key) if lost else public_key(Path(key))
    output.record(client().post(f"{_keys(project)}/revoke", {"public_key": line, "reason": reason}))


def _by_fingerprint(project: str, fingerprint: str) -> str:
    """The public key, among those that were registered and those of launches."""
    from reconciler.records import ssh_keys

    for row in client().items(_keys(project)):
        if row["fingerprint"] == fingerprint:
            return str(row["public_key"])
    for allocation in client().items(f"/projects/{project}/allocations"):
        for line in allocation["ssh_keys"]:
            if ssh_keys.fingerprint(line) == fingerprint:
                return str(line)
    raise Problem(
        "ssh_key_not_found",
        404,
        expected="the fingerprint of a key of this project, registered or of a launch",
        found=fingerprint,
        remedy="see `gpuaas ssh-keys list`, or the keys of `gpuaas allocation show`",
    )


def _keys(project: str) -> str:
    return f"/projects/{project}/ssh-keys"


def _ssh(id: str, project: str, key: Path | None) -> list[str]:
    """The command that reaches a machine, without the words that follow."""
    file = _folder() / f"{id}.conf"
    _write(file, _config(id, project, key))
    return ["ssh", "-F", str(file), id]


def _config(id: str, project: str, key: Path | None) -> str:
    document = client().get(f"/projects/{project}/allocations/{id}")
    if document["id"] != id:
        raise suspicious_answer(f"allocation {id}", document["id"])
    known_hosts = _folder() / f"{id}.known_hosts"
    text = config(document, known_hosts, key)
    _write(known_hosts, document["connection"]["known_hosts"])
    return text


def config(document: dict[str, Any], known_hosts: Path, key: Path | None = None) -> str:
    """Settings of OpenSSH for an allocation. Every key is known before the first connection."""
    connection = document["connection"]
    if not connection:
        raise Problem(
            "allocation_not_active",
            expected=f"allocation {document['id']} active",
            found=document["state"],
            remedy="wait until `gpuaas allocations` shows it active",
        )
    id, host = document["id"], connection["host"]
    for word in (id, host, str(connection["port"]), connection["username"]):
        # A line end in it would be a setting of its own, such as a command to run here.
        if not _WORD.fullmatch(word):
            expected = "ids, names, addresses and ports of letters, digits and `._:%-`"
            raise suspicious_answer(expected, word)
    mine = f'    IdentityFile "{key.absolute()}"\n    IdentitiesOnly yes\n' if key else ""
    machine = f"    User {connection['username']}\n{mine}"
    if document["capacity_shape"] != "gpu_slice" and not connection["known_hosts"]:
        return f"Host {id}\n    HostName {host}\n    Port {connection['port']}\n{machine}"
    if not host or f"{id} " not in connection["known_hosts"]:
        raise Problem(
            "gateway_missing" if not host else "host_keys_unknown",
            expected="an SSH gateway, and the host keys of the machine",
            found="no gateway is configured" if not host else "no key was read at its start",
            remedy="ask the operators to set GPUAAS_MEMBER_ADDRESS and to run `gpuaas gateway`"
            if not host
            else "launch it again; an older allocation has no recorded keys",
        )
    safe = (
        f'    UserKnownHostsFile "{known_hosts}"\n    GlobalKnownHostsFile /dev/null\n'
        "    StrictHostKeyChecking yes\n    UpdateHostKeys no\n"
    )
    gateway = f"gateway-{id}"
    return (
        f"Host {gateway}\n    HostName {host}\n    Port {connection['port']}\n"
        f"    User {id}\n    Ciphers {_CIPHERS}\n{mine}{safe}"
        f"Host {id}\n    HostName slice\n    Port 22\n    HostKeyAlias {id}\n"
        f"    ProxyJump {gateway}\n{machine}{safe}"
    )


def _folder() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "gpuaas" / "ssh"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(file)
