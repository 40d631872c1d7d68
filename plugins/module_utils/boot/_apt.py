"""apt calls that wait for its locks, because a machine's first boot also upgrades packages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# How long other processes may hold a lock. The first boot's own upgrade takes minutes; with a
# shorter wait, a bootstrap that runs at the same time fails.
LOCK_S = 600
# Time for some hundred megabytes from a slow mirror; a longer time means that the mirror is gone.
_WORK_S = 1800
_PAUSE_S = 2.0
# Exit code 100 has many causes, so the error text counts; _command fixes its language. A lock that
# apt cannot open (wrong user, missing folder, read-only medium) gives "are you root?" instead, and
# apt is then not retried.
_HELD = ("Could not get lock", "is another process using it?", "was locked by another process")
# A dpkg that was killed, as by a loss of power, leaves packages half configured.
_BROKEN = "dpkg was interrupted"
_MEND = ("dpkg", "--configure", "--pending", "--force-confold", "--force-confdef")

# apt-cache would otherwise write a package cache; a read must leave nothing behind.
_LOOK = ("Dir::Cache::pkgcache=", "Dir::Cache::srcpkgcache=")


def run(*words: str, settings: Sequence[str] = (), wait: float = LOCK_S) -> None:
    """Run `apt-get` with `words`; settings: apt's own, as `NAME=VALUE`.

    apt itself waits for dpkg's lock, but fails at once on the locks of its lists and cache. This
    function waits for those two. Raises Refusal `apt_locked` after `wait` seconds. What a killed
    dpkg left is configured first, once.
    """
    until = time.monotonic() + wait

    def install(left: int) -> list[str]:
        return ["apt-get", "--quiet", *_given([f"DPkg::Lock::Timeout={left}", *settings]), *words]

    try:
        _when_free(install, until, wait)
    except Refusal as refusal:
        if refusal.code != "command_failed" or _BROKEN not in refusal.found:
            raise
        _when_free(lambda _left: _MEND, until, wait)
        _when_free(install, until, wait)


def _when_free(command: Callable[[int], Sequence[str]], until: float, wait: float) -> None:
    """Run a command, made for the seconds that are left, once no other process holds its locks."""
    while True:
        left = max(0, round(until - time.monotonic()))
        argv = ["env", "DEBIAN_FRONTEND=noninteractive", *command(left)]
        try:
            _command.run(argv, timeout=_WORK_S + left)
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
    """Those of `names` that apt could install, by this host's current package lists."""
    if not names:
        return frozenset()
    # 100: sources that apt cannot read offer no packages.
    out = _command.run(["apt-cache", *_given(_LOOK), "policy", "--", *names], ok=(0, 100)).out
    installable, name = set(), ""
    for row in out.splitlines():
        if not row.startswith(" "):
            name = row.removesuffix(":")
        elif row.startswith("  Candidate: ") and not row.endswith(" (none)"):
            installable.add(name)
    return frozenset(installable)


def _given(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("-o", setting)]
