"""Capture of a machine: send the harness, collect its document, and validate it."""

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
# Limits for a machine that sends too much: bytes of a progress line, and lines in an error message.
_LINE_BYTES = 500
_LINES = 20


def capture(target: Target, request: Request, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """A valid capture of the target.

    on_progress: called with each line of progress, as the target wrote it. Problem
    `target_unreachable`, `capture_timeout`, `harness_failed`, `capture_invalid`, or the refusal of
    the harness.
    """
    limit = longest_s(request) + _SLACK_S
    messages: list[str] = []

    def on_line(line: str) -> None:
        messages.append(line)
        del messages[:-_LINES]
        on_progress(line)

    with tempfile.TemporaryFile() as program:
        program.write(bundle.text(request).encode())
        program.seek(0)
        code, text = _run(command(target), program, limit, on_line)
    if code is None:
        raise Problem(
            "capture_timeout",
            504,
            expected=f"the capture to end within {limit:.0f} s",
            found="still running; the connection was closed",
            remedy="check the machine; its probes end at their own deadlines",
        )
    output = document.parse(text, "the target's answer") if code in (0, 3) else {}
    if code == 3 and isinstance(output.get("refusal"), dict):
        raise _refusal(output["refusal"])
    if code:
        raise Problem(
            "target_unreachable" if target.host and code == _SSH_FAILED else "harness_failed",
            502,
            expected="the harness to run under python3 on the target",
            found=f"exit {code}: {' | '.join(messages) or 'no message'}"[-2000:],
            remedy="try `ssh` to it by hand; its host key must be in known_hosts",
        )
    checked = document.check(output, "the target's answer")
    _ensure_requested(checked, request)
    return checked


def _run(
    argv: list[str], program: IO[bytes], limit: float, on_line: Callable[[str], None]
) -> tuple[int | None, str]:
    """Exit code (None after a timeout) and standard output."""
    late = threading.Event()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=program, stdout=pipe, stderr=pipe, start_new_session=True
    ) as process:

        def end() -> None:
            late.set()
            _end(process)

        timer = threading.Timer(limit, end)
        listener = threading.Thread(target=_listen, args=(process.stderr, on_line), daemon=True)
        timer.start()
        listener.start()
        text = b""
        try:
            if process.stdout:
                text = process.stdout.read(document.LIMIT_BYTES + 1)
            # Wait for the exit code only at the end of the output, not if the output is too long.
            code = process.wait() if len(text) <= document.LIMIT_BYTES else 0
        finally:
            timer.cancel()
            _end(process)
            listener.join()
    return (None if late.is_set() else code), text.decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the session, including ssh's own children. The harness ends its probe itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)


def _listen(pipe: IO[bytes], on_line: Callable[[str], None]) -> None:
    while line := pipe.readline(_LINE_BYTES):
        if text := line.decode("utf-8", "replace").strip():
            on_line(text)


def _refusal(refusal: dict[str, Any]) -> Problem:
    def text(name: str) -> str:
        return str(refusal.get(name, ""))[:2000]

    return Problem(
        text("code")[:100] or "refused",
        409,
        expected=text("expected"),
        found=text("found"),
        remedy=text("remedy"),
    )


def _ensure_requested(output: dict[str, Any], request: Request) -> None:
    """Refuse a capture with another label, kind or tuning: they select its comparisons."""
    labels = {name: output[name] for name in ("label", "kind", "tuning")}
    kind = output["kind"] if request.kind == "auto" else request.kind
    requested = {"label": request.label, "kind": kind, "tuning": request.tuning}
    if labels != requested or output["harness"]["digest"] != bundle.digest():
        raise Problem(
            "capture_invalid",
            502,
            expected=f"a capture labelled {requested} by this harness",
            found=str(labels),
            remedy="do not trust this machine; enrol it again",
        )
