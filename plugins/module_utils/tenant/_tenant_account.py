"""Account of a bare-metal tenant on this host, and every trace of that account.

Traces are searched by the uid, which the platform assigns. A tenant with root access may have
renamed the account, but the kernel identifies processes and files by number.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _accounts, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _usage
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _pool_workers

SUDOERS = "/etc/sudoers.d/90-gpuaas-tenant"
# Folders in which every user may create files.
SHARED = tuple(f"/{name}" for name in ("tmp", "var/tmp", "dev/shm", "run/lock", "var/mail"))
# Files that are listed; all are removed.
_LISTED = 100
SCHEDULES = ("/var/spool/cron/crontabs", "/var/spool/cron/atjobs")
# systemd removes the control group after its answer; after this time it will not.
_SLICE_S = 15
_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Traces:
    """Traces of a tenant; all empty without a trace. groups: the group that came with the account,
    which `userdel` leaves if the tenant has given it members.
    """

    accounts: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    sudoers: bool = False
    slice_alive: bool = False
    processes: tuple[int, ...] = ()
    lingering: bool = False
    schedules: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    home: bool = False
    files: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    models: bool = False

    def checks(self) -> dict[str, dict[str, object]]:
        """An entry for each trace, in the form of slice_absence."""
        texts: dict[str, str] = {
            "account": ", ".join((*self.accounts, *(f"group {name}" for name in self.groups))),
            "sudoers": SUDOERS if self.sudoers else "",
            "sessions": "its slice is alive" if self.slice_alive else "",
            "processes": ", ".join(map(str, self.processes)),
            "linger": "set" if self.lingering else "",
            "schedules": ", ".join(self.schedules),
            "home": ", ".join(("present", *self.mounts)) if self.home else "",
            "files": ", ".join(self.files[:20]),
            "workers": ", ".join(self.workers),
            "models": _pool_workers.MODELS if self.models else "",
        }
        return {
            name: {"absent": not text, "known": True, "detail": text or "nothing found"}
            for name, text in texts.items()
        }


def home_of(name: str) -> str:
    """The home of a tenant account; refused for names that could lead elsewhere."""
    if not _NAME.fullmatch(name) or name == "root":
        raise Refusal(
            "username_invalid",
            expected="up to 32 lower case letters, digits, _ and -, and not root",
            found=repr(name),
            remedy="launch with another user name",
        )
    return f"/home/{name}"


def taken(name: str, uid: int) -> list[Refusal]:
    """Reasons why the account cannot be the tenant's: another account has its name, number or
    home, or a group has its name, without which no account of that name can be made.
    """
    users = _accounts.users()
    texts = [
        f"{user.name} has uid {user.uid}"
        for user in users
        if (user.name == name) is not (user.uid == uid)
    ]
    gids = [user.gid for user in users if (user.name, user.uid) == (name, uid)]
    if (group := _accounts.groups().get(name)) is not None and group not in gids:
        texts.append(f"the group {name} has gid {group}")
    home = home_of(name)
    if _host.is_there(home) and not _owns(home, uid):
        texts.append(f"{home} belongs to another user")
    return [
        Refusal(
            "account_taken",
            expected=f"the user {name} with uid {uid} and its home, or none of them",
            found=text,
            remedy="launch with another user name, or remove the account or group from the host",
        )
        for text in texts
    ]


def traces(name: str, uid: int) -> Traces:
    """Search all traces of the tenant."""
    home = home_of(name)
    users = _accounts.users()
    # `useradd` gave it the account's number, so a group of the host is none.
    ours = _accounts.groups().get(name) == uid and all(u.uid == uid for u in users if u.gid == uid)
    return Traces(
        accounts=tuple(user.name for user in users if user.uid == uid),
        groups=(name,) if ours else (),
        sudoers=_host.path(SUDOERS).exists(),
        slice_alive=slice_alive(uid),
        processes=tuple(_accounts.processes(uid)),
        lingering=_host.path(f"/var/lib/systemd/linger/{name}").exists(),
        schedules=_owned(SCHEDULES, uid),
        mounts=tuple(m.point for m in _usage.mounts() if m.point.startswith(f"{home}/")),
        # Judged by its owner: a home that existed before belongs to another user, and stays.
        home=_owns(home, uid),
        files=(*_unreadable(home), *_owned(SHARED, uid)),
        workers=_pool_workers.traces(),
        models=_pool_workers.has_models(),
    )


def slice_alive(uid: int) -> bool:
    """Whether a session of the uid, or a process started from it, is alive (control groups v2)."""
    return _host.path(_group(uid)).is_dir()


def end_sessions(uid: int) -> None:
    """Stop the slice with all its processes, including those that sudo started, and wait until it
    is gone.
    """
    # 5: systemd does not know the slice any more.
    _command.run(["systemctl", "stop", f"user-{uid}.slice"], ok=(0, 5), timeout=150)
    _host.wait_gone(_group(uid), _SLICE_S)


def _group(uid: int) -> str:
    return f"/sys/fs/cgroup/user.slice/user-{uid}.slice"


def remove_home(name: str) -> None:
    """Remove the rest of the home; refused while it contains a mount."""
    home = home_of(name)
    mounted = [
        m.point for m in _usage.mounts() if m.point == home or m.point.startswith(f"{home}/")
    ]
    if mounted:
        raise Refusal(
            "home_has_mounts",
            expected=f"nothing mounted below {home}",
            found=", ".join(mounted),
            remedy="unmount it first: the mounted file system may belong to another owner",
        )
    _command.remove_trees(home)


def remove_files(folders: Sequence[str], uid: int) -> None:
    """Remove the uid's files in these folders. What stays, the check afterwards names: a folder
    with another user's file in it, for one.
    """
    places = [str(place) for place in map(_host.path, folders) if place.is_dir()]
    if places:
        # find works with descriptors, bottom up, so a link placed meanwhile leads nowhere.
        words = ["find", *places, "-mindepth", "1", "-uid", str(uid), "-delete"]
        _command.run(words, ok=(0, 1), timeout=_command.REMOVAL_S)


def unmount_home(name: str) -> None:
    """Unmount everything below the home, the last mount first."""
    home = home_of(name)
    for mount in reversed([m for m in _usage.mounts() if m.point.startswith(f"{home}/")]):
        _command.run(["umount", "--", mount.place])


def _owns(absolute: str, uid: int) -> bool:
    try:
        return _host.path(absolute).lstat().st_uid == uid
    except OSError:
        return False


def _unreadable(absolute: str) -> list[str]:
    """The path, if its owner cannot be read."""
    try:
        _host.path(absolute).lstat()
    except OSError as broken:
        return _unless_gone(absolute, broken)
    return []


def _owned(folders: Sequence[str], uid: int) -> tuple[str, ...]:
    """The first paths below the folders that the uid owns, as text for people. A path that cannot
    be read is one of them: a tenant can mount what only the tenant can read.
    """
    paths = (path for folder in folders for path in _below(folder, uid))
    return tuple(_host.shown(path) for path in itertools.islice(paths, _LISTED))


def _below(folder: str, uid: int) -> Iterator[str]:
    # No recursion, because a tenant may nest folders as deeply as it likes. A path that is too
    # long for the kernel is passed over: a folder above it is the tenant's too.
    folders = [folder]
    while folders:
        top = folders.pop()
        try:
            entries = list(os.scandir(_host.path(top)))
        except OSError as broken:
            entries = []
            yield from _unless_gone(top, broken)
        for entry in entries:
            path = f"{top}/{entry.name}"
            try:
                if entry.stat(follow_symlinks=False).st_uid == uid:
                    yield path
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
            except OSError as broken:
                yield from _unless_gone(path, broken)


def _unless_gone(path: str, broken: OSError) -> list[str]:
    return [] if broken.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG) else [path]
