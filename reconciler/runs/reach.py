"""The operator's own way to one host, and what is to be done there by hand."""

from __future__ import annotations

import getpass
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reconciler.runs.paths import socket_directory
from reconciler.runs.spec import NodeAccess


@dataclass(frozen=True)
class Reach:
    """The way to the host. host "": this machine, without SSH.

    key, config: of the operator's SSH, None for what it finds by itself. The host's key must be
    known to it: there is no trust on first use here either.
    """

    host: str = ""
    user: str = "root"
    port: int = 22
    key: Path | None = None
    config: Path | None = None
    node_id: str = ""

    def access(self) -> NodeAccess:
        """Where the run goes; SpecError when one of the words could mean something else."""
        name = self.node_id or "by-hand"
        if not self.host:
            return NodeAccess(name, "localhost", user=getpass.getuser())
        return NodeAccess(name, self.host, port=self.port, user=self.user)

    def environment(self, state_dir: Path) -> dict[str, str]:
        if not self.host:
            return {"ANSIBLE_TRANSPORT": "local"}
        # The first value that ssh is given for an option is the one that counts.
        words = ["-o", "StrictHostKeyChecking=yes", "-o", "BatchMode=yes", "-o", "ForwardAgent=no"]
        words += ["-o", "ControlMaster=auto", "-o", "ControlPersist=20s"]
        words += ["-F", str(self.config.resolve())] if self.config else []
        words += ["-i", str(self.key.resolve())] if self.key else []
        values = {
            "ANSIBLE_SSH_ARGS": shlex.join(words),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(socket_directory(state_dir, self.host)),
            "ANSIBLE_SSH_RETRIES": "0",
            "ANSIBLE_TIMEOUT": "90",
        }
        agent = os.environ.get("SSH_AUTH_SOCK")
        return values | ({"SSH_AUTH_SOCK": agent} if agent else {})


@dataclass(frozen=True)
class Work:
    """What is to be done: a playbook, its kind of task, its variables without slice_run."""

    playbook: str
    kind: str
    variables: Mapping[str, Any]
