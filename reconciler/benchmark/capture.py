"""Capture of a machine: send the harness, collect its document, and validate it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

from reconciler import carrier
from reconciler.benchmark import document
from reconciler.benchmark.harness.main import longest_s
from reconciler.benchmark.harness.probe import Request
from reconciler.benchmark.target import Target, command
from reconciler.model.errors import Problem

_HARNESS = "reconciler.benchmark.harness"
# Connecting, starting Python and sending the document.
_SLACK_S = 120
_SSH_FAILED = 255
# Limits for a machine that sends too much: bytes of a progress line, and lines in an error message.
_LINE_BYTES = 500
_LINES = 20
_REFUSAL = ("code", "expected", "found", "remedy")
_CODE = re.compile(r"[a-z][a-z0-9_]{0,63}")


def capture(target: Target, request: Request, on_progress: Callable[[str], None]) -> dict[str, Any]:
    """A valid capture of the target.

    on_progress: called with each line of progress, as the target wrote it. Problem
    `target_unreachable`, `capture_timeout`, `harness_failed`, `capture_invalid`, or the refusal of
    the harness.
    """
    limit = longest_s(request) + _SLACK_S
    code, text, messages = _run(command(target), program(request), limit, on_progress)
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
        texts = {name: str(output["refusal"].get(name, ""))[:2000] for name in _REFUSAL}
        raise Problem(
            # A guest chooses the text.
            texts["code"] if _CODE.fullmatch(texts["code"]) else "refused",
            expected=texts["expected"],
            found=texts["found"],
            remedy=texts["remedy"],
        )
    if code:
        raise Problem(
            "target_unreachable" if target.host and code == _SSH_FAILED else "harness_failed",
            502,
            expected="the harness to run under python3 on the target",
            found=f"exit {code}: {' | '.join(messages) or 'no message'}"[-2000:],
            remedy="try `ssh` to it by hand; its host key must be in known_hosts",
        )
    checked = document.check(output, "the target's answer")
    # Label, kind, tuning and number of CPUs select the comparisons of a capture.
    labels = {name: checked[name] for name in ("label", "kind", "tuning")}
    kind = checked["kind"] if request.kind == "auto" else request.kind
    requested: dict[str, object] = {"label": request.label, "kind": kind, "tuning": request.tuning}
    if request.vcpus:
        labels["vcpus"], requested["vcpus"] = checked["vcpus"], request.vcpus
    if labels != requested or checked["harness"]["digest"] != digest():
        raise Problem(
            "capture_invalid",
            502,
            expected=f"a capture labelled {requested} by this harness",
            found=str(labels),
            remedy="do not trust this machine; enrol it again",
        )
    return checked


@lru_cache(maxsize=1)
def sources() -> dict[str, str]:
    """Source text of the harness by module name, with empty parent packages."""
    modules = {"reconciler": "", "reconciler.benchmark": ""}
    for path in sorted((Path(__file__).parent / "harness").glob("*.py")):
        name = _HARNESS if path.stem == "__init__" else f"{_HARNESS}.{path.stem}"
        modules[name] = path.read_text(encoding="utf-8")
    return modules


def digest() -> str:
    """Digest of the harness: captures with the same digest were made by the same code."""
    return f"sha256:{hashlib.sha256(json.dumps(sources()).encode()).hexdigest()}"


def program(request: Request) -> str:
    """Program text for `python3 -` that prints a capture."""
    arguments = dataclasses.asdict(dataclasses.replace(request, harness=digest()))
    importer = Path(carrier.__file__).read_text(encoding="utf-8")
    # Python literals of strings and numbers, so the text of a label stays data.
    # A line per module, because an error message quotes a whole line.
    lines = "".join(f"    {name!r}: {source!r},\n" for name, source in sources().items())
    return (
        f"{importer}\n\ninstall({{\n{lines}}})\nrun({f'{_HARNESS}.main:main'!r}, {arguments!r})\n"
    )


def _run(
    argv: list[str], text: str, limit: float, on_progress: Callable[[str], None]
) -> tuple[int | None, str, Collection[str]]:
    """Exit code (None after a timeout), standard output, and the last lines of progress."""
    messages: deque[str] = deque(maxlen=_LINES)
    end, pipe = time.monotonic() + limit, subprocess.PIPE
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        process = subprocess.Popen(
            argv, stdin=file, stdout=pipe, stderr=pipe, start_new_session=True
        )

    def listen() -> None:
        while line := process.stderr.readline(_LINE_BYTES) if process.stderr else b"":
            if message := line.decode("utf-8", "replace").strip():
                messages.append(message)
                on_progress(message)

    def stop() -> None:
        """Terminate the session with ssh's own children. The harness ends its probe itself."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)

    with process:
        timer = threading.Timer(limit, stop)
        listener = threading.Thread(target=listen, daemon=True)
        timer.start()
        listener.start()
        try:
            output = process.stdout.read(document.LIMIT_BYTES + 1) if process.stdout else b""
            # Wait for the exit code only at the end of the output, not if the output is too long.
            code = process.wait() if len(output) <= document.LIMIT_BYTES else 0
        finally:
            timer.cancel()
            stop()
            listener.join()
    late = time.monotonic() >= end
    return (None if late else code), output.decode("utf-8", "replace"), messages
