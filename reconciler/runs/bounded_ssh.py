"""SSH whose answer ends at a limit: `python -I -S bounded_ssh.py <arguments of ssh>`.

Ansible holds the answer of a host several times in memory before anything looks at its length, and
prints some of it. In Ansible's output escape sequences are events: a host could forge them.
This program stands between both, and imports nothing that would delay each task.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys

# The largest document of a host that counts has 4 MiB, and a module's answer repeats its arguments.
LIMITS = {1: 5 * 1024 * 1024, 2: 256 * 1024}
_CHUNK = 64 * 1024
# A shared connection of an older SSH keeps its error output open after the command has ended.
_QUIET_MS = 100
# Passed on as it comes, because Ansible waits for the first line of sudo. The rest follows when the
# answer is complete.
_AT_ONCE = 4096
# The escape character, as such and in JSON; and what may be the beginning of the latter.
_ESCAPE = re.compile(rb"\x1b|\\u001[bB]")
_BEGINNING = re.compile(rb"\\(?:u(?:0(?:01?)?)?)?\Z")
_SHOWN = {b"\x1b": "\u241b".encode()}


def main(arguments: list[str]) -> int:
    """Run ssh; returns its exit status, or 1 when its answer was cut off."""
    pipes = {target: os.pipe() for target in LIMITS}
    child = os.fork()
    if not child:
        for target, (_, end) in pipes.items():
            os.dup2(end, target)
        os.execvp("ssh", ["ssh", *arguments])  # noqa: S606
    # Ansible ends this program, and means the connection.
    signal.signal(signal.SIGTERM, lambda _number, _frame: os.kill(child, signal.SIGKILL))
    readers = {}
    for target, (reader, end) in pipes.items():
        os.close(end)
        readers[reader] = target
    whole = _pass_on(readers, child)
    if not whole:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not whole:
        os.write(2, b"answer_too_large: the host answered more than a module ever does\n")
        return 1
    return status if status >= 0 else 128 - status


def _pass_on(readers: dict[int, int], child: int) -> bool:
    """Copy until both ends are closed or ssh has ended; False when a limit is exceeded."""
    left = dict(LIMITS)
    held = {target: bytearray() for target in LIMITS}
    poll = select.poll()
    for reader in readers:
        poll.register(reader, select.POLLIN)
    while readers:
        ready = poll.poll(_QUIET_MS)
        if not ready and _has_ended(child):
            break
        for reader, _ in ready:
            target = readers[reader]
            data = os.read(reader, _CHUNK)
            left[target] -= len(data)
            if left[target] < 0:
                return False
            if not data:
                poll.unregister(reader)
                del readers[reader]
            held[target] += data
            if not data or left[target] > LIMITS[target] - _AT_ONCE:
                held[target] = _write(target, held[target], last=not data)
    for target, rest in held.items():
        _write(target, rest, last=True)
    return True


def _has_ended(child: int) -> bool:
    """Whether the process has ended; its status stays for a later wait."""
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended is not None


def _write(target: int, data: bytearray, *, last: bool) -> bytearray:
    """Write without escape characters; returns what must wait for more."""
    match = None if last else _BEGINNING.search(data, max(0, len(data) - 5))
    end = match.start() if match else len(data)
    harmless = _ESCAPE.sub(lambda escape: _SHOWN.get(escape[0], rb"\u241b"), data[:end])
    while harmless:
        harmless = harmless[os.write(target, harmless) :]
    return data[end:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
