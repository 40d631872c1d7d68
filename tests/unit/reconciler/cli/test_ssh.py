"""`gpuaas ssh`, `ssh-config`, `ssh-keys` and `ssh-sessions` against a real service."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from reconciler.client import Client
from reconciler.db.engine import transaction
from reconciler.db.schema import allocations
from reconciler.trust import keygen
from reconciler.trust.ca import open_trust
from tests.unit.reconciler.api.stack import KEY, Stack
from tests.unit.reconciler.api.test_launches import activate, launch
from tests.unit.reconciler.api.test_terminals import recorded
from tests.unit.reconciler.cli.conftest import Gpuaas

pytestmark = pytest.mark.covers("SLICE-10")
AT = ("--project", "demo", "--output", "json")
GUEST = " ".join(KEY.split()[:2])


@pytest.fixture
def mine(selling: Stack, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An active slice of a site with a gateway; the settings of the user are in tmp_path."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "own"))
    open_trust(selling.settings.state_dir)
    address = {"member_address": "ssh.example:2222"}
    selling.settings = selling.settings.model_copy(update=address)
    allocation = str(launch(selling).json()["id"])
    activate(selling, allocation)
    gpuaas.at(selling, "member")
    with_keys(selling, [GUEST])
    return allocation


def with_keys(stack: Stack, keys: list[str]) -> None:
    with transaction(stack.engine) as conn:
        document = {"username": "tenant", "host_keys": keys}
        conn.execute(sa.update(allocations).values(connection=document))


def test_settings_name_the_gateway_and_every_key(mine: str, gpuaas: Gpuaas, tmp_path: Path) -> None:
    text = gpuaas("ssh-config", mine, *AT, "--key", "/keys/mine")
    hosts = tmp_path / "own/gpuaas/ssh" / f"{mine}.known_hosts"
    gateway, machine = text.split(f"Host {mine}\n")
    known_line = f'"{hosts}"'
    for line in ("HostName ssh.example", "Port 2222", f"User {mine}", known_line, "Ciphers aes128"):
        assert line in gateway
    for line in ("HostName slice", f"ProxyJump gateway-{mine}", f"HostKeyAlias {mine}"):
        assert line in machine
    assert text.count("StrictHostKeyChecking yes") == text.count('IdentityFile "/keys/mine"') == 2
    first, second = hosts.read_text().splitlines()
    assert first.startswith("@cert-authority [ssh.example]:2222 ssh-ed25519 ")
    assert second == f"{mine} {GUEST}"


@pytest.mark.parametrize("name", ["eve\n    ProxyCommand touch ran", "eve bob", '"', "-oX"])
def test_no_answer_adds_a_setting(mine: str, gpuaas: Gpuaas, selling: Stack, name: str) -> None:
    """A service that was taken over would run commands on the computers of its members."""
    with transaction(selling.engine) as conn:
        document = {"username": name, "host_keys": [GUEST]}
        conn.execute(sa.update(allocations).values(connection=document))
    assert gpuaas("ssh-config", mine, *AT) == ""
    assert (gpuaas.status, json.loads(gpuaas.err)["code"]) == (1, "http_error")


@pytest.mark.parametrize("other", ["-oProxyCommand=touch${IFS}ran", "1" * 36])
@pytest.mark.parametrize("command", ["ssh", "ssh-terminal", "ssh-config"])
def test_no_answer_is_a_word_of_ssh(
    mine: str,
    gpuaas: Gpuaas,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    other: str,
) -> None:
    """Neither the id in a list, for a host name, nor that of another allocation."""
    program = tmp_path / "ssh"
    program.write_text(f'#!/bin/sh\ntouch "{tmp_path}/ran"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "execvp", lambda _file, line: subprocess.run(line, check=False))
    items, get = Client.items, Client.get

    def rows(api: Client, path: str, **query: Any) -> Iterator[Any]:
        lie = {"id": other} if path.endswith("/allocations") else {}
        return (row | lie for row in items(api, path, **query))

    with monkeypatch.context() as patch:
        patch.setattr(Client, "items", rows)
        gpuaas(command, "slice-1", *AT)
    assert (gpuaas.status, json.loads(gpuaas.err)["code"]) == (1, "http_error")
    monkeypatch.setattr(Client, "get", lambda *words, **query: get(*words, **query) | {"id": other})
    gpuaas(command, mine, *AT)
    assert (gpuaas.status, json.loads(gpuaas.err)["code"]) == (1, "http_error")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        ([], []),
        (["--", "nvidia-smi", "-l"], ["nvidia-smi", "-l"]),
        (["-L", "8888:localhost:8888"], ["-L", "8888:localhost:8888"]),
    ],
)
def test_ssh_gets_the_other_words(
    mine: str, gpuaas: Gpuaas, monkeypatch: pytest.MonkeyPatch, words: list[str], passed: list[str]
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(os, "execvp", lambda _file, line: calls.append(line))
    gpuaas("ssh", mine, "--project", "demo", *words)
    ((program, option, file, *rest),) = calls
    assert (program, option, rest) == ("ssh", "-F", [mine, *passed])
    assert "StrictHostKeyChecking yes" in Path(file).read_text()


def test_a_machine_whose_key_is_unknown_is_not_dialled(
    mine: str, selling: Stack, gpuaas: Gpuaas
) -> None:
    with_keys(selling, [])
    gpuaas("ssh", mine, *AT)
    assert gpuaas.status == 1 and "host_keys_unknown" in gpuaas.err
    selling.settings = selling.settings.model_copy(update={"member_address": ""})
    gpuaas.at(selling, "member")("ssh", mine, *AT)
    assert "gateway_missing" in gpuaas.err
    gpuaas("release", mine, "--project", "demo", "--no-wait")
    gpuaas("ssh", mine, *AT)
    assert "allocation_not_active" in gpuaas.err


def test_a_recording_goes_into_a_new_file_of_its_reader(
    mine: str, selling: Stack, gpuaas: Gpuaas, tmp_path: Path
) -> None:
    session = recorded(selling, mine)
    gpuaas.at(selling)
    read = ("ssh-replay", session, str(tmp_path / "it.cast"), "--reason", "incident 7")
    gpuaas(*read)
    assert gpuaas.status == 0, gpuaas.err
    file = tmp_path / "it.cast"
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("{}\n", 0o600)
    # A file that is there is refused before anything is read, and stays.
    for words in (read, ("ssh-replay", session, str(tmp_path / "no/it"), "--reason", "again")):
        gpuaas(*words)
        assert (gpuaas.status, "file_invalid" in gpuaas.err) == (1, True), gpuaas.err
    gpuaas("ssh-replay", "unknown", str(tmp_path / "other"), "--reason", "again")
    assert (gpuaas.status, (tmp_path / "other").exists()) == (1, False)
    audit = selling.client("admin").get("admin/audit", params={"action": "terminal.replayed"})
    assert [row["reason"] for row in audit.json()["items"]] == ["incident 7"]


def test_keys_are_added_listed_and_revoked_for_ever(
    mine: str, gpuaas: Gpuaas, tmp_path: Path
) -> None:
    file = tmp_path / "key.pub"
    file.write_text(KEY + "\n")
    added = json.loads(gpuaas("ssh-keys", "add", str(file), *AT))
    assert (added["name"], added["revoked_at"]) == ("tenant", None)
    revoked = json.loads(gpuaas("ssh-keys", "revoke", str(file), *AT, "--reason", "lost"))
    assert revoked["fingerprint"] == added["fingerprint"] and revoked["revoked_at"]
    gpuaas("ssh-keys", "add", str(file), *AT)
    assert "ssh_key_revoked" in gpuaas.err
    (listed,) = json.loads(gpuaas("ssh-keys", "list", *AT))
    assert listed == revoked


def test_a_lost_key_is_revoked_by_its_fingerprint(
    mine: str, gpuaas: Gpuaas, tmp_path: Path
) -> None:
    """Its file may be lost, too. The first came with a launch, the second was registered."""
    launched = json.loads(gpuaas("allocation", "show", mine, *AT))["ssh_keys"]
    file = tmp_path / "key.pub"
    file.write_text(launched[0] + "\n")
    prints = [subprocess.check_output(["ssh-keygen", "-lf", file], text=True).split()[1]]
    other = tmp_path / "other"
    keygen.new_key(other, "me@laptop")
    added = json.loads(gpuaas("ssh-keys", "add", f"{other}.pub", *AT))
    for fingerprint in (*prints, added["fingerprint"]):
        revoked = json.loads(gpuaas("ssh-keys", "revoke", fingerprint, *AT, "--reason", "lost"))
        assert revoked["fingerprint"] == fingerprint and revoked["revoked_at"]
    gpuaas("ssh-keys", "revoke", "SHA256:unknown", *AT)
    assert (gpuaas.status, json.loads(gpuaas.err)["code"]) == (1, "ssh_key_not_found")
