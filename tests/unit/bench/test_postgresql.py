"""PostgreSQL of the tests: its socket, and a server whose starter was killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import postgresql

LIMIT = 107
# Length of a server's folder and socket name, which follow the build folder in the path.
BEHIND = len("/postgres-12345678/.s.PGSQL.5432")
STARTER = """import os, pathlib, signal, sys
from tests import postgresql
postgresql.claim(pathlib.Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""

# Like PostgreSQL, it handles SIGQUIT even if the tests, started in a shell's background, ignore it.
SERVER = """import signal, sys
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
print("works", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path: those of pytest's workers come near the limit of a socket's path."""
    with tempfile.TemporaryDirectory(prefix="gpuaas-test-") as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's folder for temporary files."""
    folder = tmp_path / "system"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def placed(build: Path, capsys: pytest.CaptureFixture[str], *prefix: str) -> tuple[Path, str]:
    """A server's folder, and why it is not in the build folder; "" when it is there."""
    folder = postgresql.place(build, prefix)
    output = capsys.readouterr().err
    assert list(build.iterdir()) == ([] if output else [folder]), "nothing else is left there"
    assert folder.parent == (build.parent / "system" if output else build)
    return folder, output


def test_it_is_in_the_build_folder_of_this_checkout() -> None:
    assert str(postgresql.BUILD) == str(Path(__file__).resolve().parents[3] / "build")
    folder = postgresql.place(postgresql.BUILD, ())
    try:
        long = len(f"{folder}/.s.PGSQL.5432") > LIMIT
        assert long or folder.parent == postgresql.BUILD
    finally:
        folder.rmdir()


def test_it_is_there_as_long_as_a_socket_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = tmp_path / ("b" * (LIMIT - BEHIND - len(f"{tmp_path}/")))
    folder, output = placed(longest, capsys)
    assert output == ""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/.s.PGSQL.5432")
    _, output = placed(tmp_path / f"{longest.name}b", capsys)
    assert f"has {LIMIT + 1} bytes, a socket's path at most {LIMIT}" in output


def test_it_is_elsewhere_where_the_server_could_not_use_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # These characters have a meaning in URLs, shells or lists of hosts.
    for name in ("a b", "a&b", "a,b", "a+b"):
        assert "other characters" in placed(tmp_path / name, capsys)[1]
    cannot = ("sh", "-c", "exit 1")
    assert "the server's user cannot enter" in placed(tmp_path / "closed", capsys, *cannot)[1]


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The folder of a server whose starter was killed."""
    folder = postgresql.place(tmp_path / "build", ())
    (folder / "data").mkdir()
    argv = [sys.executable, "-c", STARTER, str(folder)]
    assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL
    return folder


@pytest.fixture
def works() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Start a stand-in for a server in this folder, which runs until its input ends."""
    begun = []

    def begin(data: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", SERVER, data]
        begun.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert begun[-1].stdout is not None and begun[-1].stdout.readline() == b"works\n"
        return begun[-1]

    yield begin
    for process in begun:
        process.communicate()


def test_the_server_of_a_killed_starter_ends(
    left: Path, works: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    server = works(f"{left}/data")
    (left / "data/postmaster.pid").write_text(f"{server.pid}\n{left}/data\n")
    begins = postgresql.place(left.parent, ())
    used = postgresql.place(left.parent, ())
    starter = postgresql.claim(used)
    postgresql.sweep(left.parent)
    os.close(starter)
    assert server.wait(60) == -signal.SIGQUIT
    assert set(left.parent.iterdir()) == {begins, used}, "others are left alone"


def test_whoever_has_the_number_now_goes_on(
    left: Path, works: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    """A server that ended long ago left its process id, which another process has now."""
    other = works("/elsewhere/data")
    (left / "data/postmaster.pid").write_text(f"{other.pid}\n")
    postgresql.sweep(left.parent)
    assert other.poll() is None
    assert not left.exists()
