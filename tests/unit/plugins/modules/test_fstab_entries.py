"""Restored fstab entries: only on request and only with their file systems present."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.core import _change, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.disk import _fstab_entries
from ansible_collections.gpuaas.slice.plugins.modules import fstab_entries

pytestmark = pytest.mark.covers("HOST-15")

SITE = "UUID=root / ext4 defaults 0 1\n# a comment\n"
LINES = ["LABEL=share1 /share1 xfs defaults 0 2", "/dev/nvme1n1p1 /share2 ext4", "nas:/x /x nfs"]


def drive() -> _change.Outcome:
    plan, apply, facts = fstab_entries.plan, fstab_entries.apply, fstab_entries.facts
    subject = _change.Subject(fstab_entries.observe, plan, apply, facts)
    return _change.drive(subject, {}, check_mode=False)


@pytest.fixture(autouse=True)
def transitioned(tree: Path) -> None:
    _host.write(_fstab_entries.FILE, SITE + "".join(f"{line}\n" for line in LINES))
    _fstab_entries.disable(LINES, backup="/etc/fstab.before")


def devices(tree: Path, *names: str) -> None:
    for name in names:
        (tree / "sys/class/block" / name).mkdir(parents=True, exist_ok=True)


def test_a_wiped_file_system_would_stop_the_next_boot(tree: Path) -> None:
    devices(tree, "nvme1n1p1")
    outcome = drive()
    assert outcome.failure.code == "fstab_device_missing"
    assert "LABEL=share1" in outcome.failure.found
    assert outcome.facts["disabled"] == LINES


def test_lines_come_back_as_they_were_with_a_backup(tree: Path) -> None:
    devices(tree, "nvme0n1p1", "nvme1n1p1")
    link = tree / "dev/disk/by-label/share1"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../nvme0n1p1")
    outcome = drive()
    assert outcome.failure is None
    assert _host.path(_fstab_entries.FILE).read_text() == SITE + "".join(
        f"{line}\n" for line in LINES
    )
    backup = outcome.evidence["enable_entries"]["backup"]
    assert _fstab_entries.MARKER in (_host.read(backup) or "")
    assert not drive().changed
