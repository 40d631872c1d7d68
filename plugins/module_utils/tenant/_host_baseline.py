"""Tenant baseline of a bare-metal host: digests of files and settings for logins and services.

Recorded before a tenant comes and compared after the tenant has left; each difference is named. It
is deliberately small. It is no audit of a host on which a tenant had root access, but it names the
changes that would affect the next tenant. It contains digests only, so that no secret of the host
is in it.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _accounts,
    _command,
    _host,
    _module_importer,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _usage

# Sections whose differences can give access to the next tenant's machine or run a program on it.
# The others (packages, kernel modules) also change through honest use.
ACCESS = ("accounts", "groups", "keys", "files", "programs", "listening", "mounts", "homes")

# Files that are read at login, at boot, or at scheduled times.
_WATCHED = (
    "/etc/sudoers", "/etc/sudoers.d", "/etc/ssh", "/etc/pam.d", "/etc/security",
    "/etc/nsswitch.conf", "/etc/ld.so.preload", "/etc/ld.so.conf.d", "/etc/environment",
    "/etc/profile", "/etc/profile.d", "/etc/bash.bashrc", "/etc/fstab", "/etc/crontab",
    "/etc/cron.d", "/etc/cron.hourly", "/etc/cron.daily", "/etc/cron.weekly", "/etc/cron.monthly",
    "/var/spool/cron", "/etc/systemd/system", "/etc/systemd/user", "/etc/rc.local", "/etc/init.d",
    "/etc/udev/rules.d", "/etc/modules", "/etc/modules-load.d", "/etc/modprobe.d",
    "/etc/initramfs-tools", "/etc/default/grub", "/etc/default/grub.d", "/etc/apt/sources.list",
    "/etc/apt/sources.list.d", "/etc/apt/apt.conf.d", "/etc/hosts", "/etc/subuid", "/etc/subgid",
    "/root/.bashrc", "/root/.profile", "/root/.bash_profile",
)  # fmt: skip
# Host certificates are renewed before they end (playbook renew_certificate), also while a tenant
# has the machine. A certificate is trusted only if the site's CA has signed it for this key.
_RENEWED = "-cert.pub"
_PROGRAMS = (
    *("/usr/local/sbin", "/usr/local/bin", "/usr/local/lib/systemd", "/boot/grub/grub.cfg"),
    _module_importer.LIBRARY,
)
# Higher ports are ephemeral: they appear and disappear in normal operation.
_LAST_FIXED_PORT = 32_767
# A larger file is identified by size and time, because these files are configuration, not data.
_LARGEST = 4 << 20
_LISTEN = "0A"
# Most differences, and characters of a name: an evidence is refused above 4 MiB.
MOST, LONGEST = 256, 300
_VFS = {"proc", "sysfs", "cgroup2", "devpts", "mqueue", "securityfs", "debugfs", "tracefs"}
_VFS |= {"configfs", "fusectl", "bpf", "pstore", "hugetlbfs", "autofs", "tmpfs", "devtmpfs"}
_VFS |= {"efivarfs", "rpc_pipefs", "binfmt_misc", "ramfs", "squashfs", "overlay", "nsfs"}


def take() -> dict[str, dict[str, str]]:
    """The sections by name: entries with a value that distinguishes them, both printable."""
    sections = {
        "accounts": _lines("/etc/passwd", "/etc/shadow"),
        "groups": _lines("/etc/group"),
        "keys": _keys(),
        "files": {path: text for root in _WATCHED for path, text in _files(root)},
        "programs": {path: text for root in _PROGRAMS for path, text in _files(root)},
        "listening": dict(_listening()),
        "mounts": {m.point: f"{m.type} {m.source}" for m in _usage.mounts() if m.type not in _VFS},
        "homes": {path.name: "present" for path in _entries("/home")},
        "packages": _packages(),
        "modules": {line.split()[0]: "loaded" for line in _text("/proc/modules")},
    }
    return {
        section: {_host.shown(name): _host.shown(text) for name, text in entries.items()}
        for section, entries in sections.items()
    }


def differences(
    before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> list[dict[str, Any]]:
    """Differences by section and name; access marks those that can let a user in.

    At most MOST are listed, those with access first, and one more row counts the others.
    """
    rows = []
    for section in sorted({*before, *now}):
        was, is_now = before.get(section, {}), now.get(section, {})
        for name in sorted({*was, *is_now}):
            if was.get(name) != is_now.get(name):
                change = "changed" if name in was and name in is_now else "added"
                rows.append(
                    {
                        "section": section,
                        "name": name[:LONGEST],
                        "change": change if name in is_now else "removed",
                        "access": section in ACCESS,
                    }
                )
    if len(rows) > MOST:
        rows.sort(key=lambda row: not row["access"])
        rest = {"section": "baseline", "name": f"{len(rows) - MOST} more differences"}
        rows[MOST:] = [{**rest, "change": "changed", "access": rows[MOST]["access"]}]
    return rows


def _lines(*paths: str) -> dict[str, str]:
    """First field of each line, with a digest of that field's lines in all files."""
    texts: dict[str, list[str]] = {}
    for path in paths:
        for line in _text(path):
            texts.setdefault(line.split(":")[0], []).append(line)
    return {name: _digest("\n".join(lines).encode()) for name, lines in texts.items()}


