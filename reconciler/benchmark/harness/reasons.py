"""Why a probe has no figures: what was expected, what was found, what to do."""

from __future__ import annotations


class Reason(Exception):
    """A probe that ends without figures; `status` is what the capture says of it.

    code: snake_case, part of the contract. expected, found, remedy: plain text.
    """

    status = "failed"

    def __init__(self, code: str, *, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"{code}: expected {expected}; found {found}; {remedy}")
        self.code = code
        self.expected = expected
        self.found = found
        self.remedy = remedy

    def document(self) -> dict[str, str]:
        """As it stands in the capture; the schema bounds each text."""
        return {
            "code": self.code,
            "expected": self.expected[:2000],
            "found": self.found[:2000],
            "remedy": self.remedy[:2000],
        }


class Failed(Reason):
    """The tool or the device is there, and the measurement did not succeed."""


class Unavailable(Reason):
    """The tool or the device is not there."""

    status = "unavailable"


class Skipped(Reason):
    """Nobody asked for it: it needs a target that only a person can name."""

    status = "skipped"
