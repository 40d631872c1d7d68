"""The act: send the harness, collect its one document, believe nothing that the schema does not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from typing import IO, Any

from reconciler.benchmark import bundle, document
from reconciler.benchmark.harness.main import longest_s
from reconciler.benchmark.harness.request import Request
from reconciler.benchmark.target import Target, command
from reconciler.model.errors import Problem

# Connecting, starting Python and sending the document.
_SLACK_S = 120
_SSH_FAILED = 255
# A line of progress is short; a machine that sends more is not listened to.
_LINE = 500
_KEPT = 20


def capture(target: Target, request: Request, tell: Callable[[str], None]) -> dict[str, Any]:
    """A valid capture of the target.

    tell: called with each line of progress, as the target wrote it. Problem `target_unreachable`,
    `capture_timeout`, `harness_failed`, `capture_invalid`, or the harness's own refusal.
    """
    limit = longest_s(request) + _SLACK_S
    said: list[str] = []

    def heard(line: str) -> None:
        said.append(line)
        del said[:-_KEPT]
        tell(line)

    with tempfile.TemporaryFile() as program:
        program.write(bundle.text(request).encode())
        program.seek(0)
        code, text = _run(command(target), program, limit, heard)
    if code is None:
        raise Problem(
            "capture_timeout",
            504,
            expected=f"the capture to end within {limit:.0f} s",
            found="still running; the connection was closed",
            remedy="look at the machine; its probes end at their own deadlines",
        )
    found = document.parse(text, "the target's answer") if code in (0, 3) else {}
    if code == 3 and isinstance(found.get("refusal"), dict):
        raise _refusal(found["refusal"])
    if code:
        raise Problem(
            "target_unreachable" if target.host and code == _SSH_FAILED else "harness_failed",
            502,
            expected="the harness to run under python3 on the target",
            found=f"exit {code}: {' | '.join(said) or 'no message'}"[-2000:],
            remedy="try `ssh` to it by hand; the host key must be in known_hosts already",
        )
    checked = document.check(found, "the target's answer")
    _ensure_asked(checked, request)
    return checked


def _run(
    argv: list[str], program: IO[bytes], limit: float, heard: Callable[[str], None]
) -> tuple[int | None, str]:
    """Exit code (None when time ran out) and standard output."""
    late = threading.Event()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=program, stdout=pipe, stderr=pipe, start_new_session=True
    ) as process:

        def end() -> None:
            late.set()
            _end(process)

        timer = threading.Timer(limit, end)
        listener = threading.Thread(target=_listen, args=(process.stderr, heard), daemon=True)
        timer.start()
        listener.start()
        text = b""
        try:
            if process.stdout:
                text = process.stdout.read(document.LIMIT_BYTES + 1)
            # At its end it has nothing more to say; with more to say it says too much.
            code = process.wait() if len(text) <= document.LIMIT_BYTES else 0
        finally:
            timer.cancel()
            _end(process)
            listener.join()
    return (None if late.is_set() else code), text.decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its session, with whatever ssh started to get there; the harness ends its probe itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)


def _listen(pipe: IO[bytes], heard: Callable[[str], None]) -> None:
    while line := pipe.readline(_LINE):
        if text := line.decode("utf-8", "replace").strip():
            heard(text)


def _refusal(told: dict[str, Any]) -> Problem:
    def text(name: str) -> str:
        return str(told.get(name, ""))[:2000]

    return Problem(
        text("code")[:100] or "refused",
        409,
        expected=text("expected"),
        found=text("found"),
        remedy=text("remedy"),
    )


def _ensure_asked(found: dict[str, Any], request: Request) -> None:
    """What a file claims to be decides what it is compared with."""
    claimed = {name: found[name] for name in ("label", "kind", "tuning")}
    kind = found["kind"] if request.kind == "auto" else request.kind
    asked = {"label": request.label, "kind": kind, "tuning": request.tuning}
    if claimed != asked or found["harness"]["digest"] != bundle.digest():
        raise Problem(
            "capture_invalid",
            502,
            expected=f"a capture labelled {asked} by this harness",
            found=str(claimed),
            remedy="do not trust this machine; enrol it anew",
        )
