"""Errors of runs."""

from __future__ import annotations

from reconciler.model.errors import Refusal


class RunError(Refusal):
    """Something about a run that cannot be done as asked."""


class SpecError(RunError):
    """A run was described in a way that cannot be carried out, or differs from the first time."""


class LauncherAway(RunError):
    """What carries out runs did not answer, and nothing was started: trying later is right."""


class ContractError(RunError):
    """A document breaks the run contract; `field` is the dotted path of the offending value."""

    def __init__(self, code: str, *, field: str, expected: str, found: str, remedy: str) -> None:
        self.field = field
        super().__init__(code, expected=f"{field}: {expected}", found=found, remedy=remedy)
