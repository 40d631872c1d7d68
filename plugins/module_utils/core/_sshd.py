"""Files that the SSH server of this host reads when it starts or reloads."""

from __future__ import annotations

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal


def install(path: str, text: str, code: str, *, expected: str, remedy: str) -> None:
    """Install a file and reload sshd. If sshd rejects it, the old file is restored, so that logins
    stay possible, and a Refusal with this code, expected and remedy is raised.
    """
    before = _host.kept(path)
    _host.write(path, text)
    try:
        _command.run(["sshd", "-t"])
        reload()
    except Refusal as refused:
        if before is None:
            _host.remove(path)
        else:
            _host.write(path, before + "\n")
        raise Refusal(code, expected=expected, found=refused.found, remedy=remedy) from refused


def reload() -> None:
    """Have sshd read its files. Open connections stay, including the current one."""
    _command.run(["systemctl", "try-reload-or-restart", "ssh"])
