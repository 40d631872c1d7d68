"""The lines that `gpuaas recover` prints for each step."""

from __future__ import annotations

import pytest

from reconciler.cli import runbook

pytestmark = pytest.mark.covers("CTRL-7")


def test_what_is_left_on_the_host_is_named() -> None:
    checks = {
        "domain": {"absent": False, "known": True, "detail": "slice-1 is running"},
        "nvram": {"absent": True, "known": True, "detail": "nothing found"},
        "flows": {"absent": False, "known": False, "detail": "unknown: ovs-ofctl failed"},
    }
    assert list(runbook.lines("runtime_absence", {"absent": False, "checks": checks})) == [
        "not absent: 2 of 3 checks found something or do not know",
        "domain: slice-1 is running",
        "flows: unknown: ovs-ofctl failed",
    ]


def test_a_hosts_words_cannot_pass_for_a_step() -> None:
    forged = {"domain": {"detail": "x\n  audit\n    all is well" + "!" * 999}, "nvram": "odd"}
    rows = list(runbook.lines("runtime_absence", {"absent": False, "checks": forged}))
    assert rows[1].startswith("domain: x audit all is well!")
    assert max(len(line) for line in rows) == 300
    assert rows[2] == "nvram: odd"


def test_a_slot_that_was_never_proven_and_one_that_is_not_sold() -> None:
    assert list(runbook.lines("disk_evidence", {"s1": None})) == ["slot s1: no proof of its disk"]
    shut = {
        "gate": [{"code": "parity_stale"}],
        "wanted": "available",
        "next": "gpuaas nodes parity n1",
    }
    assert list(runbook.lines("not_on_sale", {"s1": shut})) == [
        "slot s1: parity_stale; next: gpuaas nodes parity n1"
    ]


def test_a_step_that_is_new_is_told_whole() -> None:
    assert list(runbook.lines("another", {"a": [1]})) == ['{"a": [1]}']
