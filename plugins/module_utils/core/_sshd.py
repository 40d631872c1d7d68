"""Files that the SSH server of this host reads when it starts or reloads.

Until sshd has taken a change, the file's former text is kept under PENDING. So a run that was
killed in between is known to the next one, which checks the file and can still go back. A boot
ends that, because sshd has then read the file by itself.
"""

from __future__ import annotations

import json

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal

PENDING = "/run/gpuaas/sshd"


def pending(path: str) -> bool:
    """Whether a run has changed the file, and ended before sshd had taken it."""
    return _host.path(_pending(path)).exists()


def install(path: str, text: str, code: str, *, expected: str, remedy: str) -> None:
    """Install a file and reload sshd. If sshd rejects it, the old file is restored, so that logins
    stay possible, and a Refusal with this code, expected and remedy is raised.
    """
    before = _begin(path)
    _host.write(path, text)
    try:
        _command.run(["sshd", "-t"])
        reload()
    except Refusal as refused:
        if before is None:
            _host.remove(path)
        else:
            _host.write(path, before + "\n")
        _host.remove(_pending(path))
        raise Refusal(code, expected=expected, found=refused.found, remedy=remedy) from refused
    _host.remove(_pending(path))


def remove(path: str) -> None:
    """Remove a file and reload sshd."""
    _begin(path)
    _host.remove(path)
    reload()
    _host.remove(_pending(path))


def reload() -> None:
    """Have sshd read its files. Open connections stay, including the current one."""
    _command.run(["systemctl", "try-reload-or-restart", "ssh"])


def _begin(path: str) -> str | None:
    """Record the text that sshd has taken last, and return it; None without the file."""
    if pending(path):
        text: str | None = json.loads(_host.kept(_pending(path)) or "null")
        return text
    before = _host.kept(path)
    _host.write(_pending(path), json.dumps(before), 0o600)
    return before


def _pending(path: str) -> str:
    return f"{PENDING}/{path.rpartition('/')[2]}"
