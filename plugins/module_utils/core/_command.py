"""Command runner for every program that the collection runs on a host.

Argument lists only, expected exit codes stated, locale fixed, always a time limit.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# Not every login's PATH contains sbin, where nvme, dnsmasq and the ovs tools are.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Result:
    rc: int
    out: str
    err: str


def run(
    argv: Sequence[str], *, ok: Sequence[int] = (0,), stdin: str | None = None, timeout: float = 60
) -> Result:
    """Run `argv` and return its output.

    timeout: seconds. Raises Refusal `command_missing`, `command_timeout` (the effect is unknown) or
    `command_failed` (exit code not in `ok`).
    """
    environment = {"PATH": _PATH, "LC_ALL": "C.UTF-8", "HOME": os.environ.get("HOME", "/root")}
    shown = _host.shown(" ".join(argv))
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=environment,
            check=False,
        )
    except FileNotFoundError as missing:
        raise Refusal(
            "command_missing",
            expected=f"the program {argv[0]} on this host",
            found="no such program",
            remedy="run the bootstrap playbook, which installs the packages of a slice host",
        ) from missing
    except subprocess.TimeoutExpired as late:
        raise Refusal(
            "command_timeout",
            expected=f"`{shown}` to end within {timeout:g} s",
            found="still running; it was killed and its effect is unknown",
            remedy="look at the host before trying again",
        ) from late
    if done.returncode not in ok:
        message = (done.stderr.strip() or done.stdout.strip() or "no output")[-2000:]
        raise Refusal(
            "command_failed",
            expected=f"`{shown}` to exit with {' or '.join(map(str, ok))}",
            found=f"exit {done.returncode}: {message}",
            remedy="see the text of the program",
        )
    return Result(done.returncode, done.stdout, done.stderr)
