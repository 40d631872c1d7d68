"""SSH certificates: signing with the key file of an authority, and reading.

The limits are those of ssh-keygen: a key file that other users can read signs nothing, and a
certificate with an invalid signature is not read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateBuilder,
    SSHCertificateType,
    SSHCertPublicKeyTypes,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_identity,
)

from reconciler.model.host_faults import CLOCK_COMMAND
from reconciler.trust.keygen import TrustError, public_key

SigningKey = Ed25519PrivateKey | EllipticCurvePrivateKey | RSAPrivateKey

# Default extensions of a user certificate in ssh-keygen. A host certificate has none.
_USER_EXTENSIONS = (
    b"permit-X11-forwarding",
    b"permit-agent-forwarding",
    b"permit-port-forwarding",
    b"permit-pty",
    b"permit-user-rc",
)
# Values of valid_after and valid_before that mean "no limit".
_ALWAYS, _FOREVER = 0, 2**64 - 1
# NotImplementedError: the point of an ECDSA key is compressed.
_UNREADABLE = (
    *(ValueError, TypeError, OverflowError, NotImplementedError),
    *(UnsupportedAlgorithm, InvalidSignature),
)


@dataclass(frozen=True)
class CertificateInfo:
    """Fields of a certificate. kind is `host` or `user`, and times are UTC.

    key, authority: type and base64 of the key that is certified, and of the one that signed.
    """

    kind: str
    key: str
    authority: str
    key_id: str
    serial: int
    principals: tuple[str, ...]
    valid_after: datetime
    valid_before: datetime


@dataclass(frozen=True)
class Signature:
    """Fields of a certificate to be signed. extensions: rights of a user's certificate."""

    key_id: str
    principals: tuple[str, ...]
    valid_after: datetime
    valid_before: datetime
    serial: int
    host: bool
    extensions: tuple[bytes, ...] = _USER_EXTENSIONS


def certify(authority: Path, key: str, signature: Signature) -> str:
    """A line with a certificate of the public key, signed by the key file `authority`."""
    signer = _signing_key(authority)
    try:
        subject = load_ssh_public_identity(public_key(key).encode())
        if isinstance(subject, SSHCertificate):
            raise ValueError("a certificate instead of a public key")
        builder = (
            SSHCertificateBuilder()
            .public_key(subject)  # type: ignore[arg-type]  # other kinds raise TypeError
            .type(SSHCertificateType.HOST if signature.host else SSHCertificateType.USER)
            .key_id(signature.key_id.encode())
            .serial(signature.serial)
            .valid_principals([name.encode() for name in signature.principals])
            .valid_after(signature.valid_after.timestamp())
            .valid_before(signature.valid_before.timestamp())
        )
        for extension in () if signature.host else signature.extensions:
            builder = builder.add_extension(extension, b"")
        return builder.sign(signer).public_bytes().decode()
    except _UNREADABLE as error:
        raise TrustError(
            "keygen_failed",
            expected="a public key of type Ed25519, ECDSA or RSA",
            found=str(error)[:300],
            remedy="send the content of /etc/ssh/ssh_host_ed25519_key.pub",
        ) from error


def certify_clock(authority: Path, key: str, principal: str) -> str:
    """A line with a user certificate that is always valid, and runs nothing but CLOCK_COMMAND."""
    builder = (
        SSHCertificateBuilder()
        .public_key(load_ssh_public_identity(public_key(key).encode()))  # type: ignore[arg-type]
        .type(SSHCertificateType.USER)
        .key_id(b"clock")
        .serial(0)
        .valid_principals([principal.encode()])
        .valid_after(_ALWAYS)
        .valid_before(_FOREVER)
        .add_critical_option(b"force-command", CLOCK_COMMAND.encode())
    )
    return builder.sign(_signing_key(authority)).public_bytes().decode()


def read_certificate(text: str) -> CertificateInfo:
    """Fields of a certificate. Refuse an invalid signature and an unlimited validity."""
    try:
        certificate = load_ssh_public_identity(text.strip().encode())
        if not isinstance(certificate, SSHCertificate):
            raise ValueError("a public key instead of a certificate")
        certificate.verify_cert_signature()
        if certificate.valid_after == _ALWAYS or certificate.valid_before == _FOREVER:
            raise ValueError("no limit to its validity")
        return CertificateInfo(
            kind="host" if certificate.type is SSHCertificateType.HOST else "user",
            key=_line(certificate.public_key()),
            authority=_line(certificate.signature_key()),
            key_id=certificate.key_id.decode(),
            serial=certificate.serial,
            principals=tuple(name.decode() for name in certificate.valid_principals),
            valid_after=datetime.fromtimestamp(certificate.valid_after, UTC),
            valid_before=datetime.fromtimestamp(certificate.valid_before, UTC),
        )
    except _UNREADABLE as error:
        raise TrustError(
            "certificate_invalid",
            expected="a host or user certificate with a limited validity",
            found=(str(error) or type(error).__name__)[:300],
            remedy="certify the key again",
        ) from error


def _line(key: SSHCertPublicKeyTypes) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def _signing_key(path: Path) -> SigningKey:
    """The private key in a file, in OpenSSH's format or as PEM."""
    try:
        status = path.stat()
        if status.st_uid == os.getuid() and status.st_mode & 0o077:
            raise ValueError(f"mode {status.st_mode & 0o777:03o}: others can read it")
        text = path.read_bytes()
        openssh = b"BEGIN OPENSSH PRIVATE KEY" in text
        key = (load_ssh_private_key if openssh else load_pem_private_key)(text, password=None)
        if not isinstance(key, SigningKey):
            raise ValueError(f"a {type(key).__name__}, which signs no certificates")
    except (OSError, *_UNREADABLE) as error:
        raise TrustError(
            "keygen_failed",
            expected=f"a private key without a passphrase in {path}, with mode 600",
            found=str(error)[:300],
            remedy="restore the trust folder from a backup, or correct the mode",
        ) from error
    return key
