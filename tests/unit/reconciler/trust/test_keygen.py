"""Spellings of public keys."""

from __future__ import annotations

import base64
import struct

import pytest

from reconciler.trust.keygen import TrustError, public_key

pytestmark = pytest.mark.covers("HOST-13")

PLAIN = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILw6MHUfBS0BkklFB8Qsked8rLaWhYoJ7HQ8JG+KpgdX"


def line(kind: str, *fields: bytes) -> str:
    """A public key of these fields."""
    parts = (kind.encode(), *fields)
    blob = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return f"{kind} {base64.b64encode(blob).decode()}"


def rsa_key(bits: int, zeros: int = 0) -> str:
    modulus = (1 << (bits - 1)) + 1
    return line("ssh-rsa", b"\1\0\1", bytes(zeros) + modulus.to_bytes(bits // 8 + 1, "big"))


# A point of the curve in its short form, which OpenSSH does not read.
_X = "6b17d1f2e12c4247f8bce6e563a440f277037d812deb33a0f4a13945d898c296"
COMPRESSED = line("ecdsa-sha2-nistp256", b"nistp256", bytes.fromhex(f"03{_X}"))


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (f"{PLAIN} root@host\n", PLAIN),
        (f"{PLAIN}=", PLAIN),
        (f"{PLAIN}==", PLAIN),
        (rsa_key(2048, zeros=1), rsa_key(2048)),
    ],
    ids=["comment", "padding", "more-padding", "zero"],
)
def test_a_host_key_has_one_spelling(given: str, plain: str) -> None:
    """A host could name its neighbour's key, or a key that no line of known_hosts revokes."""
    assert public_key(given, whole=True) == plain


@pytest.mark.parametrize(
    "text",
    [
        "ssh-ed25519 AAAA" + "B" * 64,
        f"{PLAIN}AAAA",
        f"{PLAIN}A",
        rsa_key(1023),
        COMPRESSED,
    ],
    ids=["another-type", "longer", "no-base64", "short-rsa", "compressed-point"],
)
def test_a_host_key_that_ssh_does_not_take_is_refused(text: str) -> None:
    with pytest.raises(TrustError, match="host_key_invalid"):
        public_key(text, whole=True)
