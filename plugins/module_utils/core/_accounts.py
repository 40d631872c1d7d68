"""Accounts of this host, and those through which our own services log in over SSH."""

from __future__ import annotations

from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host

# sshd reads the file of the account that is logged in to (see the enrolment script).
PRINCIPALS = "/etc/ssh/gpuaas_principals"


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


def named(name: str) -> User | None:
    """The account of that name."""
    return next((user for user in users() if user.name == name), None)


def add_login(name: str, shell: str) -> None:
    """Add an account without rights, to which only certificates log in."""
    words = ["--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
    # Not "!": without PAM, sshd takes an account with that for locked and refuses its certificates.
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
