"""Refusals: errors with a stable code, the expected and the found state, and a remedy."""

from __future__ import annotations

from collections.abc import Mapping


class Refusal(Exception):
    """Base of every error with which the reconciler refuses a request or a task."""

    def __init__(self, code: str, *, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"{code}: expected {expected}; found {found}; {remedy}")
        self.code = code
        self.expected = expected
        self.found = found
        self.remedy = remedy

    def to_dict(self) -> dict[str, str]:
        """The four parts, as a task stores its error."""
        return {
            "code": self.code,
            "expected": self.expected,
            "found": self.found,
            "remedy": self.remedy,
        }


class Problem(Refusal):
    """Refusal of a request; no record has been changed.

    status: the HTTP status for the code. detail: additional data for the document.
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
        """Body of the API's answer."""
        return {**self.to_dict(), **self.detail}


# Commands that list what a request may name. Nodes, slots and tasks are named by admins only.
_LISTS = {
    "allocation": "allocations",
    "image": "images list",
    "job": "jobs list --project PROJECT",
    "node": "nodes list",
    "pool": "pools list",
    "project": "projects list",
    "slot": "slots list",
    "task": "tasks list",
}


def not_found(entity: str, key: object) -> Problem:
    """Problem `<entity>_not_found` for an unknown id or name."""
    shown = f"; `gpuaas {_LISTS[entity]}` shows them" if entity in _LISTS else ""
    return Problem(
        f"{entity}_not_found",
        404,
        expected=f"a known {entity}",
        found=f"{key!r}, which no {entity} has",
        remedy=f"name an existing {entity}{shown}",
    )
