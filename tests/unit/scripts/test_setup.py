"""`scripts/setup` on a machine whose package manager is busy: real apt-get, locks of its own."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
APT = shutil.which("apt-get")

pytestmark = pytest.mark.skipif(APT is None, reason="needs apt-get")

# update: the real program on a private root without sources. install: a stand-in, because the
# private root has no packages.
APT_GET = """#!/bin/sh
echo "$*" >> {calls}
case " $* " in
  *" update "*) exec {apt} -o Dir={root} -o Dir::Etc={root}/etc "$@" ;;
  *) [ -z "{problem}" ] || {{ echo "{problem}" >&2; exit 100; }} ;;
esac
"""


class Checkout:
    """A copy of the script beside programs that stand for the machine's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.lists = folder / "root" / "var" / "lib" / "apt" / "lists"
        (self.lists / "partial").mkdir(parents=True)
        (folder / "root" / "var" / "lib" / "dpkg").mkdir()
        (folder / "root" / "var" / "lib" / "dpkg" / "status").touch()
        for name in (
            "etc/sources.list.d",
            "etc/apt.conf.d",
            "etc/preferences.d",
            "var/cache/apt/archives/partial",
        ):
            (folder / "root" / name).mkdir(parents=True)
        (folder / "root" / "etc" / "sources.list").touch()
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "setup", folder / "scripts")
        self.program(".venv/bin/uv", "#!/bin/sh\n")
        self.program("bin/dpkg-query", "#!/bin/sh\nexit 1\n")
        self.program("bin/sudo", '#!/bin/sh\nexec "$@"\n')
        self.apt_get()

    def apt_get(self, problem: str = "") -> None:
        words = {"calls": self.calls, "apt": APT, "root": self.folder / "root", "problem": problem}
        self.program("bin/apt-get", APT_GET.format(**words))

    def program(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def setup(self, *, limit_s: int = 30) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "SLICE_SETUP_LOCK_LIMIT_S": str(limit_s),
            "SLICE_SETUP_LOCK_PAUSE_S": "1",
        }
        return subprocess.run(
            [self.folder / "scripts" / "setup", "--uv-only"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_free_package_manager_is_used_at_once(checkout: Checkout) -> None:
    done = checkout.setup()
    assert (done.returncode, done.stderr) == (0, "")
    assert "waiting" not in done.stdout
    update, install = checkout.calls.read_text().splitlines()
    assert update.endswith("DPkg::Lock::Timeout=1 update -qq")
    assert "DPkg::Lock::Timeout=1 install -y" in install


def test_package_lists_in_use_are_waited_for(checkout: Checkout) -> None:
    checkout.calls.touch()
    with (checkout.lists / "lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
        # A POSIX lock like apt's own, so that apt-get finds the lists locked by another process.
        fcntl.lockf(lock, fcntl.LOCK_EX)
        run = pool.submit(checkout.setup)
        # The first call has met the lock when the second comes.
        while len(checkout.calls.read_text().splitlines()) < 2 and not run.done():
            time.sleep(0.02)
        fcntl.lockf(lock, fcntl.LOCK_UN)
        done = run.result()
    assert done.returncode == 0, done.stderr
    waiting = [line for line in done.stdout.splitlines() if "waiting up to 30 s" in line]
    assert len(waiting) == 1
    assert f"Could not get lock {checkout.lists}/lock" in waiting[0]
    assert len(checkout.calls.read_text().splitlines()) > 2


def test_waiting_ends(checkout: Checkout) -> None:
    with (checkout.lists / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        done = checkout.setup(limit_s=1)
    assert done.returncode == 1
    assert "expected the package manager to be free within 1 s; found: E: Could not" in done.stderr
    assert "then run this again" in done.stderr


def test_another_failure_is_shown_at_once(checkout: Checkout) -> None:
    checkout.apt_get(problem="E: Unable to locate package make")
    done = checkout.setup()
    assert done.returncode == 1
    assert done.stderr.strip() == "E: Unable to locate package make"
    assert "waiting" not in done.stdout