def _keys() -> dict[str, str]:
    """Keys that allow a login, of every account."""
    homes = sorted({user.home for user in _accounts.users()})
    return {path: text for home in homes if home != "/" for path, text in _files(f"{home}/.ssh")}


def _files(absolute: str) -> Iterator[tuple[str, str]]:
    root = _host.path(absolute)
    try:
        places = _tree(root) if root.is_dir() and not root.is_symlink() else [root]
    except (OSError, RecursionError):
        # A tree or name too deep or too long for this program. That is a difference as well.
        yield absolute, "unreadable"
        return
    for place in sorted(places):
        fingerprint = "" if place.name.endswith(_RENEWED) else _fingerprint(place)
        if fingerprint:
            yield f"/{place.relative_to(_host.ROOT)}", fingerprint


def _tree(root: Path) -> list[Path]:
    """Everything in a folder. Raises OSError for a part that cannot be listed."""

    def fail(broken: OSError) -> None:
        raise broken

    return [
        Path(folder, name)
        for folder, subfolders, files in os.walk(root, onerror=fail)
        for name in (*subfolders, *files)
    ]


def _fingerprint(place: Path) -> str:
    try:
        status = place.lstat()
        if stat.S_ISLNK(status.st_mode):
            return f"link {place.readlink()}"
        if not stat.S_ISREG(status.st_mode):
            return ""
        head = f"{status.st_mode & 0o7777:o} {status.st_uid}:{status.st_gid}"
        if status.st_size > _LARGEST:
            return f"{head} {status.st_size} {int(status.st_mtime)}"
        return f"{head} {_digest(place.read_bytes())}"
    except (OSError, ValueError):
        return ""


def _listening() -> Iterator[tuple[str, str]]:
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in _text(f"/proc/net/{kind}")[1:]:
            fields = line.split()
            address, _colon, port = fields[1].rpartition(":")
            listening = fields[3] == _LISTEN if kind.startswith("tcp") else True
            if listening and int(port, 16) <= _LAST_FIXED_PORT:
                yield f"{kind} {int(port, 16)} {address}", "listening"


def _packages() -> dict[str, str]:
    shown = _command.run(["dpkg-query", "-W", "-f", "${Package}:${Architecture} ${Version}\n"])
    pairs = (line.partition(" ") for line in shown.out.splitlines())
    return {name: version for name, _space, version in pairs}


def _entries(absolute: str) -> list[Path]:
    folder = _host.path(absolute)
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _text(absolute: str) -> list[str]:
    return [line for line in (_host.read(absolute) or "").splitlines() if line.strip()]


def _digest(data: bytes) -> str:
    # 64 bits distinguish files; the whole document travels through run variables twice.
    return hashlib.sha256(data).hexdigest()[:16]
