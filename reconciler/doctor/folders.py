"""Checks of the state folder: permissions, SSH keys, free space."""

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
# Below the first limit the disk is full within days, below the second within hours.
_LITTLE_GIB, _LEAST_GIB = 5, 1


def state_folder(settings: Settings) -> Iterator[Finding]:
    """The folder exists, belongs to the service's user, is private and writable."""
    folder, check = settings.state_dir, "state_dir"
    if not folder.is_dir():
        yield fail(
            check,
            f"no folder {folder}",
            expected="the state folder of the service",
            remedy="set GPUAAS_STATE_DIR, or start the service once: it creates the folder",
        )
        return
    findings = list(_private(check, folder, 0o700))
    if not os.access(folder, os.W_OK | os.X_OK):
        findings.append(_other_owner(check, folder))
    yield from findings or [ok(check, str(folder))]


def keys(settings: Settings) -> Iterator[Finding]:
    """The keys of the authorities are complete and private: with them a reader can pose as any
    host, or as the reconciler.
    """
    trust, check = Trust(settings.state_dir.resolve() / "trust"), "ssh_ca"
    if not trust.directory.is_dir():
        yield warn(
            check,
            "no authority yet",
            expected=f"keys in {trust.directory}",
            remedy="start the service, which creates them, or restore the backup that has them:"
            " with new keys every host must enrol again",
        )
        return
    findings = list(_private(check, trust.directory, 0o700))
    for key in (trust.host_authority, trust.user_authority, trust.operator):
        if not key.exists() or not key.with_name(f"{key.name}.pub").exists():
            findings.append(
                fail(
                    check,
                    f"{key.name} or {key.name}.pub is missing",
                    expected="a pair of keys",
                    remedy="restore the trust folder from a backup",
                )
            )
            continue
        public_key(key.with_name(f"{key.name}.pub").read_text())
        findings += _private(check, key, 0o600)
    yield from findings or [ok(check, str(trust.directory))]


def room(settings: Settings) -> Iterator[Finding]:
    """The disk of the state folder has room for the database and the output of runs."""
    free = shutil.disk_usage(_existing(settings.state_dir)).free / _GIB
    text = f"{free:.1f} GiB free in {settings.state_dir}"
    expected, remedy = f"at least {_LITTLE_GIB} GiB", "free space or move the folder"
    if free < _LEAST_GIB:
        yield fail("disk_space", text, expected=expected, remedy=remedy)
    elif free < _LITTLE_GIB:
        yield warn("disk_space", text, expected=expected, remedy=remedy)
    else:
        yield ok("disk_space", text)


def _private(check: str, path: Path, mode: int) -> Iterator[Finding]:
    status = path.stat()
    if status.st_uid != os.geteuid():
        yield _other_owner(check, path)
    elif status.st_mode & 0o077:
        yield fail(
            check,
            f"{path} has mode {status.st_mode & 0o777:03o}",
            expected=f"mode {mode:03o}, for the service's user only",
            remedy=f"chmod {mode:03o} {path}",
        )


def _other_owner(check: str, path: Path) -> Finding:
    try:
        owner = pwd.getpwuid(path.stat().st_uid).pw_name
    except KeyError:
        owner = str(path.stat().st_uid)
    return fail(
        check,
        f"{path} belongs to {owner}, this is {pwd.getpwuid(os.geteuid()).pw_name}",
        expected="the same user for the service and its files",
        remedy=f"run as {owner} (`runuser -u {owner} -- gpuaas doctor`), or chown the folder",
    )


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else _existing(folder.parent)
