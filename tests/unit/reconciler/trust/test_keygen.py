"""Spellings of public keys."""

from __future__ import annotations

import base64
import struct

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from reconciler.trust.keygen import TrustError, public_key
from tests.unit.reconciler.api.stack import KEY

pytestmark = pytest.mark.covers("HOST-13")

PLAIN = " ".join(KEY.split()[:2])


def line(kind: str, *fields: bytes) -> str:
    """A public key of these fields."""
    parts = (kind.encode(), *fields)
    blob = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return f"{kind} {base64.b64encode(blob).decode()}"


def rsa_key(modulus: int, zeros: int = 0) -> str:
    number = bytes(zeros) + modulus.to_bytes((modulus.bit_length() + 8) // 8, "big")
    return line("ssh-rsa", b"\1\0\1", number)


MODULUS = rsa.generate_private_key(65537, 2048).public_key().public_numbers().n
POINT = (
    ec.generate_private_key(ec.SECP256R1())
    .public_key()
    .public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (f"{PLAIN} root@host\n", PLAIN),
        (f"{PLAIN}=", PLAIN),
        (f"{PLAIN}==", PLAIN),
        (rsa_key(MODULUS, zeros=1), rsa_key(MODULUS)),
    ],
)
def test_a_host_key_has_one_spelling(given: str, plain: str) -> None:
    """A host could name its neighbour's key, or one that no line of known_hosts revokes."""
    assert public_key(given, whole=True) == plain


@pytest.mark.parametrize(
    "text",
    [
        "ssh-ed25519 AAAA" + "B" * 64,
        f"{PLAIN}AAAA",
        f"{PLAIN}A",
        rsa_key((1 << 1022) + 1),
        line("ecdsa-sha2-nistp256", b"nistp256", POINT),
    ],
    ids=["another-type", "longer", "no-base64", "short-rsa", "compressed-point"],
)
def test_a_host_key_that_ssh_does_not_take_is_refused(text: str) -> None:
    with pytest.raises(TrustError, match="host_key_invalid"):
        public_key(text, whole=True)
