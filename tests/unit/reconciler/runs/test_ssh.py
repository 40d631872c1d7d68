"""SSH options of a run: certified host keys only, and sockets of each node."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from reconciler.runs import bounded_ssh
from reconciler.runs.paths import socket_directory
from reconciler.runs.ssh import SshAccess, environment, options

pytestmark = pytest.mark.covers("HOST-13")

ACCESS = SshAccess(Path("/state dir/key"), Path("/state dir/cert"), Path("/state dir/hosts"))


@pytest.mark.covers("P6")
def test_no_host_is_ever_trusted_on_first_use() -> None:
    words = options(ACCESS, "node-1")
    assert words[:2] == ["-F", "/dev/null"]
    settings = dict(word.split("=", 1) for word in words[3::2])
    assert settings["StrictHostKeyChecking"] == "yes"
    assert settings["HostKeyAlias"] == "node-1"
    assert settings["UserKnownHostsFile"] == '"/state dir/hosts"'
    assert settings["GlobalKnownHostsFile"] == "/dev/null"
    assert settings["UpdateHostKeys"] == "no"
    assert all("cert" in name for name in settings["HostKeyAlgorithms"].split(","))


@pytest.mark.covers("P6")
def test_ansible_gets_the_same_words(tmp_path: Path) -> None:
    values = environment(ACCESS, "node-1", tmp_path)
    isolated, lean, program, *words = shlex.split(values["ANSIBLE_SSH_ARGS"])
    assert (isolated, lean, program) == ("-I", "-S", bounded_ssh.__file__)
    assert words[: len(options(ACCESS, "node-1"))] == options(ACCESS, "node-1")
    assert "ControlMaster=auto" in words
    # A repeated connection would repeat the module.
    assert values["ANSIBLE_SSH_RETRIES"] == "0"


def test_sockets_are_private_short_and_apart_for_each_node(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    first, second = socket_directory(deep, "node-1"), socket_directory(deep, "node-2")
    assert first != second
    assert len(f"{first}/{'c' * 40}.{'s' * 16}") < 108
    assert first.stat().st_mode & 0o077 == 0
    for folder in (first, second, first.parent):
        folder.rmdir()
