"""Application key in a home that its tenant controls: files, links and owners are real."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host_mode, _ledger
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import _managed_key
from ansible_collections.gpuaas.slice.plugins.modules import managed_key as module

pytestmark = pytest.mark.covers("APP-4")

UID = 59_431  # Unused on the machine that runs the tests; tenants have 59000.
ALLOCATION = "0f8fad5b-d9cb-469f-a165-70867728950e"
INSTANCE = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
OTHER = "11111111-7425-40de-944b-e07fc1f90ae7"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX"
ENDS = 1_767_225_600
SUBJECT = _change.Subject(module.observe, module.plan, module.apply, module.facts)
# A careless file: no final line end, bytes that are not text, and another instance's marker.
THEIRS = b"ssh-rsa AAAA alice\r\n\xff\xfe # odd\n\nssh-rsa BBBB gpuaas-managed:" + OTHER.encode()


class Home:
    """The tenant's home on a tree, with the host's ledger beside it."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.home, self.ssh = tree / "home/alice", tree / "home/alice/.ssh"
        self.keys = self.ssh / "authorized_keys"
        self.ssh.mkdir(parents=True)
        for folder in (self.home, self.ssh):
            os.chown(folder, UID, UID)
        (tree / "etc").mkdir()
        line = f"alice:x:{UID}:{UID}::/home/alice:/bin/bash\n"
        (tree / "etc/passwd").write_text(line)
        _ledger.hold(_ledger.MACHINE, fence=3, allocation_id=ALLOCATION, disk_identity="")

    def holds(self, content: bytes, *, mode: int = 0o600, gid: int = UID) -> None:
        self.keys.write_bytes(content)
        self.keys.chmod(mode)
        os.chown(self.keys, UID, gid)

    def line(self, ends: int = ENDS) -> bytes:
        return _managed_key.line(INSTANCE, KEY, ends)


@pytest.fixture
def home(tree: Path) -> Home:
    return Home(tree)


def drive(state: str = "present", *, check_mode: bool = False, **more: Any) -> _change.Outcome:
    params = {
        "username": "alice", "uid": UID, "allocation_id": ALLOCATION, "fence": 3,
        "instance_id": INSTANCE, "public_key": KEY, "expires_at": ENDS, "state": state,
    }  # fmt: skip
    return _change.drive(SUBJECT, {**params, **more}, check_mode=check_mode)


def code(state: str = "present", **more: Any) -> str:
    try:
        failure = drive(state, **more).failure
    except _change.Refusal as refusal:
        return refusal.code
    return failure.code


