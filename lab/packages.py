"""Packages that this machine needs to build and boot a lab, and their installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from lab.command import LabError, run
from lab.paths import cache_folder
from lab.progress import step

NEEDED = [
    "mmdebstrap", "mtools", "dosfstools", "zstd", "e2fsprogs", "fdisk", "ovmf",
    "debian-archive-keyring", "openssh-client",
]  # fmt: skip
# Without root, mmdebstrap uses a user namespace, whose id maps these programs write.
WITHOUT_ROOT = ["uidmap"]
# A machine that has just booted upgrades itself and holds the package manager's locks for minutes.
LOCK_LIMIT_S = 600.0
LOCK_PAUSE_S = 5.0
LOCKED = re.compile(r"Could not get lock|Unable to (acquire|lock)")
UBUNTU = ["ubuntu-keyring", "qemu-system-x86", "qemu-utils"]


def missing(required: list[str]) -> list[str]:
    """Return the packages that dpkg does not report as installed."""
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *required]
    # Exit code 1 only means that dpkg does not know some of the packages.
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    installed = {line.split()[0] for line in answer.splitlines() if line.endswith(" installed")}
    return [package for package in required if package not in installed]


def ensure() -> None:
    """Install the missing packages; without root and sudo, name them in an error."""
    if not shutil.which("dpkg-query"):
        raise LabError("the lab is built on Debian 12 or Ubuntu 24.04: this machine has no dpkg")
    root = os.geteuid() == 0
    ubuntu = "ubuntu" in Path("/etc/os-release").read_text().lower()
    required = NEEDED + ([] if root else WITHOUT_ROOT) + (UBUNTU if ubuntu else [])
    lacking = missing(required)
    if not lacking:
        return
    if not root and not shutil.which("sudo"):
        raise LabError(f"install these packages first (as root): {' '.join(lacking)}")
    # `env` comes after sudo, because sudo does not pass environment variables on.
    settings = ["LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"]
    apt = [*([] if root else ["sudo"]), "env", *settings, "apt-get"]
    with step("packages of this machine"):
        _when_unlocked([*apt, "update", "-q"])
        _when_unlocked([*apt, "install", "-y", "-q", "--no-install-recommends", *lacking])


def _when_unlocked(argv: list[str]) -> None:
    """Run apt-get, and retry while another package manager holds one of its locks."""
    log = cache_folder() / "packages.log"
    deadline = time.monotonic() + LOCK_LIMIT_S
    while True:
        # The error quotes the end of the log, so the log must hold only this attempt.
        log.unlink(missing_ok=True)
        try:
            run(argv, log=log)
        except LabError as error:
            if not LOCKED.search(str(error)) or time.monotonic() > deadline:
                raise
            time.sleep(LOCK_PAUSE_S)
        else:
            return
