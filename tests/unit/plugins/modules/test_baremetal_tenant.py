"""Account of a tenant: created, locked out, removed. Processes are real, the rest is a tree."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import (
    _accounts,
    _change,
    _command,
    _host,
    _host_mode,
    _ledger,
)
from ansible_collections.gpuaas.slice.plugins.module_utils.tenant import (
    _pool_workers,
    _tenant_account,
)
from ansible_collections.gpuaas.slice.plugins.modules import baremetal_tenant as module

pytestmark = pytest.mark.covers("CTRL-15")

UID = 59_431  # Unused on the machine that runs the tests; tenants have 59000.
KEY = "ssh-ed25519 AAAA alice"
SUBJECT = _change.Subject(module.observe, module.plan, module.apply, module.facts)


class Accounts:
    """Programs that change accounts, on a tree; no other program may run."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self.calls: list[str] = []
        self.passwd = ["root:x:0:0:root:/root:/bin/bash", "ops:x:1000:1000::/home/ops:/bin/bash"]
        self.shadow = {"root": "", "ops": ""}
        self.busy: set[str] = set()
        for folder in ("tmp", "dev/shm", "var/spool/cron/crontabs", "home/ops", "proc/self"):
            (tree / folder).mkdir(parents=True)
        self.mounts()
        self._write()

    def run(self, argv: Any, *, ok: Any = (0,), stdin: Any = None, timeout: float = 60) -> Any:
        name, last = argv[0], argv[-1]
        self.calls.append(name)
        if name == "useradd":
            self.passwd.append(f"{last}:x:{UID}:{UID}::/home/{last}:/bin/bash")
            self.shadow[last] = ""
            self.create(f"home/{last}", folder=True)
        elif name == "usermod":
            self.shadow[last] = "1"
        elif name == "userdel":
            self.passwd = [line for line in self.passwd if not line.startswith(f"{last}:")]
        elif name == "groupdel":
            file = self.tree / "etc/group"
            left = [line for line in file.read_text().splitlines() if line.split(":")[0] != last]
            file.write_text("".join(f"{line}\n" for line in left))
        elif name == "install":
            self.create(last.lstrip("/"), folder=True)
        elif name == "chown":
            os.chown(self.tree / last.lstrip("/"), UID, UID)
        elif name == "visudo":
            assert stdin == "alice ALL=(ALL:ALL) NOPASSWD:ALL\n"
        elif name == "systemctl":
            assert argv[1:] == ["stop", f"user-{UID}.slice"]
            shutil.rmtree(self.tree / f"sys/fs/cgroup/user.slice/user-{UID}.slice")
        elif name == "umount":
            if last in self.busy:
                raise _command.Refusal("command_failed", expected="", found="busy", remedy="")
            self.mounts(*[point for point in self.points if point != last])
        elif name in ("find", "rm"):
            # These work on the tree only, because its folder is in their arguments.
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode in ok, done.stderr
        else:
            pytest.fail(f"unscripted command: {argv}")
        self._write()
        return _command.Result(0, "", "")

    def create(self, path: str, *, folder: bool = False, uid: int = UID) -> Path:
        target = self.tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(exist_ok=True) if folder else target.write_text("x")
        os.chown(target, uid, uid)
        return target

    def session(self) -> None:
        (self.tree / f"sys/fs/cgroup/user.slice/user-{UID}.slice").mkdir(parents=True)

    def mounts(self, *points: str) -> None:
        self.points = points
        lines = [f"1 1 0:9 / {point} rw - fuse.sshfs host: rw\n" for point in points]
        table = "".join(lines).encode(errors="surrogateescape")
        (self.tree / "proc/self/mountinfo").write_bytes(table)

    def _write(self) -> None:
        etc = self.tree / "etc"
        etc.mkdir(exist_ok=True)
        (etc / "passwd").write_text("\n".join(self.passwd) + "\n")
        lines = [f"{name}:*:20000:0:99999:7::{day}:" for name, day in self.shadow.items()]
        (etc / "shadow").write_text("\n".join(lines) + "\n")


