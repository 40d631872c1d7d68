"""Whose failure it was that a launch touched nothing. Pure.

A slot that comes back from such a failure is the one that the next launch would take first. Where
the cause is the host's it would fail the same way for every tenant, so only a failure that is known
to be somebody else's leaves the slot on sale.
"""

from __future__ import annotations

# A launch that fails once may have met a moment; the second time, after the host was looked at and
# found well, what is wrong is something that no look shows.
MOST = 2

# The request, or our own side: another host would have failed as well, or none. After
# `boot_changed` the gate is closed by the new boot, if that was not proven meanwhile.
_ELSEWHERE = frozenset(
    {
        "boot_changed",
        "canceled",
        "deadline_passed",
        "run_not_started",
        "runner_unreadable",
        "variables_invalid",
    }
)


def on_host(code: str) -> bool:
    """Whether a failure with this code may be there for the next launch as well.

    An image that cannot be had is so for all hosts, but for one that has no room for it: were it
    the host's, the failure of one image server would take a whole site off sale.
    """
    if code.startswith("image_"):
        return code == "image_no_room"
    return code not in _ELSEWHERE and not code.startswith("awx_")
