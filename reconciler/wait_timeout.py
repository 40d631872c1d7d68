"""How long a command waits for what the service does: for as long as the service lets it take."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from time import monotonic
from typing import Any

# What is past its deadline is ended by the service: a last while for the run, for its lease, and
# for the loops that look. Too low, and a command gives up before it hears how it ended.
ENDING_S = 900
# A task behind another one of its node has its turn: those before it have deadlines of their own.
_IN_TURN = frozenset({"node_busy", "exclusive_first"})


class Patience:
    """One wait. Moments are of the service's clock, and only told from each other: what has passed
    is measured by the clock of this machine, which may be wrong about the time of day.
    """

    def __init__(self, unbegun_s: float = 0) -> None:
        """unbegun_s: in all, for what has no time of its own, such as a host that is silent."""
        self._unbegun_s = unbegun_s
        self._unbegun = 0.0
        self._since = ""
        self._seen = self._looked = monotonic()

    def ends(self, since: str | None, deadline: str | None) -> bool:
        """Whether something had all the time it has, from since until its deadline, and more."""
        now = monotonic()
        if since is None or deadline is None:
            self._unbegun += now - self._looked
        elif since != self._since:
            self._since, self._seen = since, now
        self._looked = now
        if since is None or deadline is None:
            return self._unbegun > self._unbegun_s
        given = datetime.fromisoformat(deadline) - datetime.fromisoformat(since)
        return now - self._seen > given.total_seconds() + ENDING_S

    def ends_for(self, task: Mapping[str, Any]) -> bool:
        """The same of a task, as the API shows it."""
        if task["state"] == "running":
            return self.ends(task["started_at"], task["deadline_at"])
        if (task.get("waits_for") or {}).get("code") in _IN_TURN:
            return self.ends(task["state_since"], task["deadline_at"])
        return self.ends(None, None)