def snapshot(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return everything below a folder: owner, kind and mode, content."""
    files = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        plain = stat.S_ISREG(status.st_mode)
        content = path.read_bytes() if plain else b""
        files[str(path)] = (status.st_uid, status.st_mode, content)
    return files


def test_the_line_is_put_beside_the_tenants_own_and_taken_away_again(home: Home) -> None:
    home.holds(THEIRS, mode=0o640, gid=59_432)
    forecast = drive(check_mode=True)
    assert forecast.changed and home.keys.read_bytes() == THEIRS
    made = drive()
    assert (made.failure, made.done) == (None, ["put_line"])
    assert made.facts["managed_key"] == {"present": True, "expires_at": ENDS}
    assert home.keys.read_bytes() == THEIRS + b"\n" + home.line() + b"\n"
    status = home.keys.stat()
    kept = (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode))
    assert kept == (UID, 59_432, 0o640)
    assert drive().changed is False
    renewed = drive(expires_at=ENDS + 3600)
    assert renewed.changed
    assert home.keys.read_bytes() == THEIRS + b"\n" + home.line(ENDS + 3600) + b"\n"
    gone = drive("absent")
    assert (gone.failure, gone.done) == (None, ["remove_line"])
    assert gone.facts["managed_key"] == {"present": False, "expires_at": 0}
    assert home.keys.read_bytes() == THEIRS + b"\n"
    assert drive("absent").changed is False
    assert [path.name for path in home.ssh.iterdir()] == ["authorized_keys"]


def test_the_diff_shows_nothing_of_the_tenants(home: Home) -> None:
    home.holds(THEIRS)
    shown = str(drive(check_mode=True).document())
    assert "alice:" not in shown and "AAAA alice" not in shown and "BBBB" not in shown


def test_the_key_may_run_commands_until_it_ends(home: Home) -> None:
    options, _, rest = home.line().decode().partition(" ")
    assert rest == f"{KEY} gpuaas-managed:{INSTANCE}"
    limit, _, end = options.partition(",")
    # `restrict` removes forwarding, terminal and rc; without command= any command runs.
    assert limit == "restrict"
    local = time.localtime(ENDS)
    assert end == f'expiry-time="{time.strftime("%Y%m%d%H%M", local)}"'


def test_many_lines_with_the_marker_become_one(home: Home) -> None:
    stale = b"ssh-rsa AAAA gpuaas-managed:" + INSTANCE.encode()
    home.holds(stale + b" \n# " + home.line() + b"\nssh-rsa CCCC bob\n" + home.line(1))
    assert drive().failure is None
    assert home.keys.read_bytes() == b"ssh-rsa CCCC bob\n" + home.line() + b"\n"


def test_folder_and_file_are_made_as_the_tenants(home: Home) -> None:
    home.ssh.rmdir()
    assert drive("absent").changed is False and not home.ssh.exists()
    assert drive().failure is None
    for path, mode in ((home.ssh, 0o700), (home.keys, 0o600)):
        status = path.stat()
        assert (status.st_uid, status.st_gid) == (UID, UID)
        assert stat.S_IMODE(status.st_mode) == mode


@pytest.fixture
def roots(home: Home) -> Path:
    """A folder of root with keys, to which a tenant would like root to write."""
    folder = home.tree / "root/.ssh"
    folder.mkdir(parents=True)
    (folder / "authorized_keys").write_bytes(b"ssh-rsa ROOT root\n")
    return folder


@pytest.mark.parametrize("state", ["present", "absent"])
@pytest.mark.parametrize("trap", ["file", "folder", "home", "dangling", "pipe", "directory"])
def test_no_trap_in_the_home_is_walked_into(home: Home, roots: Path, trap: str, state: str) -> None:
    if trap == "file":
        home.keys.symlink_to(roots / "authorized_keys")
    elif trap == "dangling":
        home.keys.symlink_to(roots / "made-by-root")
    elif trap == "pipe":
        os.mkfifo(home.keys)
        os.chown(home.keys, UID, UID)
    elif trap == "directory":
        home.keys.mkdir()
        os.chown(home.keys, UID, UID)
    elif trap == "folder":
        home.ssh.rmdir()
        home.ssh.symlink_to(roots)
    else:
        home.ssh.rmdir()
        home.home.rmdir()
        home.home.symlink_to(roots.parent)
    before = snapshot(home.tree / "root"), snapshot(home.tree / "home")
    assert code(state) == "home_unsafe"
    assert (snapshot(home.tree / "root"), snapshot(home.tree / "home")) == before


@pytest.mark.parametrize("owned", ["home", "ssh", "keys"])
def test_what_is_not_the_tenants_is_neither_read_nor_written(home: Home, owned: str) -> None:
    """A hard link to another user's file, or a folder moved into the home."""
    home.holds(b"ssh-rsa AAAA alice\n")
    os.chown(getattr(home, owned), 0, 0)
    before = snapshot(home.tree / "home")
    assert code() == "home_unsafe"
    assert snapshot(home.tree / "home") == before


def test_a_link_that_is_put_there_after_the_look_is_not_followed(
    home: Home, roots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading and writing, the tenant replaces every named object."""
    home.holds(b"ssh-rsa AAAA alice\n")
    write = _managed_key.write

    def exchange(at: int, content: bytes, **owner: Any) -> None:
        home.ssh.rename(home.home / "moved")
        home.ssh.symlink_to(roots)
        (home.home / "moved/authorized_keys").unlink()
        (home.home / "moved/authorized_keys").symlink_to(roots / "authorized_keys")
        write(at, content, **owner)

    monkeypatch.setattr(_managed_key, "write", exchange)
    assert code() == "home_unsafe", "the second look finds the link"
    assert (roots / "authorized_keys").read_bytes() == b"ssh-rsa ROOT root\n"
    assert (roots / "authorized_keys").stat().st_uid == 0
    # The write went into the tenant's own folder, in place of the link.
    written = home.home / "moved/authorized_keys"
    assert written.read_bytes() == b"ssh-rsa AAAA alice\n" + home.line() + b"\n"
    assert not written.is_symlink()


def test_a_folder_that_is_exchanged_while_it_is_made_is_not_given_away(
    home: Home, roots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.ssh.rmdir()
    mkdir = os.mkdir

    def exchange(name: str, mode: int, *, dir_fd: int) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        home.ssh.rmdir()
        roots.rename(home.ssh)

    monkeypatch.setattr(_managed_key.os, "mkdir", exchange)
    assert code() == "home_unsafe"
    assert home.ssh.stat().st_uid == 0


def test_a_file_that_is_too_large_is_refused(home: Home) -> None:
    home.holds(b"#" * (_managed_key.LARGEST + 1))
    assert code() == "home_unsafe"


def test_a_write_that_fails_leaves_what_was_there(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.holds(b"ssh-rsa AAAA alice\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_managed_key.os, "fchmod", full)
    assert code() == "keys_not_written"
    assert home.keys.read_bytes() == b"ssh-rsa AAAA alice\n"
    assert [path.name for path in home.ssh.iterdir()] == ["authorized_keys"]


def test_an_older_claim_and_another_tenants_machine_are_refused(home: Home) -> None:
    assert code(fence=2) == "stale_fence"
    assert code(allocation_id=OTHER) == "machine_not_leased"
    _ledger.raise_fence(_ledger.MACHINE, fence=4)
    assert code() == code("absent") == "stale_fence"
    assert not home.keys.exists()


@pytest.mark.covers("I10")
def test_a_run_that_became_late_while_it_looked_puts_no_key(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*seen: Any) -> Any:
        _ledger.raise_fence(_ledger.MACHINE, fence=4)
        return module.plan(*seen)

    monkeypatch.setitem(globals(), "SUBJECT", dataclasses.replace(SUBJECT, plan=late))
    assert code() == "stale_fence"
    assert not home.keys.exists()


def test_on_a_slice_host_nothing_is_done(home: Home) -> None:
    mode = home.tree / _host_mode.MARKER.lstrip("/")
    mode.parent.mkdir(parents=True, exist_ok=True)
    mode.write_text(json.dumps({"mode": "slice"}))
    assert code() == "node_in_slice_mode"


def test_without_the_account_there_is_nothing_to_remove(home: Home) -> None:
    (home.tree / "etc/passwd").write_text(f"renamed:x:{UID}:{UID}::/home/alice:/bin/bash\n")
    assert code() == "account_missing"
    assert drive("absent").changed is False


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("public_key", f'command="reboot" {KEY}', "managed_key_invalid"),
        ("public_key", f"{KEY}\n{KEY}", "managed_key_invalid"),
        ("instance_id", f"{INSTANCE}\n{KEY}", "managed_key_invalid"),
        ("instance_id", "", "managed_key_invalid"),
        ("username", "../root", "username_invalid"),
        ("username", "root", "username_invalid"),
    ],
)
def test_hostile_values_are_refused(home: Home, field: str, value: str, expected: str) -> None:
    home.holds(b"")
    assert code(**{field: value}) == expected
    assert home.keys.read_bytes() == b""
