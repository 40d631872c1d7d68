"""The state folder, the keys in it, and the room that is left."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path

from reconciler.doctor.finding import Finding, fail, ok, warn
from reconciler.settings import Settings
from reconciler.trust.ca import Trust
from reconciler.trust.keygen import public_key

_GIB = 1 << 30
# Below the first a crash is a matter of days, below the second of hours: runs keep their output.
_LITTLE_GIB, _LEAST_GIB = 5, 1


def state_folder(settings: Settings) -> Iterator[Finding]:
    """There, ours, closed to others, writable."""
    folder, check = settings.state_dir, "state_dir"
    if not folder.is_dir():
        yield fail(
            check,
            f"no folder {folder}",
            expected="the service's folder",
            remedy="set GPUAAS_STATE_DIR, or start the service once: it makes the folder",
        )
        return
    wrong = list(_closed_to_others(check, folder, 0o700))
    if not os.access(folder, os.W_OK | os.X_OK):
        wrong.append(_not_ours(check, folder))
    yield from wrong or [ok(check, str(folder))]


def keys(settings: Settings) -> Iterator[Finding]:
    """Whoever reads the authorities' keys can be any host, or us."""
    trust, check = Trust(settings.state_dir.resolve() / "trust"), "ssh_ca"
    if not trust.directory.is_dir():
        yield warn(
            check,
            "no authority yet",
            expected=f"keys in {trust.directory}",
            remedy="start the service to make them, or restore the backup that has them: hosts that"
            " were enrolled under others must enrol again",
        )
        return
    wrong = list(_closed_to_others(check, trust.directory, 0o700))
    for key in (trust.host_authority, trust.user_authority, trust.operator):
        if not key.exists() or not key.with_name(f"{key.name}.pub").exists():
            wrong.append(
                fail(
                    check,
                    f"{key.name} is missing or has no public half",
                    expected="a pair of keys",
                    remedy="restore the trust folder from a backup",
                )
            )
            continue
        public_key(key.with_name(f"{key.name}.pub").read_text())
        wrong += _closed_to_others(check, key, 0o600)
    yield from wrong or [ok(check, str(trust.directory))]


def room(settings: Settings) -> Iterator[Finding]:
    """The database and every run's output grow here."""
    free = shutil.disk_usage(_existing(settings.state_dir)).free / _GIB
    found = f"{free:.1f} GiB free in {settings.state_dir}"
    say = {"expected": f"at least {_LITTLE_GIB} GiB", "remedy": "make room or move the folder"}
    if free < _LEAST_GIB:
        yield fail("disk_space", found, **say)
    elif free < _LITTLE_GIB:
        yield warn("disk_space", found, **say)
    else:
        yield ok("disk_space", found)


def _closed_to_others(check: str, path: Path, mode: int) -> Iterator[Finding]:
    status = path.stat()
    if status.st_uid != os.geteuid():
        yield _not_ours(check, path)
    elif status.st_mode & 0o077:
        yield fail(
            check,
            f"{path} has mode {status.st_mode & 0o777:03o}",
            expected=f"mode {mode:03o}, for the service's user only",
            remedy=f"chmod {mode:03o} {path}",
        )


def _not_ours(check: str, path: Path) -> Finding:
    try:
        owner = pwd.getpwuid(path.stat().st_uid).pw_name
    except KeyError:
        owner = str(path.stat().st_uid)
    return fail(
        check,
        f"{path} belongs to {owner}, this is {pwd.getpwuid(os.geteuid()).pw_name}",
        expected="one user for the service and all that it has",
        remedy=f"run as {owner} (`runuser -u {owner} -- gpuaas doctor`), or chown the folder",
    )


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)
