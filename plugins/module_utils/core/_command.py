"""Command runner for every program that the collection runs on a host.

Argument lists only, expected exit codes stated, locale fixed, always a time limit. The limit also
holds for a program that cannot be killed, because it waits for a dead disk or file server. Such a
program is left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

# Not every login's PATH contains sbin, where nvme, dnsmasq and the ovs tools are.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# How long a killed program may take to end.
_END_S = 5.0
# Codes of refusals of programs that did not end in their time.
HUNG = ("command_timeout", "command_hung")
# A removal of very many files.
REMOVAL_S = 3600


@dataclass(frozen=True)
class Result:
    rc: int
    out: str
    err: str


def run(
    argv: Sequence[str], *, ok: Sequence[int] = (0,), stdin: str | None = None, timeout: float = 60
) -> Result:
    """Run `argv` and return its output.

    timeout: seconds. Raises Refusal `command_missing`, `command_timeout` (killed; the effect is
    unknown), `command_hung` (it cannot be killed and may still have an effect) or `command_failed`
    (exit code not in `ok`).
    """
    environment = {"PATH": _PATH, "LC_ALL": "C.UTF-8", "HOME": os.environ.get("HOME", "/root")}
    shown = _host.shown(" ".join(argv))
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=None if stdin is None else pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            env=environment,
            # A group of its own, so that the programs it has started end with it.
            start_new_session=True,
        )
    except FileNotFoundError as missing:
        raise Refusal(
            "command_missing",
            expected=f"the program {argv[0]} on this host",
            found="no such program",
            remedy="run the bootstrap playbook, which installs the packages of a slice host",
        ) from missing
    try:
        out, err = process.communicate(stdin, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        ended = _kill(process)
        raise Refusal(
            # A code of its own, because a run must not be repeated beside a program that goes on.
            "command_timeout" if ended else "command_hung",
            expected=f"`{shown}` to end within {timeout:g} s",
            found=f"still running; {'it was killed' if ended else 'it cannot be killed'} and its "
            "effect is unknown",
            remedy="look at the host before trying again"
            if ended
            else "read the kernel log: the kernel waits for a device or a file server; repair "
            "that, or restart the host",
        ) from late
    except BaseException:
        _kill(process)
        raise
    if process.returncode not in ok:
        message = (err.strip() or out.strip() or "no output")[-2000:]
        raise Refusal(
            "command_failed",
            expected=f"`{shown}` to exit with {' or '.join(map(str, ok))}",
            found=f"exit {process.returncode}: {message}",
            remedy="see the text of the program",
        )
    return Result(process.returncode, out, err)


def remove_trees(*places: str) -> None:
    """Remove what is at these paths of the host, but nothing of another file system."""
    # Python's own removal fails in folders that are nested a thousand times.
    paths = [str(_host.path(place)) for place in places]
    run(["rm", "-rf", "--one-file-system", "--", *paths], timeout=REMOVAL_S)


def _kill(process: subprocess.Popen[str]) -> bool:
    """Kill the program and those it has started; whether it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return False
    return True
