"""Effective netplan configuration: its validity, and the addresses of each link.

It is asked, on a copy of the files. What a text in YAML means is read from what its generator makes
of it, for networkd and NetworkManager: hosts need not have a YAML parser for our Python.
"""

from __future__ import annotations

import fnmatch
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ansible_collections.gpuaas.slice.plugins.module_utils.core import _command, _host

# Where netplan looks; a file of a later folder hides one of the same name in an earlier one.
_FOLDERS = ("/lib/netplan", "/etc/netplan", "/run/netplan")
_GENERATED = (
    "run/systemd/network/*.network",
    "run/NetworkManager/system-connections/*.nmconnection",
)
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
    """names: patterns of the names that its interface may have. macs: or what it is known by."""

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
    """refused: what netplan says against the files, "" for nothing."""

    refused: str
    links: tuple[Link, ...]


def judge(path: str = "", text: str = "") -> Judgement:
    """All of the host's files together; with `text` in place of the one at `path`, if given."""
    with tempfile.TemporaryDirectory(prefix="gpuaas-netplan-") as root:
        for folder in _FOLDERS:
            for file in sorted(_host.path(folder).glob("*.yaml")):
                content = _host.content(f"{folder}/{file.name}")
                if content is not None:
                    _place(root, f"{folder}/{file.name}", content)
        if path:
            _place(root, path, text.encode())
        tried = _command.run(["netplan", "generate", "--root-dir", root], ok=range(256))
        if tried.rc:
            said = (tried.err.strip() or tried.out.strip() or "no output").replace(root, "")
            return Judgement(said[-2000:], ())
        made = [file for pattern in _GENERATED for file in sorted(Path(root).glob(pattern))]
        return Judgement("", tuple(_link(file.read_text(errors="replace")) for file in made))


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
            # networkd parts patterns by spaces, NetworkManager by semicolons.
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
        key, found, value = row.partition("=")
        if row.startswith("["):
            section = row.strip("[] ")
        elif found and not row.startswith("#"):
            yield section, key.strip(), value.strip()
