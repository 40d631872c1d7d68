"""Calls of apt that wait for its locks, since a machine's first boot upgrades packages too."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# How long others may have a lock. A first boot's own upgrade takes minutes; less, and a bootstrap
# beside it fails.
LOCK_S = 600
# Some hundred megabytes from a slow mirror; much longer means that the mirror is gone.
_WORK_S = 1800
_PAUSE_S = 2.0
# Exit code 100 means anything, so its words count; _command fixes their language. A lock that apt
# cannot open (wrong user, no such folder, nothing to write on) gets "are you root?" instead: that
# passes with no waiting.
_HELD = ("Could not get lock", "is another process using it?")

# Without the cache that apt-cache writes: nothing is left behind by a look.
_LOOK = ("Dir::Cache::pkgcache=", "Dir::Cache::srcpkgcache=")


def run(*words: str, settings: Sequence[str] = (), wait: float = LOCK_S) -> None:
    """`apt-get` with `words`; settings: apt's own, as `NAME=VALUE`.

    apt waits for dpkg's lock by itself and fails at once for the others, of its lists and of its
    cache: those are waited for here. Raises Refusal `apt_locked` after `wait` seconds.
    """
    until = time.monotonic() + wait
    while True:
        left = max(0, round(until - time.monotonic()))
        argv = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet"]
        argv += _given([f"DPkg::Lock::Timeout={left}", *settings])
        try:
            _command.run([*argv, *words], timeout=_WORK_S + left)
        except Refusal as refusal:
            if refusal.code != "command_failed" or not any(has in refusal.found for has in _HELD):
                raise
            if time.monotonic() + _PAUSE_S > until:
                raise Refusal(
                    "apt_locked",
                    expected=f"apt's locks to be free within {wait:g} s",
                    found=refusal.found,
                    remedy="let the program that holds the lock end, then run again",
                ) from refusal
            time.sleep(_PAUSE_S)
        else:
            return


def offered(names: Sequence[str]) -> frozenset[str]:
    """Those of `names` that apt could install, by the package lists that this host has now."""
    if not names:
        return frozenset()
    # 100: sources that apt cannot read offer nothing.
    out = _command.run(["apt-cache", *_given(_LOOK), "policy", "--", *names], ok=(0, 100)).out
    found, name = set(), ""
    for row in out.splitlines():
        if not row.startswith(" "):
            name = row.removesuffix(":")
        elif row.startswith("  Candidate: ") and not row.endswith(" (none)"):
            found.add(name)
    return frozenset(found)


def _given(settings: Sequence[str]) -> list[str]:
    return [word for one in settings for word in ("-o", one)]
