"""Our two SSH certificate authorities: one says which machine is which node, one lets us in.

Hosts are known by certificate only, under their node id; the reconciler logs in with a certificate
that ends by itself. Private keys never leave <state dir>/trust.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from reconciler.trust.certificates import (
    CertificateInfo,
    Signature,
    certify,
    read_certificate,
)
from reconciler.trust.errors import TrustError
from reconciler.trust.keygen import new_key, public_key

__all__ = [
    "CertificateInfo",
    "HostCertificate",
    "Identity",
    "Trust",
    "authorities",
    "certify_host",
    "derived_key",
    "known_hosts",
    "open_trust",
    "operator_identity",
    "read_certificate",
    "revoke_host",
    "user_ca",
]

OPERATOR = "gpuaas-operator"
# How long a host's certificate is good for. Renewal begins when a third of it is left: long enough
# for a host that is away for weeks, short enough that a key which was copied does not last.
HOST_DAYS = 90

_PRINCIPAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Hosts judge our certificate by their clock, which may be behind before their time is set.
_BACKDATE = timedelta(hours=1)


@dataclass(frozen=True)
class Trust:
    """The folder of keys; made by `open_trust`."""

    directory: Path

    @property
    def host_authority(self) -> Path:
        return self.directory / "host_ca"

    @property
    def user_authority(self) -> Path:
        return self.directory / "user_ca"

    @property
    def operator(self) -> Path:
        return self.directory / "operator"


@dataclass(frozen=True)
class HostCertificate:
    """text is the line for ssh_host_ed25519_key-cert.pub; the rest is for the record."""

    text: str
    serial: int
    key_id: str
    principals: tuple[str, ...]
    valid_before: datetime
    fingerprint: str


@dataclass(frozen=True)
class Identity:
    """What the reconciler shows to a host, by path."""

    key: Path
    certificate: Path
    known_hosts: Path
    valid_before: datetime


def open_trust(state_dir: Path) -> Trust:
    """The authorities of this state directory, made the first time and never replaced."""
    trust = Trust(state_dir.resolve() / "trust")
    trust.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    trust.directory.chmod(0o700)
    with _alone(trust):
        for key, comment in (
            (trust.host_authority, "gpuaas host authority"),
            (trust.user_authority, "gpuaas user authority"),
            (trust.operator, "gpuaas operator"),
        ):
            _ensure_key(key, comment)
        _write_known_hosts(trust, _revoked(trust))
    return trust


def certify_host(
    trust: Trust,
    host_key: str,
    node_id: str,
    *,
    principals: Sequence[str] = (),
    days: int = HOST_DAYS,
) -> HostCertificate:
    """A host certificate for `node_id`: the only name under which the host can be reached."""
    names = tuple(dict.fromkeys((node_id, *principals)))
    for name in names:
        if not _PRINCIPAL.fullmatch(name):
            raise TrustError(
                "node_id_invalid",
                expected="letters, digits, dot, dash and underscore",
                found=repr(name)[:100],
                remedy="register the node under such an id",
            )
    now = datetime.now(UTC)
    text = certify(
        trust.host_authority,
        host_key,
        Signature(
            key_id=f"node {node_id}",
            principals=names,
            valid_after=now - _BACKDATE,
            valid_before=now + timedelta(days=days),
            serial=secrets.randbits(63),
            host=True,
        ),
    )
    info = read_certificate(text)
    return HostCertificate(
        text=text,
        serial=info.serial,
        key_id=info.key_id,
        principals=info.principals,
        valid_before=info.valid_before,
        fingerprint=info.fingerprint,
    )


def operator_identity(trust: Trust, valid_s: int = 3600) -> Identity:
    """The reconciler's own identity, its certificate good for at least `valid_s` seconds more.

    A run outlives the reconciler that would renew it: ask for longer than its deadline.
    """
    path = trust.directory / "operator-cert.pub"
    now = datetime.now(UTC)
    needed = now + timedelta(seconds=valid_s)
    with _alone(trust):
        if path.exists():
            info = read_certificate(path.read_text())
            if info.valid_before > needed and info.principals == (OPERATOR,):
                return _identity(trust, path, info)
        text = certify(
            trust.user_authority,
            _public(trust.operator),
            Signature(
                key_id=OPERATOR,
                principals=(OPERATOR,),
                valid_after=now - _BACKDATE,
                # Longer than needed, so that the next launch can use the same certificate.
                valid_before=needed + timedelta(minutes=30),
                serial=secrets.randbits(63),
                host=False,
            ),
        )
        _write(path, text + "\n")
    return _identity(trust, path, read_certificate(text))


def user_ca(trust: Trust) -> str:
    """The public key that hosts trust for logging in."""
    return _public(trust.user_authority)


def authorities(trust: Trust) -> dict[str, str]:
    """The public keys of both, by name: what makes two trust folders the same site's."""
    return {key.name: _public(key) for key in (trust.host_authority, trust.user_authority)}


def derived_key(trust: Trust, purpose: str) -> bytes:
    """A secret that every machine of the site has, for this purpose alone; it tells nothing of the
    authority that it is made from.
    """
    secret = trust.user_authority.read_bytes()
    return hmac.new(secret, f"gpuaas {purpose}".encode(), hashlib.sha256).digest()


def known_hosts(trust: Trust) -> Path:
    """Our authority and revoked keys; never the key of a host."""
    return trust.directory / "known_hosts"


def revoke_host(trust: Trust, *host_keys: str) -> None:
    """Refuse these host keys from now on, whatever certificate they have: nodes have new ones."""
    keys = {public_key(key) for key in host_keys}
    with _alone(trust):
        revoked = _revoked(trust)
        new = sorted(keys.difference(revoked))
        if new:
            _write_known_hosts(trust, [*revoked, *new])


def _identity(trust: Trust, certificate: Path, info: CertificateInfo) -> Identity:
    return Identity(trust.operator, certificate, known_hosts(trust), info.valid_before)


def _public(key: Path) -> str:
    return public_key(key.with_name(f"{key.name}.pub").read_text())


def _revoked(trust: Trust) -> list[str]:
    path = known_hosts(trust)
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.removeprefix("@revoked * ") for line in lines if line.startswith("@revoked * ")]


def _write_known_hosts(trust: Trust, revoked: Sequence[str]) -> None:
    lines = [f"@cert-authority * {_public(trust.host_authority)}"]
    lines += [f"@revoked * {key}" for key in revoked]
    _write(known_hosts(trust), "".join(f"{line}\n" for line in lines))


def _ensure_key(path: Path, comment: str) -> None:
    """The private key is put in place last: when it is there, the pair is whole."""
    if path.exists():
        return
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder:
        fresh = Path(folder) / path.name
        new_key(fresh, comment)
        fresh.with_name(f"{path.name}.pub").replace(path.with_name(f"{path.name}.pub"))
        fresh.replace(path)


def _write(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w") as handle:
        handle.write(text)
    Path(name).replace(path)


@contextmanager
def _alone(trust: Trust) -> Iterator[None]:
    """One process at a time makes or renews keys."""
    with (trust.directory / "lock").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
