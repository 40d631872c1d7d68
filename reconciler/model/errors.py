"""What a refusal looks like: a stable code, what was expected, what was found, what to do."""

from __future__ import annotations

from collections.abc import Mapping


class Refusal(Exception):
    """Something that cannot be done as asked; every refusal of the reconciler is one."""

    def __init__(self, code: str, *, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"{code}: expected {expected}; found {found}; {remedy}")
        self.code = code
        self.expected = expected
        self.found = found
        self.remedy = remedy

    def told(self) -> dict[str, str]:
        """What a task's error holds."""
        return {
            "code": self.code,
            "expected": self.expected,
            "found": self.found,
            "remedy": self.remedy,
        }


class Problem(Refusal):
    """A request that is refused; nothing has been changed.

    status is the HTTP status that belongs to the code; detail adds data to the document.
    """

    def __init__(
        self,
        code: str,
        status: int = 409,
        *,
        expected: str,
        found: str,
        remedy: str,
        detail: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(code, expected=expected, found=found, remedy=remedy)
        self.status = status
        self.detail = dict(detail or {})

    def document(self) -> dict[str, object]:
        """What the API answers."""
        return {**self.told(), **self.detail}


def not_found(entity: str, key: object) -> Problem:
    """The one text for a name that nothing has."""
    return Problem(
        f"{entity}_not_found",
        404,
        expected=f"a known {entity}",
        found=f"{key!r}, which no {entity} has",
        remedy=f"list what there is and use the id of one {entity}",
    )
