"""Act: the actor, the reason and the evidence of a change, passed to every write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from reconciler.model.errors import Problem

_KEY = re.compile(r"[!-~]{1,255}")


@dataclass(frozen=True)
class Act:
    """actor: "admin:alice#<id of the token>", "task:<id>", "local-operator".

    role: the token's role, if any. owner: by which everything of an API caller is counted.
    """

    actor: str
    reason: str = ""
    correlation_id: str = ""
    evidence: Mapping[str, object] = field(default_factory=dict)
    role: str = ""
    owner: str = ""

    @property
    def why(self) -> str:
        """The reason as stored. Without a reason, an act of an API caller names that caller; an
        internal act stores "", because its event explains it.
        """
        holder = self.actor.partition("#")[0]
        return self.reason or (f"no reason given by {holder}" if self.role else "")

    def because(self, reason: str, evidence: Mapping[str, object] | None = None) -> Act:
        """The same actor with a more exact reason."""
        return replace(
            self, reason=reason, evidence=self.evidence if evidence is None else evidence
        )


def roles_of(actor: str) -> list[str]:
    """The names of a person of the OpenID provider in both roles: groups change, and what was made
    before stays. Any other actor has a single name.
    """
    _, _, name = actor.partition(":")
    return [f"admin:{name}", f"member:{name}"] if name.startswith("oidc:") else [actor]


def require_idempotency_key(key: str) -> str:
    """The idempotency key of an act; Problem `idempotency_key_invalid`."""
    if not _KEY.fullmatch(key):
        raise invalid_idempotency_key(
            "1 to 255 visible ASCII characters", f"{len(key)} characters of others"
        )
    return key


def invalid_idempotency_key(expected: str, found: str) -> Problem:
    return Problem(
        "idempotency_key_invalid",
        400,
        expected=expected,
        found=found,
        remedy="make a new key (a UUID) for each act, and repeat it only to repeat that act",
    )


def require_reason(act: Act, remedy: str) -> None:
    """Problem `reason_required` for an act that needs a reason and has none."""
    if not act.reason.strip():
        raise Problem(
            "reason_required",
            422,
            expected="a reason for the audit log",
            found="none",
            remedy=remedy,
        )
