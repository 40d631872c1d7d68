"""Accounts of this host, and those through which our own services log in over SSH."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# Folder with a file per account, which sshd reads at its logins (see the enrolment script).
PRINCIPALS = "/etc/ssh/gpuaas_principals"
# Reads the telemetry of slices, and nothing else.
TELEMETRY = "gpuaas-telemetry"


@dataclass(frozen=True)
class User:
    """A line of passwd."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str


def users() -> list[User]:
    """Every account of passwd, in order; malformed lines are skipped."""
    parsed = []
    for line in (_host.kept("/etc/passwd") or "").splitlines():
        fields = line.split(":")
        if len(fields) == 7 and fields[2].isdigit() and fields[3].isdigit():
            uid, gid = int(fields[2]), int(fields[3])
            parsed.append(User(fields[0], uid, gid, fields[5], fields[6]))
    return parsed


def groups() -> dict[str, int]:
    """The number of each group; malformed lines are skipped."""
    lines = (_host.kept("/etc/group") or "").splitlines()
    fields = [line.split(":") for line in lines]
    return {words[0]: int(words[2]) for words in fields if len(words) == 4 and words[2].isdigit()}


def named(name: str) -> User | None:
    """The account of that name."""
    return next((user for user in users() if user.name == name), None)


def add_login(name: str, shell: str) -> None:
    """Add an account without rights, which only a certificate can log in to."""
    words = ["--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
    # Not "!": without PAM, sshd treats such an account as locked and refuses certificates too.
    _command.run(["useradd", *words, "--shell", shell, "--password", "*", "--", name])


def remove_login(name: str) -> None:
    """Remove an account that `add_login` has added, and its principals."""
    _command.run(["userdel", "--", name])
    _host.remove(principals(name))


def principals(name: str) -> str:
    """The file with the principals whose certificates log in to an account."""
    return f"{PRINCIPALS}/{name}"


def write_principals(name: str, text: str) -> None:
    """sshd reads the file at each login, so a removed line ends at once."""
    folder = _host.path(PRINCIPALS)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    _host.write(principals(name), text)


def processes(uid: int) -> list[int]:
    """Processes with this uid, and those that come from a login with it.

    Child processes inherit the login uid, also through sudo, and cannot change it.
    """
    return [pid for pid in sorted(_host.processes()) if uid in _uids(pid)]


def end_processes(uid: int, *, grace: float) -> list[int]:
    """Ask every process of the uid to end, then kill it; returns the processes that existed.

    grace: seconds. Signals go through process descriptors, and only after the uid was read under
    them. A process id that the kernel has reused meanwhile is therefore never signalled.
    """
    ended: set[int] = set()
    end = time.monotonic() + grace
    while left := processes(uid):
        last = time.monotonic() > end
        for pid in left:
            if pid not in ended or last:
                _signal(pid, uid, signal.SIGKILL if last else signal.SIGTERM)
        ended.update(left)
        if time.monotonic() > end + 10:
            raise Refusal(
                "processes_left",
                expected=f"no process of uid {uid}",
                found=f"{', '.join(map(str, left))} do not end",
                remedy="they hang in the kernel: look at their stacks, reboot the host",
            )
        time.sleep(0.1)
    return sorted(ended)


def _signal(pid: int, uid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if uid in _uids(pid):
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _uids(pid: int) -> set[int]:
    """Real, effective, saved, filesystem and login uid; empty for a dead process."""
    uids: set[int] = set()
    for line in _host.of_process(pid, "status").splitlines():
        if line.startswith("State:") and "\tZ" in line:
            return set()  # a zombie: it has ended, but its parent has not collected it yet
        if line.startswith("Uid:"):
            uids = {int(number) for number in line.split()[1:]}
    # A kernel without audit has no such file.
    login = _host.of_process(pid, "loginuid")
    return uids | ({int(login)} if login else set())
