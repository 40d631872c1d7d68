"""SSH key pairs by ssh-keygen, and validation of public keys."""

from __future__ import annotations

import base64
import binascii
import os
import re
import subprocess
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)

from reconciler.model.errors import Refusal

_PUBLIC_KEY = re.compile(
    r"(ssh-ed25519|ecdsa-sha2-nistp(?:256|384|521)|ssh-rsa) (AAAA[A-Za-z0-9+/]{20,2000}={0,2})"
)
_RSA_BITS = 1024
_LIMIT_S = 30


class TrustError(Refusal):
    """A certificate or key cannot be made or read."""


def run(*arguments: str) -> str:
    """Run ssh-keygen and return its output; TrustError `keygen_failed`."""
    environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TZ": "UTC"}
    done = subprocess.run(
        ["ssh-keygen", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise TrustError(
            "keygen_failed",
            expected="ssh-keygen to exit 0",
            found=f"exit {done.returncode}: {done.stderr.strip()[:300]}",
            remedy="check that openssh-client is installed and the state directory is writable",
        )
    return done.stdout


def new_key(path: Path, comment: str) -> None:
    """Create an Ed25519 pair without a passphrase at `path` and `path`.pub."""
    run("-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path))


def public_key(text: str, *, whole: bool = False) -> str:
    """Validate the line of a public key and return its type and base64, without the comment.

    whole: check also what the base64 holds, because the key is that of a host.
    """
    fields = text.strip().split(" ", 2)
    try:
        if "\n" in text.strip() or not _PUBLIC_KEY.fullmatch(" ".join(fields[:2])):
            raise ValueError("not a line with a public key")
        key = plain_key(*fields[:2])
        return whole_key(key) if whole else key
    except ValueError as error:
        raise TrustError(
            "host_key_invalid",
            expected="a single SSH public key: type and base64",
            found=repr(text)[:120],
            remedy="send the content of /etc/ssh/ssh_host_ed25519_key.pub",
        ) from error


def plain_key(kind: str, text: str) -> str:
    """Type and base64 of a public key, in the only spelling of its bytes that OpenSSH reads.

    ValueError for base64 of something else.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError("the key is not base64") from error
    if not data.startswith(len(kind).to_bytes(4, "big") + kind.encode()):
        raise ValueError("the key is not of the type that it names")
    return f"{kind} {base64.b64encode(data).decode()}"


def whole_key(key: str) -> str:
    """A plain key that OpenSSH accepts, in the only spelling of its numbers; ValueError."""
    try:
        read = load_ssh_public_key(key.encode())
    # A compressed point of a curve raises NotImplementedError.
    except (ValueError, UnsupportedAlgorithm, NotImplementedError) as error:
        raise ValueError("the key is incomplete or damaged") from error
    if not isinstance(read, RSAPublicKey):
        return key
    if read.key_size < _RSA_BITS:
        raise ValueError(f"OpenSSH takes no RSA key of less than {_RSA_BITS} bits")
    return read.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
