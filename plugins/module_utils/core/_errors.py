"""Refusals and blockers: reasons why an action is not done, or a device cannot be used.

A Refusal is the only error that modules raise on purpose: expectation, finding and remedy. A
blocker is a row of the discovery document.
"""

from __future__ import annotations

Blocker = dict[str, str]
# Longest detail of a blocker, because a detail may contain what a tenant wrote on its disk.
_LONGEST = 2_000


def blocker(code: str, detail: str) -> Blocker:
    return {"code": code, "detail": detail[:_LONGEST]}


class Refusal(Exception):
    """A refused action, with a stable code.

    code: snake_case, part of the contract; never reworded. expected, found, remedy: plain text for
    the person who reads it at night.
    """

    PARTS = ("code", "expected", "found", "remedy")

    def __init__(self, code: str, *, expected: str, found: str, remedy: str) -> None:
        self.code = code
        self.expected = expected
        self.found = found
        self.remedy = remedy
        super().__init__(f"{code}: expected {expected}; found {found}; {remedy}")

    def document(self) -> dict[str, str]:
        return {
            "code": self.code,
            "expected": self.expected,
            "found": self.found,
            "remedy": self.remedy,
        }
