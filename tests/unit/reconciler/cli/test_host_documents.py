"""Documents that `gpuaas host` reads: approvals from a discovery, and parity reports."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _check
from hypothesis import given
from hypothesis import strategies as st

from reconciler.cli import host, nodes
from reconciler.model.approval import approval_of
from reconciler.model.errors import Problem

SEEN: dict[str, Any] = {
    "serial": "LABNVME0",
    "eui": "",
    "nguid": "0f" * 16,
    "mounts": ["/share0"],
    "filesystems": {"nvme0n1": "gpt", "nvme0n1p1": "ext4", "nvme0n1p2": "raw_data"},
}


@pytest.mark.covers("HOST-9")
def test_bytes_of_no_known_kind_are_approved_by_name_only() -> None:
    approved = approval_of(SEEN, [])
    assert approved["filesystems"] == ["ext4", "gpt"]
    assert (approved["mounts"], approved["eui"]) == (["/share0"], "0f" * 16)
    assert approval_of(SEEN, ["raw_data"])["filesystems"] == ["ext4", "gpt", "raw_data"]


@pytest.mark.covers("HOST-9")
def test_who_is_asked_reads_what_is_lost() -> None:
    line = nodes.approval_line("/dev/x", approval_of(SEEN, []))
    assert line.endswith("mounted on /share0  carries ext4, gpt")
    assert nodes.approval_line("/dev/x", {"serial": "A", "eui": "b"}).endswith(
        "mounted on nowhere  carries nothing"
    )


@pytest.mark.covers("HOST-9")
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


def report(*details: str) -> dict[str, Any]:
    """A report with a failed check for each detail, made as a host makes it."""
    checks = [
        {
            "check": f"c{number}",
            "status": "FAIL",
            "detail": detail,
            "remediation": f"repair {detail}",
            "playbook": "",
            "role": "",
        }
        for number, detail in enumerate(details)
    ]
    return _check.report(checks)


@pytest.mark.covers("HOST-10")
@given(st.lists(st.text(max_size=40), max_size=4))
def test_what_the_module_says_is_printed_as_it_is(details: list[str]) -> None:
    made = report(*details)
    assert host.parity_lines(made) == made["lines"]
    assert host.parity_failures(made) == len(details)


FORGED = "GPUAAS_SLICE_PARITY status=PASS check=c0 detail=fine"
SUMMARY = "GPUAAS_SLICE_PARITY_SUMMARY status=FAIL checks=1 failures=1 warnings=0"


@pytest.mark.covers("HOST-10")
@pytest.mark.parametrize(
    "lines",
    [
        [FORGED, SUMMARY],
        [FORGED.replace("PASS", "FAIL") + f"\n{FORGED}", SUMMARY],
        [FORGED.replace("PASS", "FAIL") + "\n", SUMMARY],
        [FORGED.replace("PASS", "FAIL") + " status=PASS", SUMMARY],
        [FORGED.replace("PASS", "FAIL") + "\x1b[2A", SUMMARY],
        [FORGED.replace("PASS", "FAIL"), SUMMARY.replace("failures=1", "failures=0")],
        [FORGED.replace("PASS", "FAIL"), SUMMARY, SUMMARY],
        [FORGED.replace("PASS", "FAIL")],
        "no list",
        None,
    ],
)
def test_lines_that_say_something_else_are_not_printed(lines: Any) -> None:
    with pytest.raises(Problem, match="report_inconsistent"):
        host.parity_lines(report("fine") | {"lines": lines})
