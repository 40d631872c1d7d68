"""What the doctor says: one thing that was looked at, and how it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from reconciler.model.errors import Refusal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """fail: the service cannot do its work. warn: it can, and somebody should look at this.

    expected and remedy are empty when all is well.
    """

    check: str
    status: Status
    found: str
    expected: str = ""
    remedy: str = ""

    def document(self) -> dict[str, str]:
        return asdict(self)


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warn(check: str, found: str, *, expected: str, remedy: str) -> Finding:
    return Finding(check, "warn", found, expected, remedy)


def fail(check: str, found: str, *, expected: str, remedy: str) -> Finding:
    return Finding(check, "fail", found, expected, remedy)


def refused(check: str, refusal: Refusal, found: str = "") -> Finding:
    """What a part of the service would refuse; found: in more words than its own."""
    return fail(check, found or refusal.found, expected=refusal.expected, remedy=refusal.remedy)


def guarded(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What the look finds; a look that breaks is a finding too, and no end of the others."""
    try:
        yield from look()
    except Exception as failure:
        said = " ".join(str(failure).split())[:300]
        yield fail(
            check,
            f"{type(failure).__name__}: {said}",
            expected="something that can be looked at",
            remedy="run the doctor as the service's user, then read the error",
        )
