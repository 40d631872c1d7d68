"""Where the files of a run lie, and the one way to write them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A Unix socket's path may have 107 bytes; Ansible adds 11 and ssh 17 of its own.
_LONGEST_SOCKET_DIRECTORY = 75


@dataclass(frozen=True)
class RunPaths:
    """The folder of one run."""

    root: Path

    @property
    def lock(self) -> Path:
        """Held from before the process exists until it ends: the truth about being alive."""
        return self.root / "lock"

    @property
    def manifest(self) -> Path:
        """What the run is, without its variables."""
        return self.root / "run.json"

    @property
    def process(self) -> Path:
        """Written by the process, before anything else: from here on it has been started."""
        return self.root / "process.json"

    @property
    def progress(self) -> Path:
        return self.root / "progress.jsonl"

    @property
    def outcome(self) -> Path:
        return self.root / "outcome.json"

    @property
    def cancel(self) -> Path:
        """Its presence asks the process to stop."""
        return self.root / "cancel"

    @property
    def log(self) -> Path:
        """What the process itself says; empty unless something is wrong with it."""
        return self.root / "process.log"

    @property
    def env(self) -> Path:
        return self.root / "env"

    @property
    def variables(self) -> Path:
        return self.env / "extravars"

    @property
    def inventory(self) -> Path:
        return self.root / "inventory" / "hosts.json"

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts" / "ansible"

    @property
    def output(self) -> Path:
        return self.artifacts / "stdout"


def runs_directory(state_dir: Path) -> Path:
    return state_dir.resolve() / "runs"


def run_directory(state_dir: Path, run_id: str) -> Path:
    return runs_directory(state_dir) / run_id


def socket_directory(state_dir: Path, node_id: str) -> Path:
    """A private, short folder for SSH's shared connections to one node.

    One per node: connections are shared by address, and an address may be handed from one node to
    another, whose host key would then not be looked at.
    """
    name = hashlib.sha256(node_id.encode()).hexdigest()[:10]
    directory = state_dir.resolve() / "cp" / name
    if len(str(directory)) > _LONGEST_SOCKET_DIRECTORY:
        where = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:8]
        directory = Path(tempfile.gettempdir()) / f"gpuaas-{os.getuid()}-{where}" / name
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = directory.parent.lstat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o077:
        raise PermissionError(f"{directory.parent} is open to others; remove it")
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def write_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace a file in one step; what a crash leaves is the old file or the new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
        os.fchmod(descriptor, mode)
        handle.write(text)
        handle.flush()
        os.fsync(descriptor)
    Path(name).replace(path)


def write_json(path: Path, document: object) -> None:
    write_text(path, json.dumps(document, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """A document that `write_json` wrote, or None when it is not there."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return document if isinstance(document, dict) else None
