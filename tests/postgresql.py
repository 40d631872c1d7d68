"""A PostgreSQL server of our own on a socket, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Server:
    """folder: where the socket is. prefix: runs a program as the server's user."""

    folder: Path
    binaries: Path
    prefix: tuple[str, ...]

    @property
    def url(self) -> str:
        return self.database("postgres")

    def database(self, name: str) -> str:
        """SQLAlchemy URL of a database of the server."""
        return f"postgresql+psycopg://gpuaas@/{name}?host={self.folder}"

    def empty_database(self, name: str) -> str:
        """The URL of a database of this name with nothing in it; what was there is gone."""
        where = ("-h", str(self.folder), "-U", "gpuaas")
        self.run("dropdb", *where, "--if-exists", "--force", name)
        self.run("createdb", *where, name)
        return self.database(name)

    def run(self, program: str, *words: str) -> str:
        """Run one of the server's own programs; its output."""
        argv = [*self.prefix, str(self.binaries / program), *words]
        done = subprocess.run(argv, check=True, cwd=self.folder, capture_output=True, text=True)
        return done.stdout


@contextlib.contextmanager
def running(*, fsync: bool, options: str = "") -> Iterator[Server]:
    """The newest server that is installed, with a database folder that goes away afterwards."""
    binaries = max(Path("/usr/lib/postgresql").glob("*/bin"))
    # Not below a private folder: it must be open to the user that the server runs as.
    folder = Path(tempfile.mkdtemp(prefix="gpuaas-postgres-"))
    prefix: tuple[str, ...] = ()
    # It refuses to run as root.
    if os.geteuid() == 0:
        owner = pwd.getpwnam("postgres")
        prefix = ("setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups")
        shutil.chown(folder, owner.pw_uid, owner.pw_gid)
    server = Server(folder, binaries, prefix)
    data, log = str(folder / "data"), str(folder / "log")
    server.run("initdb", "-D", data, "-A", "trust", "-U", "gpuaas", "--no-sync")
    said = f"-k {folder} -c listen_addresses='' -c fsync={'on' if fsync else 'off'} {options}"
    # Its output goes to the log: a pipe would be held open by the server itself.
    control = [*prefix, str(binaries / "pg_ctl"), "-D", data, "-w", "-l", log]
    start = [*control, "-o", said, "start"]
    subprocess.run(start, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        yield server
    finally:
        server.run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
        shutil.rmtree(folder)
