"""A parity report as a host gave it: its lines are printed only when they say what its checks say.

A host can lie about itself, and nothing here changes that. What it cannot do is to print a line
that is no line, or one that says more than its checks do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reconciler.model.errors import Problem

_PRINTABLE = re.compile(r"[ -~]*")


def lines(report: Mapping[str, Any]) -> list[str]:
    """One line per check and the summary; Problem `report_inconsistent` when they do not agree."""
    checks, found = report["checks"], report.get("lines")
    wanted = [_line(check) for check in checks]
    wanted.append(re.compile(rf"GPUAAS_SLICE_PARITY_SUMMARY .*\bfailures={failures(report)}\b.*"))
    good = (
        isinstance(found, list)
        and len(found) == len(wanted)
        and all(
            isinstance(line, str) and _PRINTABLE.fullmatch(line) and pattern.fullmatch(line)
            for pattern, line in zip(wanted, found, strict=True)
        )
    )
    if not good or not isinstance(found, list):
        raise Problem(
            "report_inconsistent",
            422,
            expected="one printable line for each check, and a summary that counts them",
            found="lines that say something else",
            remedy="the host's report is not to be believed: look at the host",
        )
    return found


def failures(report: Mapping[str, Any]) -> int:
    """Failed checks, counted here."""
    return sum(check["status"] == "FAIL" for check in report["checks"])


def _line(check: Mapping[str, Any]) -> re.Pattern[str]:
    head = f"GPUAAS_SLICE_PARITY status={check['status']} check={check['check']} detail="
    # Values are shell words, so a bare blank ends one and `=` inside of one is quoted.
    word = r"(?:[^ =\\]|\\.)*"
    return re.compile(rf"{re.escape(head)}{word}(?: remediation={word})?")
