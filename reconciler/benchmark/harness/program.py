"""Execution of tools by the harness: argument lists, no input, a time limit."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from reconciler.benchmark.harness.reasons import Failed, Unavailable

# Not every login has these folders on its PATH.
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


def find(name: str, package: str) -> str:
    """The path of a tool; Unavailable `tool_missing` with the name of its package."""
    path = shutil.which(name, path=_path())
    if path is None:
        raise Unavailable(
            "tool_missing",
            expected=f"the program {name} on this machine",
            found="no such program",
            remedy=f"install {package} on all machines of the comparison",
        )
    return path


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    extra: Mapping[str, str] | None = None,
    ok: Sequence[int] = (0,),
) -> tuple[str, str]:
    """Run a tool and return its standard output and error.

    timeout: seconds. extra: additional environment. ok: exit codes of success. Raises Failed
    `tool_timeout` or `tool_failed`.
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**os.environ, "PATH": _path(), "LC_ALL": "C.UTF-8", **(extra or {})},
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise Failed(
            "tool_timeout",
            expected=f"{argv[0]} to end within {timeout:g} s",
            found="still running; it was killed",
            remedy="run it by hand on the machine",
        ) from late
    if done.returncode not in ok:
        output = (done.stderr.strip() or done.stdout.strip() or "no output")[-1500:]
        raise Failed(
            "tool_failed",
            expected=f"{argv[0]} to exit with {' or '.join(map(str, ok))}",
            found=f"exit {done.returncode}: {output}",
            remedy="see the output of the program",
        )
    return done.stdout, done.stderr


def version(path: str, *words: str, ok: Sequence[int] = (0,)) -> str:
    """The first line of a tool's version output."""
    out, err = run([path, *words], timeout=60, ok=ok)
    return ((out.strip() or err.strip()).splitlines() or ["unknown"])[0][:200]


def _path() -> str:
    return f"{os.environ.get('PATH', '/usr/local/bin:/usr/bin:/bin')}:{_SBIN}"
