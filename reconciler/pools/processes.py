"""Processes of a pool's workers on this machine: found by their mark, signalled, started."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reconciler.db.schema import Pool, PoolWorker
from reconciler.pools.runner import MODEL_FILE
from reconciler.runs import lock
from reconciler.settings import Settings

log = logging.getLogger("gpuaas.pools")

# The environment variable that names host and worker of a process. Children inherit it.
MARK = "POOL_WORKER"
# Names of models as the API takes them (`api.models.Name`).
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Target of the model that is shipped, by its name.
SHIPPED = {"digits": str(Path(__file__).with_name("digits.onnx"))}
# Of every host, for drills that need a pool with a job.
DRILL = {"drill": "reconciler.pools.drills:take"}
# A worker gives its job back before it is killed.
_DRAIN = 0.8
# The shell keeps its process id. No memory is counted before the process is in its group.
_INTO_GROUP = 'echo $$ > "$0/cgroup.procs"; exec "$@"'


@dataclass(frozen=True)
class Process:
    """A running process. Process and start time together are unique within a boot."""

    pid: int
    start_ticks: int


def scan(host_id: str) -> dict[str, list[Process]]:
    """All processes of workers of this host, by the worker's id. Zombies have ended."""
    processes: dict[str, list[Process]] = {}
    prefix = f"{MARK}={host_id}/".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = [word for word in lock.environment(entry) if word.startswith(prefix)]
            if not words:
                continue
            process = Process(int(entry.name), lock.start_ticks(entry.name))
            # Or the time might be that of another process, which has got the id since.
            if words[0] in lock.environment(entry):
                id = words[0].removeprefix(prefix).decode(errors="replace")
                processes.setdefault(id, []).append(process)
        # It has just ended, or belongs to another user. No other error may hide a process.
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return processes


def is_left(process: Process) -> bool:
    """Whether a process is there. While it ends it has no mark, and may have a GPU's memory."""
    try:
        fields = lock.stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    # Fields 3, 20 and 22. Threads may outlive the first, which is a zombie then.
    ended = fields[0] in "ZX" and int(fields[17]) < 2
    return int(fields[19]) == process.start_ticks and not ended


def leads(worker: PoolWorker, process: Process) -> bool:
    """Whether it is the worker's own process, and not a child of it."""
    return (process.pid, process.start_ticks) == (worker.pid, worker.start_ticks)


def send(processes: Sequence[Process], number: int) -> None:
    """Send a signal to processes of a worker, unless they have just ended.

    They had the mark, which a library that changes the name of its process may have overwritten.
    """
    for process in processes:
        try:
            lock.send(process.pid, partial(is_left, process), number)
        except PermissionError:
            log.error("process %d of a worker belongs to another user, who can end it", process.pid)


def start(
    settings: Settings, pool: Pool, worker: PoolWorker, models: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start the process of a worker. It survives this process. models: NAME=TARGET."""
    # A model's file may have the name of any module: -P keeps them out of its imports.
    command = [sys.executable, "-P", "-m", "reconciler.cli.main", "jobs", "worker"]
    command += [word for model in models for word in ("--model", model)]
    command += ["--memory", str(pool.memory_mib), "--drain", f"{pool.grace_s * _DRAIN:.1f}"]
    if worker.cgroup:
        command = ["/bin/sh", "-c", _INTO_GROUP, worker.cgroup, *command]
    environment = {
        **os.environ,
        "GPUAAS_STATE_DIR": str(settings.state_dir),
        "GPUAAS_DATABASE_URL": settings.database,
        "CUDA_VISIBLE_DEVICES": ",".join(pool.devices),
        MARK: f"{pool.host_id}/{worker.id}",
    }
    return subprocess.Popen(
        command,
        cwd=models_folder(settings),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=2,
        start_new_session=True,
    )


def models_folder(settings: Settings) -> Path:
    """The folder of models that pools of this host can serve."""
    return settings.state_dir / "models"


def models(folder: Path) -> dict[str, str]:
    """Targets by name: FILE.onnx and the function `run` of FILE.py in a folder of models, the model
    that is shipped, and that of drills.
    """
    targets = SHIPPED | DRILL
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not NAME.fullmatch(path.stem):
            continue  # No pool could name it, and some names cannot be stored.
        if path.suffix == MODEL_FILE and path.is_file():
            targets[path.stem] = str(path)
        elif path.suffix == ".py" and path.is_file() and path.stem.isidentifier():
            targets[path.stem] = f"{path.stem}:run"
    return targets


def offered(folder: Path) -> list[str]:
    """Names of the models of a folder that this installation can load."""
    targets = models(folder)
    onnx = has_onnx()
    return sorted(name for name in targets if onnx or not targets[name].endswith(MODEL_FILE))


def has_onnx() -> bool:
    """Whether this installation has onnxruntime. It is loaded by the child of a worker only."""
    return importlib.util.find_spec("onnxruntime") is not None
