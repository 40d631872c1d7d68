"""Comparison of a machine's firmware before and after a tenancy."""

from __future__ import annotations

from typing import Any

import pytest

from reconciler.model import firmware

pytestmark = pytest.mark.covers("CTRL-15")

BEFORE: dict[str, Any] = {
    "sections": {
        "bios": {"bios_version": "2.5.4"},
        "uefi": {"BootOrder": "0001", "PK": "sha256:1"},
    },
    "unreadable": {"bmc": "no /dev/ipmi0"},
}


def after(unreadable: dict[str, str] | None = None, **sections: Any) -> dict[str, Any]:
    both = {name: values for name, values in (BEFORE["sections"] | sections).items() if values}
    return {"sections": both, "unreadable": {"bmc": "no /dev/ipmi0"} | (unreadable or {})}


def rows(*sides: dict[str, Any]) -> list[tuple[str, ...]]:
    return [tuple(row.values()) for row in firmware.differences(*sides)]


BMC = ("bmc", "", "not_compared", "no /dev/ipmi0", "no /dev/ipmi0")


def test_each_difference_is_named_and_what_was_not_read_is_one() -> None:
    now = after(uefi={"BootOrder": "0002,0001", "Boot0002": "active 'x' File(\\x)"})
    assert rows(BEFORE, now) == [
        ("uefi", "Boot0002", "added", "", "active 'x' File(\\x)"),
        ("uefi", "BootOrder", "changed", "0001", "0002,0001"),
        ("uefi", "PK", "removed", "sha256:1", ""),
        BMC,
    ]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (after({"bios": "gone"}, bios=None), ("bios", "", "not_compared", "recorded", "gone")),
        (after(bios=None), ("bios", "", "not_compared", "recorded", "not recorded")),
        (after(nvme={"S": "1"}), ("nvme", "", "not_compared", "not recorded", "recorded")),
        (after({"uefi PK": "I/O"}), ("uefi", "PK", "not_compared", "sha256:1", "I/O")),
        # A section with values, and at the same time a value that cannot be read.
        (after({"uefi": "no"}), ("uefi", "", "not_compared", "", "no")),
    ],
)
def test_unreadable_is_never_the_same(now: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert expected in rows(BEFORE, now)
    assert rows(now, BEFORE) != rows(BEFORE, BEFORE) == [BMC]


def test_a_machine_that_was_never_recorded_differs() -> None:
    assert rows({}, BEFORE) == [("", "", "not_compared", "not recorded", "")]


def test_the_bmc_covers_what_the_host_cannot_read() -> None:
    bmc = {"redfish_firmware": {"a": "1"}, "redfish_users": {}, "redfish_boot": {}}
    report = {"sections": bmc, "unreadable": {}}
    both = firmware.merged(BEFORE, report)
    assert rows(both, both) == []
    # Only if the BMC was read both times, and only for its own sections.
    assert rows(both, BEFORE)[-1][2:] == ("not_compared", "recorded", "not recorded")
    assert BMC in rows(both, BEFORE)
    dark = firmware.merged({"sections": {}, "unreadable": {"uefi": "x", "dpu": "x"}}, report)
    assert {row[0] for row in rows(dark, dark)} == {"uefi", "dpu"}


def test_what_a_hostile_host_answers_stays_small() -> None:
    huge = {f"{number:05}" + "x" * 500: "y" * 100_000 for number in range(5000)}
    report = {
        "sections": {"uefi": huge, "bios": "text", "evil": {"a": "b"}},
        "unreadable": {"uefi z": "r" * 9999, "evil": "x"},
        "more": 1,
    }
    kept = firmware.bounded(report, firmware.HOST)
    assert set(kept["sections"]) == {"uefi"} and set(kept["unreadable"]) == {"uefi z"}
    assert len(kept["sections"]["uefi"]) == firmware.MOST_ENTRIES + 1
    assert len(str(kept)) < 400_000
    differences = firmware.differences(BEFORE, kept)
    assert len(differences) == firmware.MOST_ROWS + 1
    assert differences[-1]["after"].endswith("more differences")
    for junk in (None, [], "x", {"sections": []}, {"sections": {"uefi": [1]}, "unreadable": 3}):
        assert firmware.bounded(junk, firmware.HOST) == {"sections": {}, "unreadable": {}}
