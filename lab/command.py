"""Command runner of the lab: argument lists, captured output, failures with their reason."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class LabError(Exception):
    """Failure of the lab. The text gives the expectation, the finding and the remedy."""


def run(
    argv: Sequence[str | Path],
    *,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    timeout: float | None = None,
) -> bytes:
    """Run a command to completion and return its stdout.

    Any exit code other than 0 raises LabError. With `log`, stdout and stderr go to that file and
    the error quotes its last lines.
    """
    words = [str(word) for word in argv]
    environment = {**os.environ, "LC_ALL": "C.UTF-8", **(env or {})}
    # On Debian, mke2fs and sfdisk live in sbin, which is not in an ordinary user's PATH.
    environment["PATH"] += ":/usr/local/sbin:/usr/sbin:/sbin"
    try:
        if log is None:
            done = subprocess.run(
                words,
                input=stdin,
                env=environment,
                capture_output=True,
                timeout=timeout,
                check=False,
            )
            output, messages = done.stdout, done.stderr
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as sink:
                done = subprocess.run(
                    words,
                    input=stdin,
                    env=environment,
                    stdout=sink,
                    stderr=sink,
                    timeout=timeout,
                    check=False,
                )
            output, messages = b"", log.read_bytes()
    except FileNotFoundError as error:
        raise LabError(f"{words[0]} is not installed: run `gpuaas lab build`") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{words[0]} did not end within {timeout:.0f} s") from error
    if done.returncode != 0:
        tail = messages.decode(errors="replace").strip().splitlines()[-15:]
        where = f" (all of it: {log})" if log else ""
        raise LabError(
            f"{' '.join(words[:4])} … ended with {done.returncode}{where}:\n" + "\n".join(tail)
        )
    return output
