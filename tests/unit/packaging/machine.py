"""A private machine of a test with systemd as process 1, and the service installed on it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BEGIN = ROOT / "tests" / "data" / "systemd_machine" / "begin.sh"
HIERARCHIES = ("/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")
BOOT_S = 60


@dataclass(frozen=True)
class Machine:
    """pid: of its process 1, as seen from this machine."""

    pid: int

    def try_(
        self, *argv: str, user: str = "", text: str = "", limit_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on it."""
        enter = ["nsenter", f"--target={self.pid}", "-m", "-p", "-n", "-u", "-i", "-C", "-r", "-w"]
        as_user = ["runuser", "-u", user, "--"] if user else []
        return subprocess.run(
            [*enter, *as_user, *argv],
            input=text,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )

    def run(self, *argv: str, user: str = "", text: str = "", limit_s: float = 120) -> str:
        """Run a command that must succeed; return its output."""
        done = self.try_(*argv, user=user, text=text, limit_s=limit_s)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}\n{self.journal()}"
        return done.stdout

    def journal(self) -> str:
        """The last lines of its journal."""
        return self.try_("journalctl", "--no-pager", "-q", "-n", "60", "-o", "cat").stdout

    def path(self, name: str) -> Path:
        """The path of its file from this machine."""
        return Path(f"/proc/{self.pid}/root{name}")


@contextmanager
def booted(scratch: Path, shown: dict[Path, str]) -> Iterator[Machine]:
    """Boot a machine; `shown` are folders of ours with their places on it; it may change them."""
    group = f"gpuaas-test-{os.getpid()}"
    folders = [f"{source}={place}" for source, place in shown.items()]
    with (
        (scratch.parent / "console.log").open("w+b") as console,
        subprocess.Popen(
            [str(BEGIN), group, str(scratch), *folders],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
        ) as process,
    ):
        try:
            yield _until_up(process, Path(console.name))
        finally:
            process.kill()
            process.wait()
            _forget(group)


def _until_up(process: subprocess.Popen[bytes], console: Path) -> Machine:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + BOOT_S
    state = ""
    while time.monotonic() < deadline:
        output = console.read_text(errors="replace")
        if process.poll() is not None:
            pytest.skip(f"no machine with systemd can be made here: {output[-500:].strip()}")
        first = children.read_text().split()
        if first:
            machine = Machine(int(first[0]))
            state = machine.try_("systemctl", "is-system-running").stdout.strip()
            if state in ("running", "degraded"):
                return machine
        time.sleep(0.1)
    pytest.fail(f"systemd is {state or 'silent'} after {BOOT_S} s: {console.read_text()[-2000:]}")


def _forget(group: str) -> None:
    # The kernel ends the machine's processes, but their control groups stay with their creator.
    for hierarchy in HIERARCHIES:
        top = Path(hierarchy, group)
        deadline = time.monotonic() + 10
        while top.exists() and time.monotonic() < deadline:
            folders = [top, *(path for path in top.rglob("*") if path.is_dir())]
            try:
                for folder in sorted(folders, reverse=True):
                    folder.rmdir()
            except OSError:
                time.sleep(0.1)


def installed(machine: Machine, wheel: Path) -> None:
    """docs/operations.md, "Installing"; the dependencies are ours and come in by a .pth file."""
    python = "/opt/gpuaas/bin/python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    machine.run(
        "sh",
        "-euxs",
        text=f"""
useradd --system --home-dir /var/lib/gpuaas --shell /usr/sbin/nologin gpuaas
# What root compiled in our checkout under a strict umask is nobody else's to read.
find /opt/dependencies ! -type l ! -perm -o=r -exec chmod o+rX {{}} +
echo /opt/python/lib > /etc/ld.so.conf.d/gpuaas-test.conf
ldconfig
/opt/python/bin/{version} -m venv --without-pip /opt/gpuaas
echo /opt/dependencies > /opt/gpuaas/lib/{version}/site-packages/dependencies.pth
{Path(sys.executable).parent}/uv pip install -q --no-deps --offline --python {python} {wheel}
for program in ansible-playbook ansible-galaxy ansible; do
  sed '1s,.*,#!{python},' {Path(sys.executable).parent}/$program > /opt/gpuaas/bin/$program
  chmod 755 /opt/gpuaas/bin/$program
done
cd {ROOT}
install -d -m 750 -g gpuaas /etc/gpuaas
install -m 640 -g gpuaas packaging/gpuaas.env /etc/gpuaas/gpuaas.env
echo GPUAAS_PUBLIC_URL=http://127.0.0.1:8080 >> /etc/gpuaas/gpuaas.env
install -d -m 700 -o gpuaas -g gpuaas /var/lib/gpuaas
install -m 644 packaging/systemd/*.service /etc/systemd/system/
systemctl daemon-reload
""",
    )
