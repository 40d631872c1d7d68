"""Did the host say nothing, or did it refuse us? Silence may end by itself; a refusal does not.

SSH has one exit status for all of it, so its last words decide. Only words that it uses before
anything was sent to the host count as silence; whatever is not known counts as a refusal.
"""

from __future__ import annotations

import errno
import os
import re

from reconciler.runs.collect import Outcome

# The system's own texts: runs and probes have LC_ALL=C.UTF-8.
_NO_WAY = "|".join(
    re.escape(os.strerror(code))
    for code in (
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ETIMEDOUT,
    )
)
# At the end of what SSH said: another address may have been tried before the one that answered.
_SILENT = re.compile(
    rf"connect to (?:host|address) \S+ port \d+: (?:{_NO_WAY})\s*$"
    # Something takes the connection, and there is no SSH server behind it: the host is starting,
    # or a port is forwarded to a machine that is down.
    r"|timed out during banner exchange.{0,80}$"
    rf"|kex_exchange_identification: (?:Connection closed by remote host|\w+: (?:{_NO_WAY}))"
    r".{0,120}$"
)


def is_silence(said: str) -> bool:
    """Whether these last words of SSH mean that nobody was there to answer."""
    return _SILENT.search(said) is not None


def is_untouched(outcome: Outcome) -> bool:
    """Whether the run ended before anything of it was on the host, which may answer later."""
    return outcome.unreachable and not outcome.touched and is_silence(outcome.problem)
