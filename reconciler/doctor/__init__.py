"""Checks of an installation and their findings. They change nothing and need no running service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reconciler.model.errors import Refusal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Result of a check. `fail`: the service cannot work. `warn`: this needs attention.

    expected and remedy are empty in a finding with the status `ok`.
    """

    status: Status
    found: str
    expected: str = ""
    remedy: str = ""


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warn(found: str, *, unless: bool = False, expected: str, remedy: str) -> Finding:
    """A warning; with `unless` a finding with the status `ok`."""
    return ok(found) if unless else Finding("warn", found, expected, remedy)


def fail(found: str, *, unless: bool = False, expected: str, remedy: str) -> Finding:
    """A failure; with `unless` a finding with the status `ok`."""
    return ok(found) if unless else Finding("fail", found, expected, remedy)


def refused(refusal: Refusal, found: str = "") -> Finding:
    """A failure from the refusal of a part of the service. found: a longer text than its own."""
    return fail(found or refusal.found, expected=refusal.expected, remedy=refusal.remedy)
