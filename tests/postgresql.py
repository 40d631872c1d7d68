"""A PostgreSQL server of our own on a socket, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BUILD = Path(__file__).resolve().parents[1] / "build"
# Maximum bytes of a socket's path in Linux, without the zero at its end.
_LONGEST = 107
# A path that needs no quoting in a URL, a list of hosts and a shell's words.
_PLAIN = re.compile(r"[A-Za-z0-9_/.-]+")
# In a server's folder: locked as long as the process lives that started it.
_STARTER = "starter"
_END_S = 10


@dataclass(frozen=True, kw_only=True)
class Server:
    """folder: data, log and socket. prefix: runs a program as the server's user."""

    folder: Path
    binaries: Path
    prefix: tuple[str, ...]
    options: str

    @property
    def url(self) -> str:
        return self._url("postgres")

    def database(self, name: str, *, of: str = "template1") -> str:
        """Create a database of this name, empty or a copy of an unused database; return its URL.

        An existing database of this name is dropped.
        """
        gone = f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'
        where = ("-h", str(self.folder), "-U", "gpuaas", "-d", "postgres", "-q")
        self.run("psql", *where, "-c", gone, "-c", f'CREATE DATABASE "{name}" TEMPLATE "{of}"')
        return self._url(name)

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        self._control("-l", f"{self.folder}/log", "-o", self.options, "start")

    def stop(self) -> None:
        """Stop at once and not cleanly: clients are cut off, the next start replays the log."""
        self._control("-m", "immediate", "stop")

    def run(self, program: str, *words: str) -> str:
        """Run one of the server's own programs; its output."""
        argv = [*self.prefix, str(self.binaries / program), *words]
        done = subprocess.run(argv, check=True, cwd=self.folder, capture_output=True, text=True)
        return done.stdout

    def _control(self, *words: str) -> None:
        # Its output goes to the log, because the server would keep a pipe open.
        argv = [*self.prefix, f"{self.binaries}/pg_ctl", "-D", f"{self.folder}/data", "-w", *words]
        subprocess.run(argv, check=True, cwd=self.folder, stdout=subprocess.DEVNULL)

    def _url(self, database: str) -> str:
        return f"postgresql+psycopg://gpuaas@/{database}?host={self.folder}"


@contextlib.contextmanager
def running(*, fsync: bool, options: str = "") -> Iterator[Server]:
    """The newest server that is installed, with a folder that goes away afterwards."""
    prefix: tuple[str, ...] = ()
    # It refuses to run as root.
    owner = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
    if owner is not None:
        prefix = ("setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups")
    sweep(BUILD)
    folder = place(BUILD, prefix)
    starter = claim(folder)
    try:
        if owner is not None:
            shutil.chown(folder, owner.pw_uid, owner.pw_gid)
        server = Server(
            folder=folder,
            binaries=max(Path("/usr/lib/postgresql").glob("*/bin")),
            prefix=prefix,
            options=f"-k {folder} -c listen_addresses='' -c fsync={'on' if fsync else 'off'}"
            f" {options}",
        )
        server.run("initdb", "-D", f"{folder}/data", "-A", "trust", "-U", "gpuaas", "--no-sync")
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
        os.close(starter)


def claim(folder: Path) -> int:
    """The folder is this process's, until it ends in whatever way or closes this file."""
    # A lock rather than the process's number, which another process may have by then.
    starter = os.open(folder / "new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(starter, fcntl.LOCK_EX)
    # The file is locked before it gets its name.
    (folder / "new").rename(folder / _STARTER)
    return starter


def sweep(build: Path) -> None:
    """End the servers whose starters were killed, and remove their folders."""
    for folder in build.glob("postgres-*"):
        # Without the file the folder is new; with a locked file it is in use. After an error it is
        # left to the next sweep.
        with contextlib.suppress(OSError), (folder / _STARTER).open("r+") as starter:
            fcntl.flock(starter, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _end(folder)
            shutil.rmtree(folder)


def _end(folder: Path) -> None:
    """End the server that works there, if it still runs."""
    pid_file = folder / "data/postmaster.pid"
    for pid in pid_file.read_text().split()[:1] if pid_file.exists() else ():
        with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(int(pid))) as process:
            # Any process may have that number by now.
            if f"{folder}/data" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                signal.pidfd_send_signal(process.fileno(), signal.SIGQUIT)
                if not select.select([process], [], [], _END_S)[0]:
                    raise TimeoutError(f"the server in {folder} did not end in {_END_S} s")


def place(build: Path, prefix: Sequence[str]) -> Path:
    """A new folder for a server: in `build`, or in the system's folder with a printed reason."""
    build.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="postgres-", dir=build))
    problem = _problem(folder, prefix)
    if not problem:
        return folder
    folder.rmdir()
    folder = Path(tempfile.mkdtemp(prefix="gpuaas-postgres-"))
    sys.stderr.write(f"PostgreSQL is in {folder}: {problem}\n")
    return folder


def _problem(folder: Path, prefix: Sequence[str]) -> str:
    """Why no server can have its socket there, "" if it can."""
    socket = f"{folder}/.s.PGSQL.5432"
    length = len(os.fsencode(socket))
    if length > _LONGEST:
        return f"{socket} has {length} bytes, a socket's path at most {_LONGEST}"
    if not _PLAIN.fullmatch(socket):
        return f"{socket} has other characters than letters, digits, '_', '-' and '.'"
    # Checked as that user, because root could enter any folder.
    entered = subprocess.run([*prefix, "test", "-x", folder.parent], cwd="/", check=False)
    return "" if entered.returncode == 0 else f"the server's user cannot enter {folder.parent}"
