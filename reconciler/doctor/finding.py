"""Finding of the doctor: the result of a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
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

    def document(self) -> dict[str, str]:
        return asdict(self)


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warn(check: str, found: str, *, expected: str, remedy: str) -> Finding:
    return Finding(check, "warn", found, expected, remedy)


def fail(check: str, found: str, *, expected: str, remedy: str) -> Finding:
    return Finding(check, "fail", found, expected, remedy)


def refused(check: str, refusal: Refusal, found: str = "") -> Finding:
    """A failure from the refusal of a part of the service. found: a longer text than its own."""
    return fail(check, found or refusal.found, expected=refusal.expected, remedy=refusal.remedy)


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Findings of a check. An exception becomes a finding, so that the other checks still run."""
    try:
        yield from check()
    except Exception as failure:
        text = " ".join(str(failure).split())[:300]
        yield fail(
            name,
            f"{type(failure).__name__}: {text}",
            expected="a check without an error",
            remedy="run the doctor as the service's user, then read the error",
        )
