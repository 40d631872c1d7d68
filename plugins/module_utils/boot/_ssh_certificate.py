"""OpenSSH host certificate parser: period of validity, certified key and CA."""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass

# Number of strings of the public key between nonce and serial, by certificate type (OpenSSH's
# PROTOCOL.certkeys).
_KEY_PARTS = {
    "ssh-ed25519-cert-v01@openssh.com": 1,
    "ecdsa-sha2-nistp256-cert-v01@openssh.com": 2,
    "ssh-rsa-cert-v01@openssh.com": 2,
}


@dataclass(frozen=True)
class Certificate:
    """valid_after, valid_before: seconds since 1970. key: the certified key's parts. authority:
    the public key of the CA that signed it.
    """

    key: tuple[bytes, ...]
    key_id: str
    valid_after: int
    valid_before: int
    serial: int = 0
    principals: tuple[str, ...] = ()
    authority: bytes = b""


def parse(text: str) -> Certificate:
    """The host certificate in `text`. Raises ValueError when it is none."""
    words = text.split()
    if len(words) < 2 or words[0] not in _KEY_PARTS:
        raise ValueError("not an OpenSSH certificate of a known type")
    reader = _Reader(base64.b64decode(words[1], validate=True))
    reader.text()
    reader.text()
    key = tuple(reader.text() for _part in range(_KEY_PARTS[words[0]]))
    serial = reader.number(8)
    if reader.number(4) != 2:
        raise ValueError("a certificate of a user, not of a host")
    key_id = reader.text().decode(errors="replace")
    names = _Reader(reader.text())
    principals = []
    while names.left:
        principals.append(names.text().decode(errors="replace"))
    after, before = reader.number(8), reader.number(8)
    # Critical options, extensions and a reserved field.
    for _field in range(3):
        reader.text()
    return Certificate(key, key_id, after, before, serial, tuple(principals), reader.text())


def key_parts(public_key: str) -> tuple[bytes, ...]:
    """The parts of a plain public key line, to compare with a certificate's."""
    words = public_key.split()
    if len(words) < 2:
        raise ValueError("not a public key")
    reader = _Reader(base64.b64decode(words[1], validate=True))
    reader.text()
    parts = []
    while reader.left:
        parts.append(reader.text())
    return tuple(parts)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.left = data

    def text(self) -> bytes:
        return self._take(self.number(4))

    def number(self, size: int) -> int:
        return int(struct.unpack(">I" if size == 4 else ">Q", self._take(size))[0])

    def _take(self, size: int) -> bytes:
        if len(self.left) < size:
            raise ValueError("the certificate ends early")
        taken, self.left = self.left[:size], self.left[size:]
        return taken
