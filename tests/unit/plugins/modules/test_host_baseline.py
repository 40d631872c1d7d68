"""Host baseline: possible traces of a tenant are named, passing changes of the system are not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host, _ledger
from ansible_collections.gpuaas.slice.plugins.modules import host_baseline as module

pytestmark = pytest.mark.covers("CTRL-15")

ALLOCATION = "23bd713b-6073-4ef7-8a51-2897e902365d"
SUBJECT = _change.Subject(module.observe, module.plan, module.apply, module.facts)
PACKAGES = ("dpkg-query", "-W", "-f", "${Package}:${Architecture} ${Version}\n")
TCP = "  sl  local_address rem_address   st\n   0: 00000000:0016 00000000:0000 0A 0\n"
HOST = {
    "/etc/passwd": "root:x:0:0:root:/root:/bin/bash\nops:x:1000:1000::/home/ops:/bin/bash\n",
    "/etc/shadow": "root:$6$canary-secret:1::::::\nops:*:1::::::\n",
    "/etc/group": "sudo:x:27:ops\n",
    "/etc/ssh/sshd_config": "PermitRootLogin no\n",
    "/etc/ssh/ssh_host_ed25519_key-cert.pub": "cert\n",
    "/root/.ssh/authorized_keys": "ssh-ed25519 A\n",
    "/home/ops/notes": "x",
    "/proc/net/tcp": TCP,
    "/proc/net/udp": "  sl\n   0: 00000000:0044 00000000:0000 07 0\n",
    "/proc/modules": "ext4 1 0 - Live 0x0\n",
    "/proc/self/mountinfo": "1 1 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:5 / /proc rw - proc p rw\n",
}


@pytest.fixture
def host(tree: Path, script: Any) -> Any:
    for path, text in HOST.items():
        _host.write(path, text)
    return script.on(*PACKAGES, out="bash:amd64 5.2\n")


def drive(state: str = "recorded", **more: Any) -> _change.Outcome:
    params = {
        "allocation_id": ALLOCATION, "fence": 1, "state": state, "baseline": None, **more
    }  # fmt: skip
    return _change.drive(SUBJECT, params, check_mode=False)


def refused(outcome: _change.Outcome) -> str:
    return outcome.failure.code if outcome.failure else ""


def drift(before: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    facts = drive("compared", baseline=before).facts
    assert facts["compared"] is True
    return {f"{r['section']} {r['name']}": (r["change"], r["access"]) for r in facts["drift"]}


def test_an_untouched_machine_has_no_drift_and_its_secrets_stay(host: Any) -> None:
    first = drive()
    assert first.done == ["record_baseline"]
    baseline = first.facts["baseline"]
    assert set(baseline["accounts"]) == {"root", "ops"}
    assert baseline["listening"] == {"tcp 22 00000000": "listening", "udp 68 00000000": "listening"}
    assert baseline["mounts"] == {"/": "ext4 /dev/sda1"}
    assert "canary" not in json.dumps(first.document())
    assert drift(baseline) == {}


def test_what_could_let_somebody_in_again_is_named(host: Any) -> None:
    before = drive().facts["baseline"]
    changes = {
        "/etc/passwd": HOST["/etc/passwd"] + "toor:x:0:0::/root:/bin/sh\n",
        "/etc/shadow": HOST["/etc/shadow"].replace("ops:*", "ops:$6$x"),
        "/root/.ssh/authorized_keys": "ssh-ed25519 A\nssh-ed25519 EVIL\n",
        "/home/ops/.ssh/authorized_keys": "ssh-ed25519 EVIL\n",
        "/etc/sudoers.d/extra": "ops ALL=(ALL) NOPASSWD:ALL\n",
        "/etc/ld.so.preload": "/usr/lib/evil.so\n",
        "/usr/local/bin/ls": "evil\n",
        "/proc/net/tcp": TCP + "   1: 00000000:1F90 00000000:0000 0A 0\n",
    }
    for path, text in changes.items():
        _host.write(path, text)
    _host.path("/etc/systemd/system/multi-user.target.wants").mkdir(parents=True)
    _host.path("/etc/systemd/system/multi-user.target.wants/e.service").symlink_to("/root/e")
    _host.path("/home/left").mkdir()
    assert drift(before) == {
        "accounts ops": ("changed", True),
        "accounts toor": ("added", True),
        "files /etc/ld.so.preload": ("added", True),
        "files /etc/sudoers.d/extra": ("added", True),
        "files /etc/systemd/system/multi-user.target.wants/e.service": ("added", True),
        "homes left": ("added", True),
        "keys /home/ops/.ssh/authorized_keys": ("added", True),
        "keys /root/.ssh/authorized_keys": ("changed", True),
        "listening tcp 8080 00000000": ("added", True),
        "programs /usr/local/bin/ls": ("added", True),
    }


def test_owner_and_mode_count_too(host: Any, tree: Path) -> None:
    before = drive().facts["baseline"]
    (tree / "etc/ssh/sshd_config").chmod(0o600)
    assert drift(before) == {"files /etc/ssh/sshd_config": ("changed", True)}


def test_what_changes_by_itself_is_no_drift_and_packages_are_harmless(host: Any) -> None:
    before = drive().facts["baseline"]
    _host.write("/etc/ssh/ssh_host_ed25519_key-cert.pub", "renewed\n")
    _host.write("/home/ops/notes", "other")
    # A client's ephemeral port.
    _host.write("/proc/net/udp", HOST["/proc/net/udp"] + "   1: 00000000:C350 0:0 07 0\n")
    _host.write("/proc/modules", HOST["/proc/modules"] + "xfs 1 0 - Live 0x0\n")
    host.answers.clear()
    host.on(*PACKAGES, out="bash:amd64 5.2\nhtop:amd64 3\n")
    assert drift(before) == {
        "modules xfs": ("added", False),
        "packages htop:amd64": ("added", False),
    }


def test_a_repeated_provision_keeps_the_first_look(host: Any) -> None:
    before = drive().facts["baseline"]
    _host.write("/etc/sudoers.d/90-gpuaas-tenant", "alice ALL=(ALL:ALL) NOPASSWD:ALL\n")
    again = drive()
    assert again.changed is False and again.facts["baseline"] == before


def test_what_the_host_kept_is_no_witness_and_goes_with_the_tenant(host: Any, tree: Path) -> None:
    before = drive().facts["baseline"]
    (kept,) = tree.glob("var/lib/gpuaas/baseline/*.json")
    kept.write_text("{}")
    _host.write("/etc/sudoers.d/extra", "x")
    assert drift(before) == {"files /etc/sudoers.d/extra": ("added", True)}
    assert not kept.exists()
    assert drive("compared", baseline=before).changed is False


def test_without_a_baseline_nothing_is_claimed(host: Any) -> None:
    assert drive("compared").facts == {"drift": [], "compared": False}


@pytest.mark.parametrize("wrong", ["../../etc/passwd", "", ALLOCATION.upper()])
def test_an_id_is_no_path(host: Any, wrong: str) -> None:
    with pytest.raises(_change.Refusal, match="allocation_id_invalid"):
        drive(allocation_id=wrong)


@pytest.mark.parametrize("made", ["[]", "not json", "[" * 100_000, None])
def test_what_a_tenant_made_of_the_record_stops_no_release(
    host: Any, tree: Path, made: str | None
) -> None:
    before = drive().facts["baseline"]
    (kept,) = tree.glob("var/lib/gpuaas/baseline/*.json")
    kept.unlink()
    if made is None:
        (kept / "inside").mkdir(parents=True)
    else:
        kept.write_text(made)
    params = {"allocation_id": ALLOCATION, "fence": 1, "state": "compared", "baseline": before}
    outcome = _change.drive(module.subject(), params, check_mode=False)
    assert outcome.failure is None, outcome.failure
    assert outcome.done == ["forget_baseline"] and not kept.exists()
    (row,) = outcome.facts["drift"]
    assert (row["section"], row["change"], row["access"]) == ("baseline", "changed", False)
    # A provision does not take the tenant's record for the first baseline.
    kept.write_text("[]")
    with pytest.raises(_change.Refusal, match="baseline_unreadable"):
        drive()


@pytest.mark.covers("I10")
@pytest.mark.parametrize("state", ["recorded", "compared"])
def test_a_late_run_neither_leaves_a_record_nor_takes_one(
    host: Any, tree: Path, state: str
) -> None:
    folder = tree / "var/lib/gpuaas/baseline"
    _ledger.raise_fence(_ledger.MACHINE, fence=2)
    assert refused(drive(state)) == "stale_fence"
    assert not folder.exists()
    drive(fence=2)
    (kept,) = folder.iterdir()
    assert refused(drive(state)) == "stale_fence"
    kept.write_text("not json")
    assert refused(drive(state)) == "stale_fence"
    assert kept.read_text() == "not json"


@pytest.mark.covers("I10")
def test_a_run_that_became_late_while_it_looked_leaves_nothing(
    host: Any, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = module._host_baseline.take

    def slow() -> Any:
        state = look()
        _ledger.raise_fence(_ledger.MACHINE, fence=2)
        return state

    monkeypatch.setattr(module._host_baseline, "take", slow)
    assert refused(drive()) == "stale_fence"
    assert not (tree / "var/lib/gpuaas/baseline").exists()
    drive(fence=2)
    assert drive("compared", fence=2).done == ["forget_baseline"]


def test_names_of_any_bytes_are_shown_in_a_form_that_can_be_stored(host: Any, tree: Path) -> None:
    before = drive().facts["baseline"]
    (tree / "usr/local/bin").mkdir(parents=True)
    (tree / "usr/local/bin" / os.fsdecode(b"\xff")).write_text("evil")
    (tree / "home" / os.fsdecode(b"\xfe")).symlink_to("/")
    differences = drift(before)
    assert differences == {
        "homes \\xfe": ("added", True),
        "programs /usr/local/bin/\\xff": ("added", True),
    }
    assert json.dumps(differences, ensure_ascii=False).encode()
    link = tree / "etc/sudoers.d/a"
    link.parent.mkdir()
    link.symlink_to(os.fsdecode(b"\xff"))
    assert (
        drive(allocation_id=ALLOCATION.replace("2", "3")).facts["baseline"]["files"][
            "/etc/sudoers.d/a"
        ]
        == "link \\xff"
    )


def test_a_host_full_of_differences_is_named_in_few_rows(host: Any, tree: Path) -> None:
    before = drive().facts["baseline"]
    names = [f"{number:0100}" for number in range(400)]
    before["packages"] |= dict.fromkeys(names, "1")
    folder = tree / "usr/local/bin"
    folder.mkdir(parents=True)
    for name in [*names, "z" * 255]:
        (folder / name).write_text("")
    _host.write("/etc/passwd", f"{'a' * 5000}:x:1:1::/:/bin/sh\n")
    rows = drive("compared", baseline=before).facts["drift"]
    assert len(rows) == module._host_baseline.MOST + 1
    assert all(row["access"] for row in rows)
    assert max(len(row["name"]) for row in rows) == module._host_baseline.LONGEST
    # 401 programs, 3 accounts, root's key, 400 packages.
    assert rows[-1]["name"] == f"{405 + 400 - 256} more differences"


@pytest.mark.parametrize("home", ["/" + "h" * 300, "/h\0h", "/deep"])
def test_a_home_that_cannot_be_read_ends_no_release(host: Any, tree: Path, home: str) -> None:
    before = drive().facts["baseline"]
    _host.write("/etc/passwd", f"{HOST['/etc/passwd']}toor:x:0:0::{home}:/bin/sh\n")
    if home == "/deep":
        place = tree / "deep/.ssh"
        place.mkdir(parents=True)
        at = os.open(place, os.O_DIRECTORY)
        for _level in range(2500):
            os.mkdir("d", dir_fd=at)
            inner = os.open("d", os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        os.close(at)
    differences = drift(before)
    if home == "/deep":
        subprocess.run(["rm", "-rf", str(tree / "deep")], check=True)
    assert differences["accounts toor"] == ("added", True)
    assert ("keys /deep/.ssh" in differences) is (home == "/deep")
