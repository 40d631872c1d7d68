"""Effective netplan configuration: its validity, and the addresses of each link.

netplan's generator runs on a copy of the files. The configuration is read from its output for
networkd and NetworkManager, because hosts may lack a YAML parser for this Python.
"""

from __future__ import annotations

import fnmatch
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host

# netplan's folders; a file in a later folder hides a file of the same name in an earlier folder.
_FOLDERS = ("/lib/netplan", "/etc/netplan", "/run/netplan")
_GENERATED = ("run/systemd/network", "run/NetworkManager/system-connections")
_ENDS = (".network", ".nmconnection")
_NAMES = {("Match", "Name"), ("connection", "interface-name"), ("match", "interface-name")}
_MACS = {
    ("Match", "MACAddress"),
    ("Match", "PermanentMACAddress"),
    ("ethernet", "mac-address"),
    ("infiniband", "mac-address"),
}
_NUMBERED = re.compile(r"address[0-9]+")


@dataclass(frozen=True)
class Link:
    """names: patterns of the possible interface names. macs: MAC addresses that select
    it instead.
    """

    names: tuple[str, ...]
    macs: tuple[str, ...]
    addresses: tuple[str, ...]

    def is_of(self, interface: str) -> bool:
        if self.names:
            return any(fnmatch.fnmatchcase(interface, name) for name in self.names)
        mac = _host.read(f"/sys/class/net/{interface}/address") or ""
        return mac.lower() in self.macs if self.macs else True


@dataclass(frozen=True)
class Judgement:
    """refused: netplan's error for the files, or ""."""

    refused: str
    links: tuple[Link, ...]


def judge(path: str = "", text: str = "") -> Judgement:
    """Judge all files of the host together; `text` replaces the content of `path`, if given."""
    with tempfile.TemporaryDirectory(prefix="gpuaas-netplan-") as root:
        for folder in _FOLDERS:
            for name in _host.matching(folder, "*.yaml"):
                content = _host.content(f"{folder}/{name}")
                if content is not None:
                    _place(root, f"{folder}/{name}", content)
        if path:
            _place(root, path, text.encode())
        tried = _command.run(["netplan", "generate", "--root-dir", root], ok=range(256))
        if tried.rc:
            output = (tried.err.strip() or tried.out.strip() or "no output").replace(root, "")
            return Judgement(output[-2000:], ())
        written = [there for name in _GENERATED if (there := Path(root, name)).is_dir()]
        made = [file for there in written for file in sorted(there.iterdir())]
        texts = [file.read_text(errors="replace") for file in made if file.name.endswith(_ENDS)]
        return Judgement("", tuple(_link(text) for text in texts))


def _place(root: str, path: str, content: bytes) -> None:
    target = Path(root, path.lstrip("/"))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    # netplan warns about files that others can read.
    target.chmod(0o600)


def _link(text: str) -> Link:
    names, macs, addresses = [], [], []
    for section, key, value in _settings(text):
        if (section, key) in _NAMES:
            # networkd separates patterns by spaces, NetworkManager by semicolons.
            names += value.replace(";", " ").split()
        elif (section, key) in _MACS:
            macs += value.lower().split()
        elif (section, key) in (("Network", "Address"), ("Address", "Address")):
            addresses.append(value)
        elif section in ("ipv4", "ipv6") and _NUMBERED.fullmatch(key):
            # A gateway may follow.
            addresses.append(value.partition(",")[0])
    return Link(tuple(names), tuple(macs), tuple(addresses))


def _settings(text: str) -> Iterator[tuple[str, str, str]]:
    section = ""
    for row in text.splitlines():
        key, separator, value = row.partition("=")
        if row.startswith("["):
            section = row.strip("[] ")
        elif separator and not row.startswith("#"):
            yield section, key.strip(), value.strip()
