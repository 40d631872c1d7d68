"""Record of a lab between commands: `lab.json` in the lab's folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.command import LabError
from lab.paths import lab_folder

# The path of this file identifies the lab to other commands.
FILE = "lab.json"


@dataclass(frozen=True)
class Lab:
    """A lab host as other commands need it."""

    folder: str
    pid: int
    pid_started: int
    ssh_port: int
    key: str
    known_hosts: str
    qmp: str
    userdata: str
    accel: str
    qemu: str
    firmware: str
    gateway: str
    image: str
    devices: dict[str, Any] = field(default_factory=dict)

    def alive(self) -> bool:
        """Return whether this very process still runs; a reused pid does not count."""
        return process_start(self.pid) == self.pid_started

    def save(self) -> None:
        """Write lab.json atomically."""
        path = Path(self.folder) / FILE
        half = path.with_suffix(".partial")
        half.write_text(json.dumps(asdict(self), indent=1) + "\n")
        half.rename(path)


def process_start(pid: int) -> int | None:
    """Return the process's start in clock ticks since boot, or None if it is gone or a zombie."""
    try:
        # The name (field 2) may hold spaces and brackets: count from the last bracket.
        fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def load(folder: Path | None = None) -> Lab | None:
    """Return the lab of this folder, running or not, or None if there never was a lab."""
    path = (folder or lab_folder()) / FILE
    try:
        return Lab(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise LabError(f"{path} is not a lab.json of this version: remove it") from error


def running(folder: Path | None = None) -> Lab:
    """Return the lab of this folder, which must be up."""
    lab = load(folder)
    if lab is None or not lab.alive():
        raise LabError(f"no lab runs in {folder or lab_folder()}: start one with `gpuaas lab up`")
    return lab


def ssh_command(lab: Lab, remote: list[str] | None = None, *, tty: bool = False) -> list[str]:
    """Return the ssh command of the lab's operator; the host key came by the trusted channel."""
    options = {
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": lab.known_hosts,
        "GlobalKnownHostsFile": os.devnull,
        "StrictHostKeyChecking": "yes",
        "ConnectTimeout": "20",
        "LogLevel": "ERROR",
    }
    words = ["ssh", "-F", os.devnull, "-i", lab.key, "-p", str(lab.ssh_port)]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    return [*words, *(["-t"] if tty else []), "root@127.0.0.1", *(remote or [])]
