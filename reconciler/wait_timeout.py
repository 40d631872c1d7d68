"""Timeout of a command that waits for the service: as long as the service itself allows."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from time import monotonic
from typing import Any

# The service ends work that is past its deadline. This time covers the end of the run, its lease
# and the interval of the loops. Too low, and a command gives up before it learns the result.
ENDING_S = 900
# A task that waits behind another task of its node; the earlier tasks have deadlines of their own.
_QUEUED = frozenset({"node_busy", "exclusive_first"})


class WaitTimeout:
    """A single wait. Elapsed time is measured by the monotonic clock of this machine, because its
    time of day may be wrong. Times of the service's clock are only compared with each other.
    """

    def __init__(self, unbegun_s: float = 0) -> None:
        """unbegun_s: total wait for work without a deadline, such as for an unreachable host."""
        self._unbegun_s = unbegun_s
        self._unbegun = 0.0
        self._since = ""
        self._changed = self._checked = monotonic()

    def ends(self, since: str | None, deadline: str | None) -> bool:
        """Whether the time from `since` to `deadline` has passed, plus the time to end."""
        now = monotonic()
        if since is None or deadline is None:
            self._unbegun += now - self._checked
        elif since != self._since:
            self._since, self._changed = since, now
        self._checked = now
        if since is None or deadline is None:
            return self._unbegun > self._unbegun_s
        allowed = datetime.fromisoformat(deadline) - datetime.fromisoformat(since)
        return now - self._changed > allowed.total_seconds() + ENDING_S

    def ends_for(self, task: Mapping[str, Any]) -> bool:
        """The same for a task, as the API shows it."""
        if task["state"] == "running":
            return self.ends(task["started_at"], task["deadline_at"])
        if (task.get("waits_for") or {}).get("code") in _QUEUED:
            return self.ends(task["state_since"], task["deadline_at"])
        return self.ends(None, None)
