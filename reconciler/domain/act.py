"""Who changes something, why, and on what evidence: goes with every write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Act:
    """actor: "admin:alice", "task:<id>", "local-operator"; role: the token's role, if any."""

    actor: str
    reason: str = ""
    correlation_id: str = ""
    evidence: Mapping[str, object] = field(default_factory=dict)
    role: str = ""

    def because(self, reason: str, evidence: Mapping[str, object] | None = None) -> Act:
        """The same actor with a more exact reason."""
        return replace(
            self, reason=reason, evidence=self.evidence if evidence is None else evidence
        )
