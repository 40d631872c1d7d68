"""Machines with a real SSH server each, on loopback, run by the user of the test."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bench.fleet.service import free_port

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
USER = getpass.getuser()


@dataclass(frozen=True)
class Machine:
    """key: its host key, `type base64`. log: the output of its sshd."""

    folder: Path
    port: int
    key: str

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def known_hosts_line(self) -> str:
        return f"[127.0.0.1]:{self.port} {self.key}\n"


Certify = Callable[[str], str]


class Boot:
    """Starts machines in a folder; they end with `running`."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self._folder = folder
        self._running = running

    def __call__(
        self, name: str, *, login: str, settings: str = "", certify: Certify | None = None
    ) -> Machine:
        folder = self._folder / name
        server = machine(folder, login=login, settings=settings, certify=certify)
        return self._running.enter_context(server)


def new_key(path: Path) -> str:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(words, check=True)
    return path.with_name(f"{path.name}.pub").read_text().strip()


@contextmanager
def machine(
    folder: Path, *, login: str, settings: str = "", certify: Certify | None = None
) -> Iterator[Machine]:
    """login: the public key that opens it. certify: makes the host key's certificate."""
    folder.mkdir()
    key = new_key(folder / "host_key")
    (folder / "authorized_keys").write_text(f"{login}\n")
    port = free_port()
    lines = [
        f"ListenAddress 127.0.0.1:{port}",
        f"HostKey {folder}/host_key",
        f"AuthorizedKeysFile {folder}/authorized_keys",
        *("PidFile none", "StrictModes no", "PasswordAuthentication no", "LogLevel VERBOSE"),
        settings,
        # Not the developer's home: a login would run its dotfiles, which may wait for a lock. sshd
        # reads the first line of this kind only, so a SetEnv in `settings` must set HOME, too.
        f"SetEnv HOME={folder}",
    ]
    if certify:
        (folder / "host_key-cert.pub").write_text(certify(key) + "\n")
        lines.append(f"HostCertificate {folder}/host_key-cert.pub")
    config = folder / "sshd_config"
    config.write_text("\n".join(lines) + "\n")
    if os.geteuid() == 0:
        # With the packages systemd creates it, but a container may have no systemd.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with (folder / "log").open("wb") as log:
        words = [str(SSHD), "-D", "-e", "-f", str(config)]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=log) as process:
            try:
                server = Machine(folder, port, key)
                _await(server, process)
                yield server
            finally:
                process.terminate()


def _await(machine: Machine, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 20
    while "Server listening" not in machine.log:
        assert process.poll() is None and time.monotonic() < end, machine.log
        time.sleep(0.02)


@pytest.fixture
def boot(tmp_path: Path) -> Iterator[Boot]:
    """Starts machines, and ends them with the test."""
    if SSHD is None:
        pytest.skip("no sshd here: install openssh-server")
    with ExitStack() as running:
        yield Boot(tmp_path, running)
