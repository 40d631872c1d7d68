"""Reasons for a probe without figures: failed, unavailable or skipped."""

from __future__ import annotations


class Reason(Exception):
    """A probe that ends without figures. `status` is the status of the probe in the capture.

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
        """The reason in the capture, with texts within the limits of the schema."""
        return {
            "code": self.code,
            "expected": self.expected[:2000],
            "found": self.found[:2000],
            "remedy": self.remedy[:2000],
        }


class Failed(Reason):
    """The tool and the device are present, and the measurement did not succeed."""


class Unavailable(Reason):
    """The tool or the device is missing."""

    status = "unavailable"


class Skipped(Reason):
    """The probe was not requested. It needs a target that a person must name."""

    status = "skipped"
