"""A PostgreSQL server that a test may stop as a power cut would, and start again."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path


class Postgres:
    """On a socket in a folder of its own; it refuses to run as root, so root hands it over."""

    def __init__(self) -> None:
        self._binaries = max(Path("/usr/lib/postgresql").glob("*/bin"))
        # Not below pytest's folder: that one is closed to the user that the server runs as.
        self.folder = Path(tempfile.mkdtemp(prefix="gpuaas-postgres-"))
        self._prefix: list[str] = []
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            self._prefix = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}"]
            self._prefix.append("--clear-groups")
            shutil.chown(self.folder, user.pw_uid, user.pw_gid)
        self._run("initdb", "-A", "trust", "-U", "gpuaas", "--no-sync")

    def url(self, database: str = "postgres") -> str:
        return f"postgresql+psycopg://gpuaas@/{database}?host={self.folder}"

    def start(self) -> None:
        # What the system has taken over is safe from the end of a process: no need to sync here.
        options = f"-k {self.folder} -c listen_addresses='' -c fsync=off"
        self._control("-l", f"{self.folder}/log", "-o", options, "start")

    def stop(self) -> None:
        """At once: clients are cut off, nothing is tidied up, the log is replayed at the start."""
        self._control("-m", "immediate", "stop")

    def database(self, name: str) -> str:
        """The URL of a new, empty database."""
        self._run("createdb", "-h", str(self.folder), "-U", "gpuaas", name)
        return self.url(name)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def _control(self, *words: str) -> None:
        self._run("pg_ctl", "-w", *words)

    def _run(self, program: str, *words: str) -> None:
        subprocess.run(
            [*self._prefix, f"{self._binaries}/{program}", *words],
            check=True,
            cwd=self.folder,
            env={**os.environ, "PGDATA": f"{self.folder}/data"},
            stdout=subprocess.DEVNULL,
        )
