"""Files of a run: their paths, how they are written, and the id of the folder of runs."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import tempfile
import uuid
from pathlib import Path
from typing import Any

from reconciler.durable import sync, write_text
from reconciler.runs.spec import RunError

# A Unix socket's path may have 107 bytes; the name of a socket (%C) adds 41 and ssh 17.
_LONGEST_SOCKET_DIRECTORY = 49
_MACHINE_ID = Path("/etc/machine-id")


class RunPaths:
    """The folder of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Held from before the process exists until it ends; decides whether the run is alive.
        self.lock = root / "lock"
        # Description of the run, without its variables.
        self.manifest = root / "run.json"
        # The first file that the process writes; it exists once the process has started.
        self.process = root / "process.json"
        self.progress = root / "progress.jsonl"
        self.outcome = root / "outcome.json"
        # Its age shows when AWX last said that the job waits in AWX's queue.
        self.queued = root / "queued"
        # Its presence asks the process to stop.
        self.cancel = root / "cancel"
        # Messages of the process itself; empty unless it fails.
        self.log = root / "process.log"
        self.env = root / "env"
        self.variables = self.env / "extravars"
        self.inventory = root / "inventory" / "hosts.json"
        self.artifacts = root / "artifacts" / "ansible"
        self.output = self.artifacts / "stdout"


def runs_directory(state_dir: Path) -> Path:
    return state_dir.resolve() / "runs"


def run_directory(state_dir: Path, run_id: str) -> Path:
    return runs_directory(state_dir) / run_id


def runner_id(state_dir: Path) -> str:
    """The id of the folder of runs, created on first use; concurrent processes get the same id.

    Only the machine that has a run's files can see whether the run is alive. All workers on the
    folder share its id, and no other folder has it. The id lies beside the files, so an emptied
    folder gets a new id. A copy of the folder on another machine must not include it, so the id of
    the machine lies beside it: RunError `runner_copied` when that differs.
    """
    _refuse_copy(state_dir)
    text = _made_once(state_dir, "runner", str(uuid.uuid4()))
    try:
        return str(uuid.UUID(text))
    except ValueError as broken:
        raise RunError(
            "runner_unreadable",
            expected=f"a UUID in {runs_directory(state_dir) / 'runner'}",
            found=repr(text)[:100],
            remedy="end the runs of this folder, then move the file away: a new id is made",
        ) from broken


def _refuse_copy(state_dir: Path) -> None:
    """Refuse a folder that was copied from another machine as a whole.

    Two workers with one id begin the same run twice. A new id would prevent this, but a copy has
    the database of a site with SQLite too, and would do all of its work a second time. Only people
    know whether the other machine is gone. Without a machine id, as in a container, nothing is
    compared: device and inode of a folder may change with each start.
    """
    try:
        here = _MACHINE_ID.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return
    if not here or here == "uninitialized":
        return
    recorded = _made_once(state_dir, "machine", here)
    if recorded != here:
        folder = runs_directory(state_dir)
        raise RunError(
            "runner_copied",
            expected=f"the runs of this machine, {here}, in {folder}",
            found=f"those of the machine {recorded[:100]!r}",
            remedy=f"if that machine runs the service no more, delete {folder / 'machine'};"
            f" otherwise delete {folder} here, and do not start a second copy of a SQLite database",
        )


def run_secret(state_dir: Path, run_id: str) -> str:
    """A secret of a run, always the same, because the variables of a run may not change. It is made
    of a key beside the files of runs, which is in no database.
    """
    key = _made_once(state_dir, "secret", secrets.token_hex(32))
    mac = hmac.new(key.encode(), run_id.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(mac).decode().rstrip("=")


def _made_once(state_dir: Path, name: str, text: str) -> str:
    """The text of a file in the folder of runs, which concurrent processes make only once."""
    folder = runs_directory(state_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / name
    if not path.exists():
        fresh = folder / f".{name}.{uuid.uuid4()}"
        write_text(fresh, f"{text}\n")
        try:
            # Unlike a rename, a link never replaces the file of another process.
            path.hardlink_to(fresh)
            sync(folder)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return path.read_text(encoding="utf-8").strip()


def socket_directory(state_dir: Path, node_id: str) -> Path:
    """A private folder with a short path for SSH's shared connections to a node.

    Each node has its own: SSH shares connections by address, and an address may move to another
    node. A shared connection would then skip the check of the new host key.
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


def write_json(path: Path, document: object) -> None:
    write_text(path, json.dumps(document, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """A document that `write_json` wrote, or None when the file does not exist."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return document if isinstance(document, dict) else None