@pytest.fixture
def accounts(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Accounts:
    made = Accounts(tree)
    monkeypatch.setattr(_command, "run", made.run)
    return made


def drive(state: str, *, fence: int = 1, check_mode: bool = False, **more: Any) -> _change.Outcome:
    params = {"username": "alice", "uid": UID, "fence": fence, "ssh_keys": [KEY], "grace": 1}
    params |= {"workers": None, "state": state}
    return _change.drive(SUBJECT, params | more, check_mode=check_mode)


def code(state: str, **more: Any) -> str:
    outcome = drive(state, **more)
    return outcome.failure.code


def test_an_account_with_keys_and_sudo_and_no_password(accounts: Accounts) -> None:
    assert drive("present", check_mode=True).changed and accounts.calls == []
    made = drive("present")
    assert made.failure is None, made.failure
    assert made.done == ["add_account", "write_keys", "write_sudoers"]
    assert made.facts["account"] == {"username": "alice", "uid": UID, "home": "/home/alice"}
    keys = accounts.tree / "home/alice/.ssh/authorized_keys"
    assert (keys.read_text(), keys.stat().st_mode & 0o777) == (f"{KEY}\n", 0o600)
    rule = accounts.tree / _tenant_account.SUDOERS.lstrip("/")
    assert rule.stat().st_mode & 0o777 == 0o440
    assert drive("present").changed is False


def test_everything_of_the_tenant_goes_and_nothing_of_others(accounts: Accounts) -> None:
    drive("present")
    accounts.session()
    mine = [
        "var/spool/cron/crontabs/alice", "var/spool/cron/atjobs/a00001", "tmp/left",
        "dev/shm/left", "tmp/mine/deep",
    ]  # fmt: skip
    for path in mine:
        accounts.create(path)
    os.chown(accounts.tree / "tmp/mine", UID, UID)
    others = accounts.create("tmp/theirs/file", uid=0)
    (accounts.tree / "tmp/link").symlink_to(others)
    os.chown(accounts.tree / "tmp/link", UID, UID, follow_symlinks=False)
    accounts.create("var/lib/systemd/linger/alice")
    accounts.mounts("/home/alice/remote")

    ended = drive("ended")
    assert ended.done == ["remove_sudoers", "lock_account", "end_sessions"]
    assert ended.facts["absence"]["absent"] is False
    assert drive("ended").changed is False

    gone = drive("absent")
    assert gone.failure is None, gone.failure
    assert gone.facts["absence"]["absent"], gone.facts["absence"]
    assert "userdel" in accounts.calls and "alice" not in _host.read("/etc/passwd")
    left = [path for path in mine if (accounts.tree / path).exists()]
    assert left == [] and others.exists() and (accounts.tree / "home/ops").is_dir()
    assert drive("absent").changed is False


WORKERS = {"token": "gpw_secret", "unit": "[Service]\nExecStart=true\n", "replicas": 2}
GROUP = f"sys/fs/cgroup/system.slice/{_pool_workers._SLICE}"


def test_workers_of_a_pool_start_and_end_with_their_tenant(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def systemctl(argv: Any, **options: Any) -> Any:
        if argv[0] != "systemctl" or "user-" in argv[-1]:
            return accounts.run(argv, **options)
        calls.append(argv[1:])
        group = accounts.tree / GROUP
        if argv[1] == "enable":
            wants = accounts.tree / "etc/systemd/system/multi-user.target.wants"
            wants.mkdir(parents=True, exist_ok=True)
            for unit in argv[2:]:
                (wants / unit).unlink(missing_ok=True)
                (wants / unit).symlink_to("../gpuaas-worker@.service")
        elif argv[1] == "restart":
            group.mkdir(parents=True, exist_ok=True)
        elif argv[1] == "kill":
            group.rmdir()
        return _command.Result(0, "", "")

    monkeypatch.setattr(_command, "run", systemctl)
    monkeypatch.setattr(_pool_workers, "_KILL_S", 0)
    tree = accounts.tree
    refused = drive("present", workers=WORKERS, check_mode=True).failure
    assert refused and refused.code == "worker_kit_missing" and calls == []
    (tree / "opt/gpuaas/bin").mkdir(parents=True)
    (tree / "opt/gpuaas/bin/gpuaas").write_text("")
    made = drive("present", workers=WORKERS)
    assert made.failure is None, made.failure
    assert made.done[3:] == ["write_token", "write_unit", "start_workers"]
    assert WORKERS["token"] not in str(made.document())
    token = tree / _pool_workers.TOKEN.lstrip("/")
    assert (token.read_text(), token.stat().st_mode & 0o777) == ("gpw_secret\n", 0o600)
    units = ["gpuaas-worker@1.service", "gpuaas-worker@2.service"]
    assert calls[1:] == [["enable", *units], ["restart", "--no-block", *units]]
    assert drive("present", workers=WORKERS).changed is False
    # Another run has another token, with which running workers are started again.
    again = drive("present", workers=WORKERS | {"token": "other"})
    assert again.done == ["write_token", "start_workers"] and calls[-1][0] == "restart"

    # The tenant has made a folder of the unit, and its workers do not end by SIGTERM.
    (tree / _pool_workers.UNIT.lstrip("/")).unlink()
    (tree / _pool_workers.UNIT.lstrip("/")).mkdir()
    (tree / _pool_workers.MODELS.lstrip("/") / "m.py").write_text("")
    ended = drive("ended", grace=0)
    assert ended.done[-1] == "end_workers" and not (tree / GROUP).exists()
    assert [words[0] for words in calls[-3:]] == ["stop", "kill", "daemon-reload"]
    assert ended.facts["absence"]["checks"]["models"]["absent"] is False
    gone = drive("absent")
    assert gone.facts["absence"]["absent"] and not token.exists()
    for place in ("opt/gpuaas/bin/gpuaas", "etc/systemd/system/multi-user.target.wants"):
        assert (tree / place).exists(), place


def test_very_many_files_of_any_name_are_removed_and_few_listed(accounts: Accounts) -> None:
    for number in range(150):
        accounts.create(f"tmp/{number}\udcff")
    gone = drive("absent")
    assert gone.failure is None, gone.failure
    (step,) = [row for row in gone.document()["plan"] if row["name"] == "remove_files"]
    assert len(step["before"]) == 100 and step["before"][0].endswith("\\xff")
    assert gone.facts["absence"]["absent"] and not any((accounts.tree / "tmp").iterdir())


def test_folders_nested_beyond_the_longest_path_are_removed(accounts: Accounts) -> None:
    drive("present")
    accounts.create("tmp/mine", folder=True)
    for place in ("tmp/mine", "home/alice"):
        at = os.open(accounts.tree / place, os.O_RDONLY)
        for _level in range(3000):
            os.mkdir("d", dir_fd=at)
            os.chown("d", UID, UID, dir_fd=at)
            below = os.open("d", os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        os.close(at)
    theirs = accounts.create("tmp/mine/theirs", uid=0)
    gone = drive("absent")
    assert gone.facts["absence"]["checks"]["files"]["detail"] == "/tmp/mine"
    assert not (accounts.tree / "tmp/mine/d").exists()
    assert not (accounts.tree / "home/alice").exists() and theirs.exists()


def test_a_schedule_of_any_name_is_removed(accounts: Accounts) -> None:
    job = accounts.create("var/spool/cron/atjobs/a\udcff")
    gone = drive("absent")
    (step,) = gone.document()["plan"]
    assert (gone.failure, step["before"]) == (None, ["/var/spool/cron/atjobs/a\\xff"])
    assert not job.exists()


def test_a_renamed_account_is_found_by_its_number(accounts: Accounts) -> None:
    drive("present")
    accounts.passwd[-1] = accounts.passwd[-1].replace("alice:", "mallory:")
    accounts.passwd.append(f"twin:x:{UID}:0::/root:/bin/bash")
    accounts._write()
    gone = drive("absent")
    assert gone.failure is None and gone.done.count("remove_account") == 2
    assert "mallory" not in _host.read("/etc/passwd")


@pytest.mark.parametrize("name", ["ops", "root", "../etc", "-x", ""])
def test_a_name_of_somebody_else_is_never_touched(accounts: Accounts, name: str) -> None:
    if name == "ops":
        assert code("present", username=name) == "account_taken"
        assert drive("absent", username=name).changed is False
    else:
        for state in ("present", "absent"):
            with pytest.raises(_change.Refusal, match="username_invalid"):
                drive(state, username=name)
    assert accounts.calls == [] and (accounts.tree / "home/ops").is_dir()


def test_a_group_of_that_name_is_found_before_anything_is_done(accounts: Accounts) -> None:
    """`useradd --user-group` fails for it, and in a launch that is after the wipe."""
    groups = accounts.tree / "etc/group"
    groups.write_text("broken\nadm:x:4:syslog\n")
    refusal = drive("present", username="adm").failure
    assert refusal is not None
    assert (refusal.code, refusal.found) == ("account_taken", "the group adm has gid 4")
    assert accounts.calls == []
    # The group of the tenant's own account does not count as another account's.
    drive("present")
    gid = next(line for line in accounts.passwd if line.startswith("alice:")).split(":")[3]
    groups.write_text(f"adm:x:4:syslog\nalice:x:{gid}:\n")
    assert drive("present").failure is None


def test_only_the_group_that_came_with_the_account_goes(accounts: Accounts) -> None:
    """A killed run has left it, and it would block the next tenant of that name."""
    groups = accounts.tree / "etc/group"
    groups.write_text(f"adm:x:4:syslog\nalice:x:{UID}:www-data\n")
    gone = drive("absent")
    assert (gone.failure, gone.done) == (None, ["remove_group"])
    assert groups.read_text() == "adm:x:4:syslog\n"
    # A group of the host stays, and so does the primary group of an account of the host.
    for gid, user in ((4, "ops:x:1000:1000"), (UID, f"ops:x:1000:{UID}")):
        accounts.passwd[1] = f"{user}::/home/ops:/bin/bash"
        accounts._write()
        groups.write_text(f"alice:x:{gid}:\n")
        assert drive("absent").changed is False


def test_a_home_of_somebody_who_left_is_not_taken_over(accounts: Accounts) -> None:
    accounts.create("home/alice", folder=True, uid=1001)
    assert code("present") == "account_taken"
    assert drive("absent").changed is False


def test_a_mount_in_the_home_is_unmounted_whatever_bytes_its_name_has(accounts: Accounts) -> None:
    drive("present")
    accounts.mounts("/home/alice/d\udce9")
    gone = drive("absent")
    assert gone.failure is None, gone.failure
    assert accounts.points == ()


def test_a_mount_that_stays_keeps_the_home(accounts: Accounts) -> None:
    drive("present")
    accounts.mounts("/home/alice/remote")
    accounts.busy.add("/home/alice/remote")
    assert code("absent") == "command_failed"
    assert (accounts.tree / "home/alice").is_dir()
    with pytest.raises(_change.Refusal, match="home_has_mounts"):
        _tenant_account.remove_home("alice")


def test_never_on_a_slice_host_and_never_for_an_older_claim(accounts: Accounts) -> None:
    _ledger.raise_fence("machine", fence=3)
    assert code("absent", fence=2) == code("present", fence=2) == "stale_fence"
    _host.write(_host_mode.MARKER, '{"mode": "slice"}')
    assert code("present", fence=3) == "node_in_slice_mode"
    assert accounts.calls == []


@pytest.mark.covers("I10")
@pytest.mark.parametrize("state", ["present", "absent"])
def test_a_run_that_became_late_while_it_looked_touches_no_account(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    if state == "absent":
        drive("present")

    def late(*seen: Any) -> Any:
        _ledger.raise_fence(_ledger.MACHINE, fence=9)
        return module.plan(*seen)

    before = list(accounts.calls)
    monkeypatch.setitem(globals(), "SUBJECT", dataclasses.replace(SUBJECT, plan=late))
    assert code(state) == "stale_fence"
    assert accounts.calls == before


@pytest.mark.parametrize("keys", [[], [""], [f"{KEY}\nssh-rsa B"]])
def test_keys_are_lines(accounts: Accounts, keys: list[str]) -> None:
    assert code("present", ssh_keys=keys) == "key_invalid"


def test_what_sudo_started_is_the_tenants_by_its_login(tree: Path) -> None:
    states = {1: ("S", 0, 4294967295), 2: ("S", 0, UID), 3: ("Z", UID, UID), 4: ("S", UID, 0)}
    for pid, (state, uid, login) in states.items():
        uids = "\t".join([str(uid)] * 4)
        _host.write(f"/proc/{pid}/status", f"Name:\tx\nState:\t{state} (x)\nUid:\t{uids}\n")
        _host.write(f"/proc/{pid}/loginuid", str(login))
    assert _accounts.processes(UID) == [2, 4]


REAL = """
import json, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change
from ansible_collections.gpuaas.slice.plugins.modules import baremetal_tenant as module
subject = _change.Subject(module.observe, module.plan, module.apply, module.facts)
files = ("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/subuid")
text = lambda: [Path(file).read_text() for file in files if Path(file).exists()]
before, told = text(), []
for state in ("present", "ended", "absent"):
    params = {"username": "gpuaastest", "uid": 59431, "fence": 1, "ssh_keys": ["ssh-ed25519 A"]}
    params["workers"] = None
    found = _change.drive(subject, {**params, "state": state, "grace": 1}, check_mode=False)
    told.append([str(found.failure), found.done])
    if state == "present":
        keys = Path("/home/gpuaastest/.ssh/authorized_keys").stat()
        told[0].append([keys.st_uid, oct(keys.st_mode & 0o777)])
        # `userdel` leaves a group with members.
        subprocess.run(["gpasswd", "--add", "nobody", "gpuaastest"], check=True, stdout=2)
print(json.dumps([told, before == text(), os.listdir("/home")]))
"""
# Only this process sees these mounts, and they end with it.
AWAY = """
set -e
cp -a /etc "$1/etc"; mount --bind "$1/etc" /etc
cd "$5"
for away in /home /usr/local/sbin /var/lib /var/tmp /tmp; do mount -t tmpfs none $away; done
# The checkout may lie in one of them.
[ -d "$5" ] || { mkdir -p "$5"; mount -c --bind . "$5"; }
printf '#!/bin/sh\\ncat > /dev/null\\n' > /usr/local/sbin/visudo; chmod 755 /usr/local/sbin/visudo
exec "$2" -c "$3" "$4"
"""


def test_with_the_real_programs_the_machine_is_as_before(tmp_path: Path) -> None:
    """useradd, usermod and userdel themselves, on a private copy of /etc."""
    checkout = Path(__file__).parents[4]
    collections = str(checkout / "build" / "collections")
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", AWAY, "sh"]
    words += [str(tmp_path), sys.executable, REAL, collections, str(checkout)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    seen, same, homes = json.loads(done.stdout.splitlines()[-1])
    assert seen == [
        ["None", ["add_account", "write_keys", "write_sudoers"], [UID, "0o600"]],
        ["None", ["remove_sudoers", "lock_account"]],
        ["None", ["remove_account", "remove_group", "remove_home"]],
    ]
    assert (same, homes) == (True, [])


@pytest.fixture
def real(tree: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The machine's own processes, and those that a test starts."""
    (tree / "proc").symlink_to("/proc")
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def start(real: list[subprocess.Popen[bytes]], script: str, uid: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sh", "-c", script], user=uid, stdout=subprocess.PIPE)
    real.append(process)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == b"ready\n"
    return process


def test_processes_of_the_uid_end_and_no_others(real: list[subprocess.Popen[bytes]]) -> None:
    # Another worker of pytest-xdist may play the test above, which ends all processes of its uid.
    uid = UID + 2
    polite = start(real, "echo ready; exec sleep 60", uid)
    deaf = start(real, "trap '' TERM; echo ready; while :; do sleep 60; done", uid)
    other = start(real, "echo ready; exec sleep 60", uid + 1)
    assert {polite.pid, deaf.pid} <= set(_accounts.processes(uid))
    began = time.monotonic()
    ended = _accounts.end_processes(uid, grace=0.5)
    assert {polite.pid, deaf.pid} <= set(ended)
    assert polite.wait() == -signal.SIGTERM
    assert deaf.wait() == -signal.SIGKILL
    assert time.monotonic() - began < 30
    assert _accounts.processes(uid) == []
    assert other.poll() is None
