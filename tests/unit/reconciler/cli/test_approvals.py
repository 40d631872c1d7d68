"""Approvals from a discovery: plain shares by default, other filesystem types by name."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.cli import host, nodes
from reconciler.model.approval import approval_of

pytestmark = pytest.mark.covers("HOST-9")

SEEN: dict[str, Any] = {
    "serial": "LABNVME0",
    "eui": "",
    "nguid": "0f" * 16,
    "mounts": ["/share0"],
    "filesystems": {"nvme0n1": "gpt", "nvme0n1p1": "ext4", "nvme0n1p2": "raw_data"},
}


def test_bytes_of_no_known_kind_are_approved_by_name_only() -> None:
    approved = approval_of(SEEN, [])
    assert approved["filesystems"] == ["ext4", "gpt"]
    assert (approved["mounts"], approved["eui"]) == (["/share0"], "0f" * 16)
    assert approval_of(SEEN, ["raw_data"])["filesystems"] == ["ext4", "gpt", "raw_data"]


def test_who_is_asked_reads_what_is_lost() -> None:
    line = nodes.approval_line("/dev/x", approval_of(SEEN, []))
    assert line.endswith("mounted on /share0  carries ext4, gpt")
    assert nodes.approval_line("/dev/x", {"serial": "A", "eui": "b"}).endswith(
        "mounted on nowhere  carries nothing"
    )


@pytest.mark.parametrize(
    ("document", "approved"),
    [
        ({"/dev/x": {"serial": "A"}}, {"/dev/x": {"serial": "A"}}),
        ([{"nvme_device": "/dev/x", "approval": {"serial": "A"}}], {"/dev/x": {"serial": "A"}}),
        ([{"nvme_device": "/dev/x"}, "y"], {}),
        ("x", {}),
    ],
)
def test_a_file_holds_approvals_or_the_plan(document: Any, approved: dict[str, Any]) -> None:
    assert host.approvals_by_path(document) == approved
