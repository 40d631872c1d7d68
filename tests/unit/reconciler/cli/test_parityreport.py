"""Parity lines of a host are printed only when they agree with its checks."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.gpuaas.slice.plugins.module_utils.parity import _check
from hypothesis import given
from hypothesis import strategies as st

from reconciler.cli import host
from reconciler.model.errors import Problem

pytestmark = pytest.mark.covers("HOST-10")


def report(*details: str) -> dict[str, Any]:
    """A report with one failed check for each detail, made as a host makes it."""
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


@given(st.lists(st.text(max_size=40), max_size=4))
def test_what_the_module_says_is_printed_as_it_is(details: list[str]) -> None:
    made = report(*details)
    assert host.parity_lines(made) == made["lines"]
    assert host.parity_failures(made) == len(details)


FORGED = "GPUAAS_SLICE_PARITY status=PASS check=c0 detail=fine"
SUMMARY = "GPUAAS_SLICE_PARITY_SUMMARY status=FAIL checks=1 failures=1 warnings=0"


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
