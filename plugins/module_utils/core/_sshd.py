"""Files that the SSH server of this host reads when it starts or reloads."""

from __future__ import annotations

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host
from ansible_collections.gpuaas.slice.plugins.module_utils.core._errors import Refusal


def install(path: str, text: str, code: str, *, expected: str, remedy: str) -> None:
    """Install the file if sshd takes it, else keep the old one, so that a login is possible at
    every moment. code, expected and remedy are of the refusal when sshd does not.
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
