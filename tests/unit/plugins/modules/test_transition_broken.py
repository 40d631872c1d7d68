"""Interrupted takeover of a disk: it can start again, and half-erased content never comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.boot import _slice_mode
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import (
    _block,
    _device,
    _erase_journal,
    _fstab_entries,
    _mounting,
    _proof,
    _usage,
)

from tests.unit.plugins.modules.test_transition_approval import (
    EUI,
    IDENTITY,
    MIB,
    approval,
    drive,
    take,
)

pytestmark = pytest.mark.covers("HOST-9", "I7")

RECORD = f"{_erase_journal.DIRECTORY}/eui.{EUI}.json"


class PowerLoss(BaseException):
    """End of the run's power; the run cannot react to it."""


def code(outcome: _change.Outcome) -> str:
    return outcome.failure.code if outcome.failure else ""


@pytest.fixture
def share(bench, calls: list[str]):
    """A mounted share with a file in it, and the programs that mount."""
    bench.disk()
    bench.partition("nvme1n1", MIB, 20 * MIB, minor=2)
    bench.write("nvme1n1", 512, b"EFI PART")
    bench.write("nvme1n1", MIB, b"XFSB")
    bench.write("nvme1n1", 6 * MIB, b"a file. " * (MIB // 8))
    bench.mount("259:2", "/share", "/dev/nvme1n1p1")
    _host.write(
        "/etc/fstab", "UUID=r / ext4 defaults 0 1\n/dev/nvme1n1p1 /share xfs defaults 0 2\n"
    )
    return bench


@pytest.fixture
def broken(share, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The power failed after both ends were cleared; return the earlier content's approval."""
    approved = approval()
    with monkeypatch.context() as patch:

        def fails(*_what: Any) -> str:
            raise PowerLoss

        patch.setattr(_device, "zero", fails)
        with pytest.raises(PowerLoss):
            take(approved)
    # The kernel sees no partition table at the next boot.
    (share.root / "sys/class/block/nvme1n1p1/partition").unlink()
    assert _block.usage(_block.resolve("nvme1n1")).filesystems == {"nvme1n1": "raw_data"}
    return approved


def test_an_erase_that_broke_off_is_begun_again_under_its_approval(share, broken) -> None:
    assert _host.path(RECORD).stat().st_mode & 0o777 == 0o600
    assert code(drive()) == "", "a dry run shows it, to be approved anew"
    assert code(take({})) == "approval_missing"
    outcome = take(broken)
    assert outcome.failure is None, outcome.failure
    assert not any(share.read("nvme1n1", 0, 48 * MIB))
    assert _proof.standing(f"eui.{EUI}") is not None
    assert not _host.path(RECORD).exists()
    share.write("nvme1n1", 6 * MIB, b"rows of a database")
    assert code(take(broken)) == "unexpected_filesystem"


def test_an_identity_is_approval_enough_for_what_it_left(share, broken) -> None:
    share.write("nvme1n1", 512, b"EFI PART")
    (device,) = drive().facts["devices"]
    assert device["steps"] and device["proof"] is None
    assert take(IDENTITY).failure is None


def test_what_was_made_since_is_somebodys(share, broken) -> None:
    share.write("nvme1n1", 0, b"XFSB")
    share.write("nvme1n1", 32, b"another uuid")
    assert code(take(broken)) == "changed_since_approval"
    share.write("nvme1n1", 0, bytes(48))
    share.write("nvme1n1", 512, b"EFI PART")
    share.write("nvme1n1", 512 + 56, b"another table")
    assert code(take(broken)) == "unexpected_filesystem"
    assert code(take(approval())) == "", "a person may name it"


def test_another_disk_in_its_place_gains_nothing(share, broken) -> None:
    (namespace,) = share.namespaces.values()
    namespace.serial = "OTHER"
    assert code(take({**broken, "serial": "OTHER"})) == "unexpected_filesystem"


@pytest.mark.parametrize("clock", ["", "2020-01-01T00:00:00+00:00"], ids=["in order", "jumped"])
def test_a_record_that_outlived_the_erase_says_nothing(
    share, broken, monkeypatch: pytest.MonkeyPatch, clock: str
) -> None:
    if clock:
        monkeypatch.setattr(_host, "now", lambda: clock)
    kept = _host.path(RECORD).read_text()
    assert take(broken).failure is None
    _host.write(RECORD, kept, 0o600)
    assert take(broken).changed is False
    share.write("nvme1n1", 6 * MIB, b"rows of a database")
    assert code(take(broken)) == "unexpected_filesystem"


def test_a_record_that_outlived_the_erase_outlives_no_proof(share, broken) -> None:
    """Slice mode ends the proof that shows the end of the erase."""
    kept = _host.path(RECORD).read_text()
    assert take(broken).failure is None
    _host.write(RECORD, kept, 0o600)
    mode = {"profile": "lab", "state": "present"}
    assert "end_proofs" in _change.drive(_slice_mode.SUBJECT, mode, check_mode=False).done
    assert _proof.standing(f"eui.{EUI}") is None and not _host.path(RECORD).exists()
    share.write("nvme1n1", 6 * MIB, b"rows of a database")
    assert code(take(broken)) == "unexpected_filesystem"


def test_slice_mode_keeps_the_record_of_an_unfinished_erase(share, broken) -> None:
    _proof.record("eui.0", {"disk": "eui.0", "verified": True, "finished_at": "2026"})
    mode = {"profile": "lab", "state": "present"}
    assert "end_proofs" in _change.drive(_slice_mode.SUBJECT, mode, check_mode=False).done
    assert take(broken).failure is None


def test_a_blank_look_is_no_end_of_an_erase(share, broken) -> None:
    """The proof is old, and the remaining file lies where no check reads."""
    proof = {"disk": f"eui.{EUI}", "verified": True, "finished_at": "2020-01-01T00:00:00+00:00"}
    _proof.record(f"eui.{EUI}", proof)
    share.write("nvme1n1", 6 * MIB, bytes(MIB))
    outcome = take(broken)
    assert outcome.failure is None and "erase_disk" in outcome.done


@pytest.mark.parametrize("problem", [OSError(5, "Input/output error"), ValueError("no")])
def test_what_the_system_says_before_the_first_byte_puts_everything_back(
    share, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    approved, fstab = approval(), _host.path("/etc/fstab").read_bytes()

    def fails(*_what: Any, **_how: Any) -> Any:
        raise problem

    monkeypatch.setattr(_block, "exclusive", fails)
    outcome = take(approved)
    assert outcome.failure is not None and outcome.failed_step == "erase_disk"
    assert outcome.failure.code == "system_error"
    assert outcome.failure.expected.startswith("erase_disk of")
    assert str(problem) in outcome.failure.found and "put back" in outcome.failure.found
    assert _host.path("/etc/fstab").read_bytes() == fstab
    assert [mount.point for mount in _usage.mounts()] == ["/", "/share"]


@pytest.mark.parametrize(
    ("written", "name"),
    [("\udce9", "\udce9"), ("\\134xe9", "\\xe9"), ("%E9", "%E9"), ("\\040é", " é")],
)
def test_what_is_put_back_is_at_its_own_place_to_the_byte(
    bench, monkeypatch: pytest.MonkeyPatch, written: str, name: str
) -> None:
    """Two names can have the same printed form."""
    bench.mount("259:2", f"/d{written}", f"/dev/disk/by-label/x{written}")
    bench.mount("8:1", "/d\\134xe9" if name == "\udce9" else "/d\udce9", "/dev/sda1")
    done: list[list[str]] = []

    def run(argv: list[str], **_how: Any) -> _command.Result:
        done.append(argv)
        return _command.Result(0, "", "")

    monkeypatch.setattr(_command, "run", run)
    mounts = [mount for mount in _usage.mounts() if mount.devt == "259:2"]
    # In the form in which a plan is shown and handed on.
    (record,) = json.loads(
        json.dumps([step.document() for step in _mounting.steps(mounts, "x")], ensure_ascii=False)
        .encode()
        .decode()
    )
    step = _change.Step("unmount", record["subject"], record["before"])
    _mounting.unmount(step)
    assert _mounting.again([step], spare=()) == ([step.subject], [])
    assert done == [
        ["umount", "--", f"/d{name}"],
        [
            "mount",
            "-t",
            "ext4",
            "-o",
            "rw,noatime",
            "--",
            f"/dev/disk/by-label/x{name}",
            f"/d{name}",
        ],
    ]
    assert _mounting.covered(mounts, _usage.mounts()) == []


def test_what_the_system_says_after_it_puts_nothing_back(
    share, monkeypatch: pytest.MonkeyPatch
) -> None:
    approved = approval()

    def fails(*_what: Any) -> bool:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(_device, "reread_partitions", fails)
    outcome = take(approved)
    assert code(outcome) == "system_error" and outcome.changed
    assert _fstab_entries.disabled() == ["/dev/nvme1n1p1 /share xfs defaults 0 2"]
    assert [mount.point for mount in _usage.mounts()] == ["/"]
