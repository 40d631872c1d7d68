"""Checks of an installation and their findings. They change nothing and need no running service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reconciler.model.errors import Refusal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """status `fail`: the service cannot work. `warn`: it works, and this needs attention.

    expected and remedy are empty in a finding with the status `ok`.
    """

    check: str
    status: Status
    found: str
    expected: str = ""
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warn(check: str, found: str, *, unless: bool = False, expected: str, remedy: str) -> Finding:
    """A warning; with `unless` a finding with the status `ok`."""
    return ok(check, found) if unless else Finding(check, "warn", found, expected, remedy)


def fail(check: str, found: str, *, unless: bool = False, expected: str, remedy: str) -> Finding:
    """A failure; with `unless` a finding with the status `ok`."""
    return ok(check, found) if unless else Finding(check, "fail", found, expected, remedy)


def refused(check: str, refusal: Refusal, found: str = "") -> Finding:
    """A failure from the refusal of a part of the service. found: a longer text than its own."""
    return fail(check, found or refusal.found, expected=refusal.expected, remedy=refusal.remedy)
